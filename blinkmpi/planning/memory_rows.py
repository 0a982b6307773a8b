"""The rows of CPU ranks that share a memory, as far as they hang on a call or on what the ranks can do.

What trials gave is in ``tables`` (:mod:`.default_tables`); :mod:`.defaults` makes the rows of a plan from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ..lang.algorithms import SCHEME
from ..program.call import Call
from .plan import ONE_SHOTS, Plan, Rule

KIB, MIB = 1 << 10, 1 << 20
SLOTS = (512 * KIB, 4)  # the largest slot, and the slots of a channel
LONG_SHOT = 72 * KIB  # what goes in one shot is shorter: it must fit into the memory for that, with its alignment
FINEST = ((0, 16 * KIB), (4 * MIB, 32 * KIB))  # from so many bytes on, of an alltoall in place of more than 2 ranks
IN_PLACE = "default: in place, each block leaves through a slot before another one takes its place"
NO_CMA = "the ranks cannot read one another's memory"


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
    from .default_tables import rows_of  # most ranks need none

    own = [r for r in plan.rules if (r.collective, r.root) == (rule.collective, rule.root)]
    short = rows_of("no_cma", plan.n, rule.collective) if any(r.scheme == "mpi" for r in own) else []
    floor = short[-1].min_bytes if short else 0
    shots = [r for r in own if r.protocol == "one_shot"] if in_c else []
    end = min((r.min_bytes for r in own if shots and r.min_bytes > shots[0].min_bytes), default=0)
    if rule.scheme == "mpi":
        return replace(rule, min_bytes=end, reason=short[0].reason) if floor else rule
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
