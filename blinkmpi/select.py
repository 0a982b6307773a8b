"""Make a plan, and choose from it: which scheme, with which chunks, for which call.

The selection table's defaults come from measurements (docs/design.md tells
which); ``BLINKMPI_ALGO`` or an argument overrides them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from .errors import SettingsError
from .lower import lower
from .plan import Plan, Road, Rule, chunk_for, nbytes_of
from .program import Call, Program
from .topology.model import Topology
from .trees import extra_methods, methods, pack
from .trees.tree import COLLECTIVES, ROOTED, Collective, Packing

KIB, MIB = 1 << 10, 1 << 20
Gpus = Literal["", "onehop", "slots", "nodes"]
SLOTS: Road = "slots"
ROADS = ("oneshot", "twoshot", "oneshot128", "twoshot128", "direct", "slots")  # between GPUs over one hop
TRIED, EXPECTED = "default: from trials on one machine", "default: expected from trials on two GPUs"
LINES = ("oneshot128", "twoshot128")  # of them, those that NVLink alone carries: a line stays whole on its way
# (largest slot in bytes, slots of a channel), from trials on one machine: docs/design.md
LINK_SLOTS = (128 * KIB, 4)
MEMORY_SLOTS = (512 * KIB, 4)
# Shorter vectors on shared memory are left to MPI's own collective, as we call it (non-blocking, with a deadline),
# where the ranks cannot read one another's memory or NumPy runs the steps: for 2 ranks, for more.
MPI_BELOW_BYTES = {
    "allreduce": (256 * KIB, 256 * KIB),
    "reduce_scatter": (1 * MIB, 1 * MIB),
    "reduce": (2 * MIB, 2 * MIB),
    "broadcast": (16 * MIB, 2 * MIB),
    "allgather": (1 * MIB, 2 * MIB),
    "gather": (64 * MIB, 64 * MIB),
    "scatter": (64 * MIB, 64 * MIB),
}
SMALLEST = 256  # where they can: the shortest vector of the trials, in which MPI, so called, was faster at no size
# The same for ranks on several nodes, from trials on two hosts of one machine, 2 and 4 ranks each.
MPI_BELOW_BYTES_ACROSS = {
    "allreduce": 512 * KIB,
    "reduce_scatter": 512 * KIB,
    "reduce": 4 * MIB,
    "broadcast": 1 * MIB,
    "allgather": 4 * MIB,
    "gather": 4 * MIB,
    "scatter": 64 * MIB,
}
# On shared memory a vector crosses by cma, one copy and not two, from the first of these sizes on and below the second
# (None: at every size from there on). Shorter ones cost less through slots; of longer ones slots keep two cores at
# work, or a chunk that many read in the caches.
CMA_BYTES: dict[str, tuple[tuple[int, int | None], tuple[int, int | None]]] = {
    "allreduce": ((512 * KIB, 32 * MIB), (4 * MIB, 16 * MIB)),
    "reduce_scatter": ((32 * KIB, None), (1 * MIB, None)),
    "broadcast": ((32 * KIB, None), (128 * KIB, 8 * MIB)),
    "allgather": ((32 * KIB, None), (128 * KIB, 8 * MIB)),
    "gather": ((32 * KIB, 64 * MIB), (128 * KIB, 64 * MIB)),
    "scatter": ((32 * KIB, None), (128 * KIB, None)),
}

GPU_SLOTS = (32 * KIB, 4)
NODE_SLOTS, NODE_CTAS = (512 * KIB, 2), 16  # of channels between nodes: a chunk is a message, and few threads keep up
# Between GPUs that reach one another over one hop: bytes of the whole vector where the next road begins, for at most 2,
# at most 4, and more ranks. From trials on two H200; beyond, from those and the rate of the links. `blinkmpi tune`
# measures. Packets of 16 bytes in one shot carry vectors below the first size, lines of 128 in one shot those below the
# second, in two shots those below the third.
_BLOCKS = ((192 * KIB, 8 * MIB, 0), (256 * KIB, 3 * MIB, 0), (256 * KIB, 3 * MIB, 0))
PACKETS_BELOW = {
    "allreduce": ((96 * KIB, 768 * KIB, 3 * MIB), (64 * KIB, 384 * KIB, 6 * MIB), (32 * KIB, 96 * KIB, 6 * MIB)),
    "broadcast": ((160 * KIB, 4352 * KIB, 0), (96 * KIB, 384 * KIB, 6 * MIB), (64 * KIB, 96 * KIB, 6 * MIB)),
    "reduce": ((160 * KIB, 4352 * KIB, 0), (96 * KIB, 384 * KIB, 6 * MIB), (64 * KIB, 96 * KIB, 6 * MIB)),
    "allgather": _BLOCKS,
    "reduce_scatter": _BLOCKS,
    "gather": _BLOCKS,
    "scatter": _BLOCKS,
}
DIRECT_FROM = {  # at the latest, where buffers are registered
    "broadcast": (8 * MIB, 1536 * KIB, 1536 * KIB),
    "allgather": (3 * MIB, 3 * MIB, 3 * MIB),
    "reduce_scatter": (6 * MIB, 3 * MIB, 3 * MIB),
}
TWOSHOT_BELOW = 384 * KIB  # allreduce of more than 2 ranks, where lines of 128 bytes may not stay whole
DIRECT_BELOW = {"allreduce": 32 * MIB, "reduce": 0, "reduce_scatter": 24 * MIB}  # registered; then slots again
CHAIN_FROM = {"allreduce": 16 * MIB}  # more than 2 ranks: one peer at a time uses the wire best
HALVES_FROM = 64 * MIB  # registered, more than 2 ranks: results go straight to where they belong, not through slots


def make_plan(
    topology: Topology,
    *,
    algo: str = "",
    mpi: bool = False,
    gpus: Gpus = "",
    collectives: Sequence[Collective] = COLLECTIVES,
    roots: Sequence[int] | None = None,
) -> Plan:
    """Pack for every collective and root, and fill the selection table.

    Args:
        algo: overrides, as in ``BLINKMPI_ALGO``: ``allreduce:chain;broadcast:^mpi``.
        mpi: whether small vectors may go to MPI's own collective (a live job on CPU ranks).
        gpus: where GPUs run it: ``onehop`` if each reaches every other over one hop, ``slots`` if the machine's links
            are only emulated, which slots alone do; ``nodes`` if they lie on several.
        collectives, roots: pack for these alone, where one answer is wanted and not a whole plan.

    Raises:
        TopologyError: if the machine is not connected. SettingsError: for an impossible ``algo``.
    """
    packings: dict[tuple[str, int, str], Packing] = {}
    for collective in collectives:
        for root in (range(topology.n) if roots is None else roots) if collective in ROOTED else (-1,):
            root_ = max(root, 0)
            found = list(methods(topology, collective, root=root_))
            if gpus and "hybrid" in extra_methods(topology, collective, root=root_):
                found.append("hybrid")
            for method in found:
                packing = pack(topology, collective, root=max(root, 0), method=method)
                packings.setdefault((collective, packing.root, packing.scheme), packing)
    wanted = parse_algo(algo)
    plan = Plan(
        machine=topology.name,
        fingerprint=topology.fingerprint,
        n=topology.n,
        packings=tuple(packings.values()),
        rules=(),
    )
    if gpus:
        rules = [rule for c in collectives for rule in _gpu_rules(plan, topology, c, wanted.get(c, ()), gpus)]
    else:
        rules = [rule for c in collectives for rule in _rules(plan, topology, c, wanted.get(c, ()), mpi)]
    return Plan(plan.machine, plan.fingerprint, plan.n, plan.packings, tuple(rules)).check(topology)


def parse_algo(text: str) -> dict[str, tuple[str, ...]]:
    """Read ``allreduce:trees,onehop;broadcast:^mpi`` into allowed (or, with ``^``, excluded) schemes by collective.

    Raises:
        SettingsError: for a malformed entry or an unknown collective.
    """
    found: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, colon, schemes = entry.partition(":")
        collective = canonical(name)
        if not colon or not schemes:
            raise SettingsError(
                f"BLINKMPI_ALGO entry {entry!r}: expected COLLECTIVE:SCHEME[,SCHEME], as in allreduce:chain"
            )
        found[collective] = tuple(s.strip() for s in schemes.split(","))
    return found


def canonical(name: str) -> Collective:
    """Our name of a collective, from MPI's or nccl-tests': ``all_reduce``, ``Allreduce``, ``bcast``.

    Raises:
        SettingsError: for an unknown name.
    """
    plain = name.strip().lower().removesuffix("_perf").replace("_", "").replace("-", "").replace("block", "")
    plain = "broadcast" if plain == "bcast" else plain
    for collective in COLLECTIVES:
        if collective.replace("_", "") == plain:
            return collective
    raise SettingsError(f"collective {name!r} is unknown; use one of {', '.join(COLLECTIVES)}")


def choose(plan: Plan, call: Call) -> Rule:
    """The row of the table for ``call``."""
    return plan.rule(call.collective, nbytes_of(call))


def program_for(plan: Plan, call: Call, rule: Rule, *, budget_bytes: int = 0, nodes: Sequence[int] = ()) -> Program:
    """Lower ``call`` by ``rule``; slots shrink so that no rank's take more than ``budget_bytes`` (0: no limit).

    Args:
        nodes: the node of each rank, if they lie on several; a chunk has a slot on both sides of a channel between two.

    Raises:
        PlanError: if the plan lacks the packing. The program is checked before it is returned.
    """
    packing = plan.packing(call.collective, call.root, rule.scheme)
    chunk_bytes = chunk_for(packing, call, rule.chunk_bytes)
    program = lower(packing, call, chunk_bytes=chunk_bytes, depth=rule.depth)
    if budget_bytes and program.channels:
        slots = [0] * call.n
        for channel in program.channels:
            slots[channel.writer] += 1
            for r in channel.readers if nodes else ():
                slots[r] += nodes[r] != nodes[channel.writer]
        busiest = max(slots)
        room = budget_bytes // (busiest * rule.depth) - 128
        if room < chunk_bytes:
            program = lower(packing, call, chunk_bytes=max(64, room // 64 * 64), depth=rule.depth)
    return program.check()


def by_slots(plan: Plan) -> Plan:
    """The plan for ranks that cannot read one another's memory: no road ``cma``, and longer vectors left to MPI."""
    why = "the ranks cannot read one another's memory"
    rules: list[Rule] = []
    for rule in plan.rules:
        mpi = any(r.scheme == "mpi" and r.collective == rule.collective for r in plan.rules)
        floor = MPI_BELOW_BYTES.get(rule.collective, (0, 0))[plan.n > 2] if mpi else 0
        if rule.scheme == "mpi" and floor:
            rule = replace(rule, reason=f"default: below {floor} bytes MPI was faster in trials on one machine")
        elif rule.min_bytes < floor or rule.road == "cma":
            rule = replace(rule, min_bytes=max(rule.min_bytes, floor), road="slots", reason=why)
        if not any((r.collective, r.min_bytes) == (rule.collective, rule.min_bytes) for r in rules):
            rules.append(rule)
    return replace(plan, rules=tuple(rules))


def _rules(plan: Plan, topology: Topology, collective: Collective, wanted: tuple[str, ...], mpi: bool) -> list[Rule]:
    """The rows for one collective: MPI below the measured size (if it may), the first scheme from there on."""
    packings = [p for p in plan.packings if p.collective == collective]
    schemes = _schemes(plan, collective)
    memory = packings[0].multicast
    chunk, depth = MEMORY_SLOTS if memory else LINK_SLOTS
    small = SMALLEST if memory and mpi and plan.n > 1 and collective in MPI_BELOW_BYTES else 0
    if mpi and len(topology.nodes) > 1:
        small = MPI_BELOW_BYTES_ACROSS.get(collective, 0)
    reason = "" if len(schemes) > 1 else f"the one scheme for {collective} here"
    rules = [Rule(collective, small, schemes[0], chunk, depth, reason)]
    if memory and collective in CMA_BYTES:
        first, end = CMA_BYTES[collective][plan.n > 2]
        why = "default: {} were faster in trials on one machine"
        rules = [replace(rules[0], reason=why.format(f"below {first} bytes slots"))]
        rules.append(replace(rules[0], min_bytes=first, road="cma", reason="one copy, from process to process"))
        if end is not None:
            rules.append(replace(rules[0], min_bytes=end, reason=why.format(f"from {end} bytes slots")))
    if small:
        trials = "on one machine" if len(topology.nodes) == 1 else "on two hosts made of one machine"
        why = f"MPI was faster in trials {trials}" if small > SMALLEST else "nothing was tried"
        rules.insert(0, Rule(collective, 0, "mpi", reason=f"default: below {small} bytes {why}"))
    if not wanted:
        return rules
    allowed = _allowed(topology, collective, wanted, [*schemes, "mpi"])
    kept = [r for r in rules if r.scheme in allowed] or [Rule(collective, 0, allowed[0], chunk, depth)]
    lowest = min(r.min_bytes for r in kept)
    return [replace(r, min_bytes=0 if r.min_bytes == lowest else r.min_bytes, reason="BLINKMPI_ALGO") for r in kept]


def _schemes(plan: Plan, collective: Collective) -> list[str]:
    """The schemes for a collective, in the plan's order: those that every root has, for a row serves them all."""
    roots: dict[str, set[int]] = {}
    for p in plan.packings:
        if p.collective == collective:
            roots.setdefault(p.scheme, set()).add(p.root)
    everybody = set().union(*roots.values())
    return [scheme for scheme, have in roots.items() if have == everybody] or list(roots)


def _allowed(topology: Topology, collective: Collective, wanted: tuple[str, ...], there: list[str]) -> list[str]:
    """What ``wanted`` leaves of what is there, in the order of preference."""
    banned = {s.removeprefix("^") for s in wanted if s.startswith("^")}
    asked = [s for s in wanted if not s.startswith("^")]
    unknown = (banned | set(asked)) - set(there)
    if unknown:
        raise SettingsError(
            f"BLINKMPI_ALGO names {', '.join(sorted(unknown))} for {collective}; "
            f"on {topology.name} it can be {', '.join(there)}"
        )
    allowed = [s for s in (asked or there) if s not in banned]
    if not allowed:
        raise SettingsError(f"BLINKMPI_ALGO leaves no scheme for {collective}; allow one of {', '.join(there)}")
    return allowed


def _one_hop(collective: str, n: int, *, registered: bool, lines: bool) -> list[tuple[int, str, Road]]:
    """(from how many bytes, scheme, road) for GPUs that reach one another over one hop."""
    size = 0 if n <= 2 else 1 if n <= 4 else 2
    end, one, two = PACKETS_BELOW[collective][size]
    rows: list[tuple[int, str, Road]] = [(0, "onehop", "oneshot")]
    more: list[tuple[int, Road]] = [(one, "oneshot128"), (two, "twoshot128")]
    if not lines:
        more = [(TWOSHOT_BELOW, "twoshot")] if collective == "allreduce" and n > 2 else []
    for below, road in more:
        if registered and collective in DIRECT_FROM:
            below = min(below, DIRECT_FROM[collective][size])
        if below > end:
            rows.append((end, "onehop", road))
            end = below
    until = DIRECT_BELOW.get(collective) if registered else 0
    if until is None or until > end:
        rows.append((end, "onehop", "direct"))
    if until is not None:
        rows.append((max(end, until), "onehop", "slots"))
    if n > 2 and collective in CHAIN_FROM:
        rows = [row for row in rows if row[0] < CHAIN_FROM[collective]]
        rows.append((CHAIN_FROM[collective], "chain", "slots"))
        if registered:
            rows.append((HALVES_FROM, "chain", "halves"))
    return rows


def by_nvlink(plan: Plan, topology: Topology, collective: Collective) -> bool:
    """Whether NVLink alone carries the one-hop trees of a collective."""
    kinds = {(link.src, link.dst): link.kind for link in topology.links}
    packings = [p for p in plan.packings if (p.collective, p.scheme) == (collective, "onehop")]
    paths = [edge.path for p in packings for tree in p.trees for edge in tree.edges]
    return all(kinds[hop] == "nvlink" for path in paths for hop in itertools.pairwise(path))


def _gpu_rules(
    plan: Plan, topology: Topology, collective: Collective, wanted: tuple[str, ...], gpus: Gpus
) -> list[Rule]:
    """The rows for one collective on GPUs: packets, then ``direct`` for registered buffers and slots for others."""
    schemes = _schemes(plan, collective)
    roads = [road for road in ROADS if road not in LINES or by_nvlink(plan, topology, collective)]
    chunk, depth = NODE_SLOTS if gpus == "nodes" else GPU_SLOTS
    ctas = NODE_CTAS if gpus == "nodes" else 0
    onehop = gpus == "onehop" and schemes[0] == "onehop" and plan.n > 1 and collective in PACKETS_BELOW
    rows = [
        Rule(collective, at, scheme, chunk, depth, "", road, ctas, registered)
        for registered in ((False, True) if onehop else (False,))
        for at, scheme, road in (
            _one_hop(collective, plan.n, registered=registered, lines=LINES[0] in roads)
            if onehop
            else [(0, schemes[0], SLOTS)]
        )
    ]
    if not wanted:
        return [replace(r, reason=EXPECTED if r.road in LINES and plan.n > 2 else TRIED) for r in rows]
    there = [*schemes, *(f"onehop/{road}" for road in roads if onehop)]
    there += ["chain/halves"] if onehop and collective == "allreduce" and "chain" in schemes else []
    first, _, road = _allowed(topology, collective, wanted, there)[0].partition("/")
    forced = [r for r in rows if r.scheme == first and not road] or [
        Rule(collective, 0, first, chunk, depth, "", road or "slots", ctas, registered)  # type: ignore[arg-type]
        for registered in ((True,) if road in ("direct", "halves") else (False, True))
    ]
    if road in ("direct", "halves"):
        forced.append(Rule(collective, 0, first, chunk, depth))
    lowest = {kind: min(r.min_bytes for r in forced if r.registered == kind) for kind in {r.registered for r in forced}}
    return [
        replace(r, min_bytes=0 if r.min_bytes == lowest[r.registered] else r.min_bytes, reason="BLINKMPI_ALGO")
        for r in forced
    ]
