"""The rows of the selection table for CPU ranks that share a memory, and what is left of them without cma.

From trials on one machine (docs/design.md tells which). ``benchmarks/small_calls.py`` measures what they give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ..lang.algorithms import SCHEME
from ..program.call import REDUCTIONS, Call
from ..trees.tree import Collective
from .plan import ONE_SHOTS, Plan, ProtocolName, Rule

KIB, MIB = 1 << 10, 1 << 20
SLOTS = (512 * KIB, 4)  # the largest slot, and the slots of a channel


class MemoryRow(NamedTuple):
    """From so many bytes on: how chunks travel, and how long they are at most."""

    min_bytes: int
    protocol: ProtocolName
    chunk_bytes: int = SLOTS[0]


SHORT = MemoryRow(0, "one_shot")
LONG_SHOT = 72 * KIB  # what goes in one shot is shorter: it must fit into the memory for that, with its alignment
OF_ALL = 256 * KIB  # chunks that all ranks read: so long that what has been written stays in a cache
FINE = 64 * KIB  # chunks of collectives whose ranks wait for one another's: longer ones would leave cores idle
FINEST = ((0, 16 * KIB), (4 * MIB, 32 * KIB))  # from so many bytes on, of an alltoall in place of more than 2 ranks
TWO = 12 * KIB  # from here on two ranks on cores of their own gain by one copy in place of two
MANY = 8  # of more ranks, each of which folds all vectors, shorter ones go in one shot: nothing was tried there
# For 2 ranks, for more.
MEMORY_ROWS: dict[str, tuple[tuple[MemoryRow, ...], tuple[MemoryRow, ...]]] = {
    "allreduce": (
        (
            SHORT,
            MemoryRow(48 * KIB, "slots"),
            MemoryRow(512 * KIB, "slots", FINE),
            MemoryRow(2 * MIB, "cma"),
            MemoryRow(32 * MIB, "slots"),
        ),
        (SHORT, MemoryRow(48 * KIB, "slots"), MemoryRow(4 * MIB, "cma"), MemoryRow(16 * MIB, "slots")),
    ),
    "reduce_scatter": (
        (SHORT, MemoryRow(TWO, "cma")),
        (SHORT, MemoryRow(LONG_SHOT, "slots"), MemoryRow(1 * MIB, "cma")),
    ),
    "reduce": (
        (SHORT, MemoryRow(TWO, "cma"), MemoryRow(256 * KIB, "slots", FINE)),
        (SHORT, MemoryRow(48 * KIB, "slots", FINE)),
    ),
    "broadcast": (
        (SHORT, MemoryRow(TWO, "cma")),
        (SHORT, MemoryRow(LONG_SHOT, "slots", FINE), MemoryRow(2 * MIB, "cma"), MemoryRow(8 * MIB, "slots")),
    ),
    "allgather": (
        (SHORT, MemoryRow(TWO, "cma")),
        (SHORT, MemoryRow(LONG_SHOT, "slots", OF_ALL)),
    ),
    "gather": (
        (SHORT, MemoryRow(TWO, "cma"), MemoryRow(64 * MIB, "slots")),
        (SHORT, MemoryRow(LONG_SHOT, "cma"), MemoryRow(64 * MIB, "slots")),
    ),
    "scatter": (
        (SHORT, MemoryRow(TWO, "cma")),
        (SHORT, MemoryRow(LONG_SHOT, "cma")),
    ),
    "alltoall": (
        (SHORT, MemoryRow(TWO, "cma", FINE)),
        (SHORT, MemoryRow(48 * KIB, "cma", FINE)),
    ),
    "scan": (
        (SHORT, MemoryRow(TWO, "cma"), MemoryRow(256 * KIB, "slots", FINE)),
        (SHORT, MemoryRow(LONG_SHOT, "slots", FINE)),
    ),
    "exscan": (
        (SHORT, MemoryRow(TWO, "one_shot_cma")),
        (SHORT, MemoryRow(LONG_SHOT, "slots", FINE // 2)),
    ),
}
WHY: dict[str, str] = {
    "one_shot": "data and announcement in one meeting of the ranks",
    "one_shot_cma": "one copy, from process to process, of whole vectors",
    "cma": "one copy, from process to process",
    "slots": "pipelined through slots",
}
IN_PLACE = "default: in place, each block leaves through a slot before another one takes its place"
NO_CMA = "the ranks cannot read one another's memory"
# Without C, and between nodes, shorter vectors are left to MPI's own collective as we call it (non-blocking, with a
# deadline); without cma those that are too long for one shot. For 2 ranks, for more.
MPI_BELOW_BYTES = {
    "allreduce": (256 * KIB, 256 * KIB),
    "reduce_scatter": (1 * MIB, 1 * MIB),
    "reduce": (2 * MIB, 2 * MIB),
    "broadcast": (16 * MIB, 2 * MIB),
    "allgather": (1 * MIB, 2 * MIB),
    "gather": (64 * MIB, 64 * MIB),
    "scatter": (64 * MIB, 64 * MIB),
}


def memory_rows(collective: Collective, n: int, root: int, scheme: str, *, by_name: bool, mpi: bool) -> list[Rule]:
    """The rows of a collective of ``n`` ranks.

    Args:
        by_name: whether the scheme was asked for: then short vectors take slots, because one shot is no
            scheme of trees.
        mpi: whether MPI's own may be taken where the ranks cannot do what the rows say (:func:`by_slots`).
    """
    crowded = n > MANY and collective in REDUCTIONS
    rows = [
        Rule(
            collective,
            row.min_bytes * MANY // n if crowded and i == 1 else row.min_bytes,
            scheme,
            row.chunk_bytes,
            SLOTS[1],
            _why(row),
            row.protocol,
            root=root,
        )
        for i, row in enumerate(MEMORY_ROWS[collective][n > 2])
    ]
    if by_name:
        rows = [row for row in rows if row.protocol not in ONE_SHOTS]
        if rows and rows[0].protocol == "slots":
            return [replace(rows[0], min_bytes=0), *rows[1:]]
        return [Rule(collective, 0, scheme, *SLOTS, _why(MemoryRow(0, "slots")), root=root), *rows]
    if mpi and n > 1 and collective in MPI_BELOW_BYTES:
        reason = "in place of what the ranks of one memory cannot do"
        rows = [Rule(collective, 0, "mpi", reason=reason, root=root), replace(rows[0], min_bytes=1), *rows[1:]]
    return rows


def in_place_row(rule: Rule, call: Call, rows: Sequence[Rule]) -> Rule:
    """The row of an alltoall in place: through slots, as what a rank sends by cma it would have to copy first.

    Args:
        rule: the row by its size.
        rows: all rows of the collective and root.
    """
    if rule.protocol != "cma":
        return rule
    shots = [row for row in rows if row.protocol == "one_shot"]
    if shots and call.nbytes < LONG_SHOT:
        return replace(shots[0], min_bytes=rule.min_bytes)
    fine = [chunk for least, chunk in FINEST if call.nbytes >= least and call.n > 2]
    return replace(rule, protocol="slots", chunk_bytes=(fine or [rule.chunk_bytes])[-1], reason=IN_PLACE)


def _why(row: MemoryRow) -> str:
    return f"default: {WHY[row.protocol]} was fastest in trials on one machine"


def by_slots(plan: Plan, *, in_c: bool) -> Plan:
    """The plan for ranks that cannot read one another's memory: no cma, and longer vectors left to MPI.

    Args:
        in_c: whether C executes programs; NumPy takes longer for the shortest call than MPI does.
    """
    rules: list[Rule] = []
    for rule in plan.rules:
        made = rule if rule.scheme.startswith(SCHEME) else _without_cma(plan, rule, in_c=in_c)
        if made is not None and not any(
            (r.collective, r.root, r.min_bytes) == (made.collective, made.root, made.min_bytes) for r in rules
        ):
            rules.append(made)
    return replace(plan, rules=tuple(rules))


def _without_cma(plan: Plan, rule: Rule, *, in_c: bool) -> Rule | None:
    """A row in a plan without cma; None where another one takes its place."""
    own = [r for r in plan.rules if (r.collective, r.root) == (rule.collective, rule.root)]
    floor = 0
    if any(r.scheme == "mpi" for r in own):
        floor = MPI_BELOW_BYTES.get(rule.collective, (0, 0))[plan.n > 2]
    shots = [r for r in own if r.protocol == "one_shot"] if in_c else []
    end = min((r.min_bytes for r in own if shots and r.min_bytes > shots[0].min_bytes), default=0)
    if rule.scheme == "mpi":
        reason = f"default: below {floor} bytes MPI was faster in trials on one machine; {NO_CMA}"
        return replace(rule, min_bytes=end, reason=reason) if floor else rule
    if rule.protocol == "one_shot" and in_c:
        return replace(rule, min_bytes=0)
    if rule.protocol == "one_shot" and floor:
        return None
    if rule.min_bytes < floor or rule.protocol != "slots":
        return replace(rule, min_bytes=max(rule.min_bytes, floor), protocol="slots", reason=NO_CMA)
    return rule


def without_shots(plan: Plan) -> Plan:
    """The plan without calls in one shot: the next row of each collective and root takes their place."""
    rules: list[Rule] = []
    for rule in plan.rules:
        shorter = [r for r in plan.rules if (r.collective, r.root) == (rule.collective, rule.root)
                   and r.min_bytes < rule.min_bytes]  # fmt: skip
        if rule.protocol not in ONE_SHOTS:
            rules.append(replace(rule, min_bytes=0) if all(r.protocol in ONE_SHOTS for r in shorter) else rule)
    return replace(plan, rules=tuple(rules))
