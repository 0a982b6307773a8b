"""Make a plan (``make_plan``): pack for every collective and root, and fill the selection table.

The table's defaults are in :mod:`.defaults`; ``BLINKMPI_ALGO`` or an argument overrides them. In a job rank 0 alone
plans, so what every rank needs of a plan lies elsewhere (:mod:`.plan`, :mod:`.selection`).
"""

from collections.abc import Sequence
from typing import cast

from msgspec.structs import replace

from ..errors import NoPackingError
from ..topology.model import Topology
from ..trees.answer import is_shallow
from ..trees.deadline import NEVER, SECONDS, Deadline
from ..trees.graph.automorphism import like_roots
from ..trees.packing import extra_methods, methods, pack
from ..trees.tree import CARRIED, COLLECTIVES, MAY_BE_CARRIED, ROOTED, Collective, Packing, packed_as
from .defaults import host_rules
from .plan import PassedOver, Plan, Rule, Turn
from .selection import parse_algo
from .slots import Gpus

MOST_DEPTHS = 4  # limits on the hops of trees that are tried
ALL_COLLECTIVES: tuple[Collective, ...] = (*COLLECTIVES, *CARRIED)
ALL_SCHEMES_RANKS = 16  # beyond, a plan holds only what its table names


def make_plan(
    topology: Topology, *, algo: str = "", mpi: bool = False, gpus: Gpus = "",
    collectives: Sequence[Collective] = ALL_COLLECTIVES, roots: Sequence[int] | None = None,
    seconds: float = SECONDS, max_ctas: int = 0,
) -> Plan:  # fmt: skip
    """Pack for every collective and root, and fill the selection table.

    Args:
        algo: overrides, as in ``BLINKMPI_ALGO``: ``allreduce:chain;broadcast:^mpi``.
        mpi: whether small vectors may go to MPI's own collective (a live job on CPU ranks).
        gpus: where GPUs run it: ``onehop`` if each reaches every other over one hop, ``slots`` if the machine's links
            are only emulated, which slots alone do; ``nodes`` if they lie on several.
        collectives, roots: pack for these alone, where one answer is wanted and not a whole plan.
        seconds: of CPU time of this thread, after which searches end with the best that they have found.
        max_ctas: CTAs that a kernel on a GPU shall have; 0: as many as there may be.

    Raises:
        TopologyError: if the machine is not connected. SettingsError: for an impossible ``algo``.
    """
    if roots is None or set(MAY_BE_CARRIED) & set(collectives):  # which may take the scatters of all roots
        roots = range(topology.n)
    alike = like_roots(topology, max(roots, default=-1))
    turns = tuple(Turn(root, *alike[root]) for root in roots if root in alike)
    roots = list(dict.fromkeys(alike[root][0] if root in alike else root for root in roots))
    packings, passed = _packings(topology, gpus, collectives, roots, NEVER.within(seconds))
    wanted = parse_algo(algo)
    plan = Plan(topology.name, topology.fingerprint, topology.n, packings, (), passed, turns)
    rules: list[Rule] = []
    for c in collectives:
        asked = wanted.get(c, ())
        if gpus:
            from .gpus.rules import gpu_rules

            rules += gpu_rules(plan, topology, c, asked, gpus, max_ctas)
        else:
            rules += host_rules(plan, topology, c, asked, mpi)
    chosen = {(plan.packed_as(rule.collective), rule.scheme) for rule in rules}
    spare = plan.n <= ALL_SCHEMES_RANKS
    kept = [p for p in packings if (p.collective, p.scheme) in chosen or (spare and not is_shallow(p))]
    return replace(plan, packings=tuple(kept), rules=tuple(rules)).check(topology)


def planned_with(collective: Collective, gpus: Gpus) -> tuple[Collective, ...]:
    """A collective, and the one whose trees its rows name, too: ``rs_ag`` takes those of a reduce-scatter."""
    by_rs_ag = gpus == "onehop" and collective == "allreduce"
    return (collective, "reduce_scatter") if by_rs_ag else (collective,)


def _packings(
    topology: Topology, gpus: Gpus, collectives: Sequence[Collective], roots: Sequence[int], deadline: Deadline
) -> tuple[tuple[Packing, ...], tuple[PassedOver, ...]]:
    """All packings for some collectives and roots, and what found none.

    Where time is short, it is spent on every collective before other roots get any.
    """
    packings: list[Packing] = []
    passed: list[PassedOver] = []
    unpacked = "alltoall" in collectives and not methods(topology, "alltoall", deadline=deadline)
    calls = _calls([c for c in collectives if c != "alltoall"] + ["scatter"] if unpacked else collectives, roots)
    first = dict(reversed(calls))
    for collective, root in sorted(calls, key=lambda call: first[call[0]] != call[1]):
        found, none = all_packings(topology, collective, max(root, 0), gpus, deadline)
        packings += found
        passed += none
    order = {call: i for i, call in enumerate(calls)}
    return (
        tuple(sorted(packings, key=lambda p: order[p.collective, p.root])),
        tuple(sorted(passed, key=lambda p: order[p.collective, p.root])),
    )


def all_packings(
    topology: Topology, collective: Collective, root: int, gpus: Gpus = "", deadline: Deadline = NEVER
) -> tuple[list[Packing], list[PassedOver]]:
    """The packings of all methods for one collective and root, the best of each scheme, and what found none."""
    found: dict[str, Packing] = {}
    passed: list[PassedOver] = []
    names = methods(topology, collective, root=root, deadline=deadline)
    extra = extra_methods(topology, collective, root=root)
    host_path = gpus != "nodes" and "hybrid" in extra
    for method in (*names, *(["hybrid"] if host_path else [])):
        try:
            packing = pack(topology, collective, root=root, method=method, deadline=deadline)
        except NoPackingError as nothing:
            passed.append(PassedOver(collective, root if collective in ROOTED else -1, method, nothing.why))
            continue
        if packing.scheme not in found or found[packing.scheme].rate < packing.rate:  # two methods may be of one scheme
            found[packing.scheme] = packing
    if "shallow" in extra and found and not deadline.late():
        found |= {p.scheme: p for p in _shallower(topology, collective, root, list(found.values()), deadline)}
    return list(found.values()), passed


def _shallower(
    topology: Topology, collective: Collective, root: int, there: Sequence[Packing], deadline: Deadline
) -> list[Packing]:
    """Packings of shallower trees than those there are, for short vectors; none that another one beats.

    Of many ranks there is one, of which the messages arrive soonest, and depth does not say which of two is better.
    """
    from ..trees.problem import MANY_RANKS, MethodOptions

    found: list[Packing] = []
    fastest = max(p.rate for p in there)
    least, enough = min(p.depth for p in there), min(p.depth for p in there if p.rate == fastest)
    limit: int | None = None
    for _ in range(MOST_DEPTHS if least > 1 else 0):
        try:
            options = MethodOptions(max_depth=limit, quick=True)
            packing = pack(topology, collective, root=root, method="shallow", options=options, deadline=deadline)
        except NoPackingError:  # too many trees of so many hops to choose from: deeper ones have a method of their own
            break
        beaten = any(p.depth <= packing.depth and p.rate >= packing.rate for p in (*there, *found))
        if topology.n > MANY_RANKS or not beaten:
            found.append(packing)
        limit = (limit or packing.depth) + 1
        if limit >= enough or packing.rate >= fastest:
            break
    return found


def _calls(collectives: Sequence[Collective], roots: Sequence[int]) -> list[tuple[Collective, int]]:
    """Collectives that are packed, and their roots; -1 for those without."""
    calls: list[tuple[Collective, int]] = []
    for collective in dict.fromkeys(cast(Collective, packed_as(c)) for c in collectives):
        calls += [(collective, root) for root in (roots if collective in ROOTED else [-1])]
    return calls
