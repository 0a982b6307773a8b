"""Bounds, trees and packings (Blink section 3, TreeGen): a machine in, weighted trees with a proof out.

Pure functions of a :class:`~blinkmpi.topology.model.Topology`; no MPI, no GPU, no I/O.
"""

from __future__ import annotations

from .blink.pareto import choose_by_size, fewest, pareto
from .bounds.verify import verify
from .pack import extra_methods, methods, pack
from .problem import MethodOptions
from .tree import AGAINST, ALONG, COLLECTIVES, ROOTED, Certificate, Collective, Edge, Packing, Tree

__all__ = [
    "AGAINST",
    "ALONG",
    "COLLECTIVES",
    "ROOTED",
    "Certificate",
    "Collective",
    "Edge",
    "MethodOptions",
    "Packing",
    "Tree",
    "choose_by_size",
    "extra_methods",
    "fewest",
    "methods",
    "pack",
    "pareto",
    "verify",
]
