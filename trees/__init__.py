"""Bounds, trees and packings (Blink section 3, TreeGen): a machine in, weighted trees with a proof out.

Pure functions of a :class:`~blinkmpi.topology.model.Topology`; no MPI, no GPU, no I/O.
"""

from __future__ import annotations

from .pack import methods, pack
from .tree import AGAINST, ALONG, COLLECTIVES, ROOTED, Certificate, Collective, Edge, Packing, Tree
from .verify import verify

__all__ = [
    "AGAINST",
    "ALONG",
    "COLLECTIVES",
    "ROOTED",
    "Certificate",
    "Collective",
    "Edge",
    "Packing",
    "Tree",
    "methods",
    "pack",
    "verify",
]
