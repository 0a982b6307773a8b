"""Make a plan (``make_plan``), and decide which scheme, protocol and chunk a call takes (``choose``).

The selection table's defaults are in :mod:`.defaults`; ``BLINKMPI_ALGO`` or an argument overrides them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from msgspec.structs import replace

from ..errors import NoPackingError, SettingsError
from ..lang.algorithms import SCHEME, Algorithm
from ..program.call import Call, call_of_bytes, collective_named
from ..program.check import check
from ..program.ir import Program, Wire
from ..program.lower import lower
from ..program.one_shot import one_shot
from ..topology.model import Topology
from ..trees.deadline import SECONDS, late, within
from ..trees.graph.turning import like_roots
from ..trees.packing import extra_methods, methods, pack
from ..trees.patterns.shallow import is_shallow
from ..trees.problem import MethodOptions
from ..trees.tree import CARRIED, COLLECTIVES, MAY_BE_CARRIED, ROOTED, Collective, Packing, packed_as
from ..util.text import quoted
from .algorithms import chunk_of_algorithm
from .defaults import Gpus, gpu_rules, host_rules
from .memory_rows import in_place_row
from .plan import ONE_SHOTS, PACKETS, PassedOver, Plan, Rule, Turn, chunk_for

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
        seconds: after which searches end with the best that they have found.
        max_ctas: CTAs that a kernel on a GPU shall have; 0: as many as there may be.

    Raises:
        TopologyError: if the machine is not connected. SettingsError: for an impossible ``algo``.
    """
    if roots is None or set(MAY_BE_CARRIED) & set(collectives):  # which may take the scatters of all roots
        roots = range(topology.n)
    alike = like_roots(topology)
    turns = tuple(Turn(root, *alike[root]) for root in roots if root in alike)
    roots = list(dict.fromkeys(alike[root][0] if root in alike else root for root in roots))
    with within(seconds):
        packings, passed = _packings(topology, gpus, collectives, roots)
    wanted = parse_algo(algo)
    plan = Plan(topology.name, topology.fingerprint, topology.n, packings, (), passed, turns)
    rules: list[Rule] = []
    for c in collectives:
        asked = wanted.get(c, ())
        if gpus:
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
    topology: Topology, gpus: Gpus, collectives: Sequence[Collective], roots: Sequence[int]
) -> tuple[tuple[Packing, ...], tuple[PassedOver, ...]]:
    """All packings for some collectives and roots, and what found none.

    Where time is short, it is spent on every collective before other roots get any.
    """
    packings: list[Packing] = []
    passed: list[PassedOver] = []
    unpacked = "alltoall" in collectives and not methods(topology, "alltoall")
    calls = _calls([c for c in collectives if c != "alltoall"] + ["scatter"] if unpacked else collectives, roots)
    first = dict(reversed(calls))
    for collective, root in sorted(calls, key=lambda call: first[call[0]] != call[1]):
        found, none = all_packings(topology, collective, max(root, 0), gpus)
        packings += found
        passed += none
    order = {call: i for i, call in enumerate(calls)}
    return (
        tuple(sorted(packings, key=lambda p: order[p.collective, p.root])),
        tuple(sorted(passed, key=lambda p: order[p.collective, p.root])),
    )


def all_packings(
    topology: Topology, collective: Collective, root: int, gpus: Gpus = ""
) -> tuple[list[Packing], list[PassedOver]]:
    """The packings of all methods for one collective and root, the best of each scheme, and what found none."""
    found: dict[str, Packing] = {}
    passed: list[PassedOver] = []
    names = methods(topology, collective, root=root)
    extra = extra_methods(topology, collective, root=root)
    host_path = gpus != "nodes" and "hybrid" in extra
    for method in (*names, *(["hybrid"] if host_path else [])):
        try:
            packing = pack(topology, collective, root=root, method=method)
        except NoPackingError as nothing:
            passed.append(PassedOver(collective, root if collective in ROOTED else -1, method, nothing.why))
            continue
        if packing.scheme not in found or found[packing.scheme].rate < packing.rate:  # two methods may be of one scheme
            found[packing.scheme] = packing
    if "shallow" in extra and found and not late():
        found |= {p.scheme: p for p in _shallower(topology, collective, root, list(found.values()))}
    return list(found.values()), passed


def _shallower(topology: Topology, collective: Collective, root: int, there: Sequence[Packing]) -> list[Packing]:
    """Packings of shallower trees than those there are, for short vectors; none that another one beats."""
    found: list[Packing] = []
    fastest = max(p.rate for p in there)
    least, enough = min(p.depth for p in there), min(p.depth for p in there if p.rate == fastest)
    limit: int | None = None
    for _ in range(MOST_DEPTHS if least > 1 else 0):
        try:
            options = MethodOptions(max_depth=limit)
            packing = pack(topology, collective, root=root, method="shallow", options=options)
        except NoPackingError:  # too many trees of so many hops to choose from: deeper ones have a method of their own
            break
        if not any(p.depth <= packing.depth and p.rate >= packing.rate for p in (*there, *found)):
            found.append(packing)
        limit = (limit or packing.depth) + 1
        if limit >= enough:
            break
    return found


def _calls(collectives: Sequence[Collective], roots: Sequence[int]) -> list[tuple[Collective, int]]:
    """Collectives that are packed, and their roots; -1 for those without."""
    calls: list[tuple[Collective, int]] = []
    for collective in dict.fromkeys(cast(Collective, packed_as(c)) for c in collectives):
        calls += [(collective, root) for root in (roots if collective in ROOTED else [-1])]
    return calls


def parse_algo(text: str) -> dict[str, tuple[str, ...]]:
    """Read ``allreduce:trees,onehop;broadcast:^mpi`` into allowed (or, with ``^``, excluded) schemes by collective.

    Raises:
        SettingsError: for a malformed entry or an unknown collective.
    """
    found: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, colon, schemes = entry.partition(":")
        collective = collective_named(name)
        if not colon or not schemes:
            expected = "COLLECTIVE:SCHEME[,SCHEME], as in allreduce:chain"
            raise SettingsError(f"BLINKMPI_ALGO entry {quoted(entry)}: expected {expected}")
        found[collective] = tuple(s.strip() for s in schemes.split(","))
    return found


def choose(
    plan: Plan, call: Call, *, registered: bool = False, mpi: bool = True,
    fits: Callable[[Call, str], bool] = lambda _call, _protocol: True,
) -> Rule:  # fmt: skip
    """The row of the table that carries ``call``: its scheme, protocol and chunks.

    Args:
        registered: whether the buffers are GPU memory that all ranks have mapped.
        mpi: whether MPI's own collective may carry it.
        fits: whether a protocol of packets can carry a call; one that cannot is passed over.
    """
    widened = call.widened and plan.wire == "accumulator"
    rule = plan.rule(call.collective, call.nbytes, root=call.root, registered=registered, widened=widened)
    by_kind = plan.rows(call.collective, call.root, widened=widened)
    if rule.scheme == "mpi" and not mpi:
        rows = sorted((r for kind in by_kind.values() for r in kind if r.scheme != "mpi"), key=lambda r: r.min_bytes)
        longer = [r for r in rows if r.min_bytes > rule.min_bytes]
        if rows:  # a row for shorter vectors may be one that longer ones do not fit
            rule = longer[0] if longer else replace(rows[-1], protocol="slots")
    if call.in_place:
        rule = in_place_row(rule, call, [row for rows in by_kind.values() for row in rows])
    uneven = rule.protocol == "direct" and not call.even and call.collective != "reduce_scatter"
    if uneven or (rule.protocol in PACKETS and not fits(call, rule.protocol)):
        passed = (*PACKETS, "direct") if uneven else PACKETS
        left = {kind: [r for r in rows if r.protocol not in passed] for kind, rows in by_kind.items()}
        rows = left.get(registered) or left.get(False, [])
        rows = [r for r in rows if not r.scheme.startswith(SCHEME)]  # which take calls of their sizes alone
        forced = replace(rule, protocol="slots")  # by an algo= that leaves no other
        rule = min(rows or [forced], key=lambda r: r.min_bytes)
    return rule


def kernel_call(call: Call, rule: Rule) -> Call:
    """The call whose program shows what the kernels of a call by ``rule`` send: by ``rs_ag`` its reduce-scatter."""
    if rule.protocol != "rs_ag":
        return call
    return call_of_bytes("reduce_scatter", call.n, call.nbytes, dtype=call.dtype, op=call.op)


def program_for(
    plan: Plan, call: Call, rule: Rule, *, budget_bytes: int = 0, nodes: Sequence[int] = (), multicast: bool = False
) -> Program:
    """Lower ``call`` by ``rule``; slots shrink so that no rank's take more than ``budget_bytes`` (0: no limit).

    Args:
        nodes: the node of each rank, if they lie on several; a chunk has a slot on both sides of a channel between two.
        multicast: whether an algorithm's values may have one slot for all readers.

    Raises:
        PlanError: if the plan lacks the packing or algorithm. The program is proved before it is returned.
    """
    if rule.protocol in ONE_SHOTS:
        return check(one_shot(call, nodes))
    made = plan.algorithm(call.collective, call.root, rule.scheme)
    if made is not None:
        chunk_bytes = chunk_of_algorithm(made, call, rule, multicast=multicast)
        lowered: Callable[[int], Program] = partial(_by_algorithm, made, call, rule.depth, multicast)
    else:
        packing = plan.packing(call.collective, call.root, rule.scheme)
        chunk_bytes = chunk_for(packing, call, rule)
        lowered = partial(_by_packing, packing, call, rule.depth, plan.wire)
    program = lowered(chunk_bytes)
    if budget_bytes and program.channels:
        slots = [0] * call.n
        for channel in program.channels:
            slots[channel.writer] += 1
            for r in channel.readers if nodes else ():
                slots[r] += nodes[r] != nodes[channel.writer]
        busiest = max(slots)
        room = budget_bytes // (busiest * rule.depth) - 128
        if room < chunk_bytes:
            program = lowered(max(64, room // 64 * 64))
    return program


def _by_packing(packing: Packing, call: Call, depth: int, wire: Wire, chunk_bytes: int) -> Program:
    return check(lower(packing, call, chunk_bytes=chunk_bytes, depth=depth, wire=wire))


def _by_algorithm(made: Algorithm, call: Call, depth: int, multicast: bool, chunk_bytes: int) -> Program:
    return made.program(call, chunk_bytes=chunk_bytes, depth=depth, multicast=multicast)
