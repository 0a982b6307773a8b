"""TreeGen (Blink section 3): a machine in, a proved packing of weighted spanning trees out.

``tree``       the result: trees, packings, certificates
``packing``    the entry point: chooses the links, has the trees packed, and the packing verified
``on_links``   the table of methods: tries them and keeps the best
``pareto_front``  the packings between few, shallow and fast
``problem``    what a method gets (fabric, collective, root, options) and what it returns; ``deadline`` its time
``answer``     what ``pack`` answers: the packing, or why there is none
``graph/``     the capacitated graph: link selection, switch splitting, cuts, maximum flows, loads of trees
``bounds/``    ``certify`` finds the best possible rate and its certificate, ``verify`` proves a packing
``exact/``     methods that meet the bound: Edmonds' arborescences, Cayley graphs, linear programs over trees or paths
``patterns/``  fixed patterns: one-hop stars, chains, one shared memory; shallow trees; two kinds of links at once
``cluster/``   several boxes on a network: spanning trees over all of them
``in_switch/`` AllReduce with sums in the switches (SHARP): planned and simulated, never part of a job's plan
``baselines/`` what is only taken by name: Blink's own stages, few trees, NCCL's rings

Everything here is a pure function of a :class:`~blinkmpi.topology.model.Topology`; no MPI, no GPU, no I/O.
"""

from typing import TYPE_CHECKING

from ..util.lazy import lazily

if TYPE_CHECKING:
    from .bounds.verify import verify
    from .packing import extra_methods, methods, pack
    from .pareto_front import fewest, pareto
    from .problem import MethodOptions
    from .tree import AGAINST, ALONG, COLLECTIVES, ROOTED, Certificate, Collective, Edge, Packing, Tree
else:
    __getattr__, __dir__ = lazily(__name__, {
        "pareto_front": ("fewest", "pareto"),
        "bounds.verify": ("verify",),
        "packing": ("extra_methods", "methods", "pack"),
        "problem": ("MethodOptions",),
        "tree": ("AGAINST", "ALONG", "COLLECTIVES", "ROOTED", "Certificate", "Collective", "Edge", "Packing", "Tree"),
    })  # fmt: skip

__all__ = [
    "AGAINST", "ALONG", "COLLECTIVES", "ROOTED", "Certificate", "Collective", "Edge", "MethodOptions", "Packing",
    "Tree", "extra_methods", "fewest", "methods", "pack", "pareto", "verify",
]  # fmt: skip
