"""Make packings of spanning trees (TreeGen): ``pack`` chooses the links, tries the methods, returns the best, verified.

It takes NVLink or xGMI where they join the ranks, the shared memory of CPU ranks, else all links. On links it tries the
methods that fit until one meets the bound; :mod:`.on_links` has them, and is imported where links are packed.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from ..topology.model import Topology
from .answer import TIERS, UNPACKED, check_call, checked, nothing, packing_of
from .bounds.verify import verify
from .deadline import NEVER, Deadline
from .graph.fabric import choose_links, shared_memory
from .patterns.shared_memory import CHAINED, WHY, share_memory, star_tree
from .tree import Packing, Tree, trivial

if TYPE_CHECKING:
    from .problem import MethodOptions

MOST_ALL_TO_ALL = 128  # ranks, each with a path to every other one


def pack(
    topology: Topology, collective: str, *, root: int = 0, method: str = "auto", options: MethodOptions | None = None,
    seconds: float | None = None, deadline: Deadline = NEVER,
) -> Packing:  # fmt: skip
    """Plan ``collective`` (one of ``tree.COLLECTIVES``) on this machine.

    One rank gets the trivial packing: a tree without edges of weight 1, and rate and bound 1 MB/s, which stand for
    "no byte travels"; a barrier has the same numbers on a real tree. A collective without a root has ``root`` -1.

    >>> from blinkmpi.topology import machine
    >>> packing = pack(machine("dgx-1v").subset([1, 4, 5, 6]), "allreduce")
    >>> len(packing.trees), packing.depth, packing.rate, packing.optimal
    (2, 2, Fraction(50000, 1), True)

    Args:
        options: limits and settings of the methods that are asked for by name.
        seconds: of CPU time of this thread, after which a search ends with the best that it has found, whose gap to
            the bound is stated; by default what ``deadline`` leaves, or where that has no end ``deadline.SECONDS``.
        deadline: of a plan that has several searches.

    Raises:
        ArgumentError: for an unknown collective or method, a root that is no rank, or an impossible option.
        NoPackingError: where the method that was asked for finds nothing, with the reason.
        TopologyError: if no links join the ranks, or the topology is not one.
    """
    check_call(topology, collective, root)
    memory = shared_memory(topology)
    if collective == "alltoall" and topology.n > MOST_ALL_TO_ALL:
        raise nothing(collective, topology, method, [UNPACKED])
    if topology.n == 1 or collective == "barrier":
        plan = _without_bytes(topology, collective, root, method, memory)
    elif memory is not None:
        names = ("direct", "chain") if collective in CHAINED else ("direct",)
        name = checked(method, names, collective, topology) or names[0]
        proved = share_memory(topology, memory, collective, root, name)
        plan = packing_of(topology, collective, root, name, "memory", proved, WHY[name])
    else:
        from .on_links import pack_on_links
        from .problem import MethodOptions, Problem

        options = (options or MethodOptions()).check()
        links = choose_links(topology, collective, root)
        plan = pack_on_links(Problem(links, collective, root, options, deadline.within(seconds)), method)
    return verify(plan, topology)


def methods(topology: Topology, collective: str, *, root: int = 0, deadline: Deadline = NEVER) -> tuple[str, ...]:
    """The methods that ``auto`` chooses from for ``collective`` on this machine, its own choice first.

    Some may find nothing: :func:`pack` then raises NoPackingError.
    """
    check_call(topology, collective, root)
    memory = shared_memory(topology)
    if collective == "alltoall" and topology.n > MOST_ALL_TO_ALL:
        return ()
    if topology.n == 1 or collective == "barrier":
        return ("direct",) if memory is not None else ("exact",)
    if memory is not None:
        return ("direct", "chain") if collective in CHAINED else ("direct",)
    from .on_links import METHODS, candidates
    from .problem import Problem

    problem = Problem(choose_links(topology, collective, root), collective, root)
    names = candidates(problem)
    if len(names) < 2:
        return names
    chosen = pack(topology, collective, root=root, deadline=deadline).scheme
    if chosen == TIERS:  # other methods take seconds on so many ranks
        return (TIERS,)
    names = tuple(name for name in names if METHODS[name].scheme == chosen or not METHODS[name].is_costly(problem))
    return tuple(sorted(names, key=lambda name: METHODS[name].scheme != chosen))


def extra_methods(topology: Topology, collective: str, *, root: int = 0) -> tuple[str, ...]:
    """Further methods that :func:`pack` accepts by name: slower ones, and baselines."""
    check_call(topology, collective, root)
    if topology.n == 1 or collective == "barrier" or shared_memory(topology) is not None:
        return ()
    from .on_links import AUTOMATIC, METHODS
    from .problem import Problem

    problem = Problem(choose_links(topology, collective, root), collective, root)
    return tuple(name for name, m in METHODS.items() if name not in AUTOMATIC and m.can(problem))


def _without_bytes(t: Topology, collective: str, root: int, method: str, memory: int | None) -> Packing:
    """The packing for one rank alone, or for a barrier: one tree, no rate."""
    name = "exact" if memory is None else "direct"
    checked(method, (name,), collective, t)
    links, tree, why = "", Tree(0, (), Fraction(1)), "one rank"
    if t.n > 1:
        why = "a barrier moves no bytes"
        if memory is not None:
            links, tree = "memory", star_tree(t.n, memory)
        else:
            from .patterns import chains

            fabric = choose_links(t, collective, 0)
            links, tree = "+".join(fabric.kinds), chains.shallow(fabric, 0)
    scheme = "trees" if name == "exact" else name
    return packing_of(t, collective, root, name, links, ((tree,), Fraction(1), trivial(why)), why, scheme)
