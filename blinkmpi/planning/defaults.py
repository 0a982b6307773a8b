"""The default selection table: which scheme and protocol carry a call of which size, before anything is measured here.

What trials gave is in files (:mod:`.default_tables`); ``blinkmpi tune`` measures better ones, ``BLINKMPI_ALGO`` or an
argument overrides them. The rows for GPUs are in :mod:`.gpus.rules`. What ranks that share a memory do not need (the
cost model) is imported where rows for links are made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..errors import SettingsError
from ..program.call import REDUCTIONS, Call
from ..topology.model import Topology
from ..trees.tree import Collective, Packing
from .default_tables import rows_of
from .memory_rows import SLOTS as MEMORY_SLOTS
from .plan import ONE_SHOTS, Plan, Rule
from .slots import LINK_SLOTS, Choice

if TYPE_CHECKING:
    from ..program.estimate import Estimate

KIB = 1 << 10
BY_MODEL = "default: the fastest by the cost model"
LINK_CHUNKS = tuple(4 * KIB << i for i in range(8))  # to 512 KiB; within a node to LINK_SLOTS[0]
MOST_LINK_SLOTS, SPARE_SLOTS = 16, 1.5  # the second: times as many as would do if no tree waited for another
# Shorter ones than this go in one shot, if C runs it and they fit: one message a node, with the announcement. From runs
# on two hosts of 2 ranks; of more ranks, one of which folds for its node, shorter reductions do.
SHOT_BELOW_BYTES_ACROSS, SHOT_RANKS = 1088 * KIB, 2
MANY = 8  # of more ranks, each of which folds all vectors, shorter ones go in one shot: nothing was tried there
BY_NAME = "default: pipelined through slots was fastest in trials on one machine"
SHOT_WHY = "default: data and announcement in one message from node to node"


def host_rules(
    plan: Plan, topology: Topology, collective: Collective, wanted: tuple[str, ...], mpi: bool
) -> list[Rule]:
    """The rows for one collective: MPI below the measured size (if it may), the fastest schemes from there on."""
    packed = plan.packed_as(collective)
    packings = [p for p in plan.packings if p.collective == packed]
    memory = packings[0].multicast
    short = rows_of("nodes", plan.n, collective) if mpi and len(topology.nodes) > 1 else []
    small = short[-1].min_bytes if short else 0
    by_name = any(not scheme.startswith("^") for scheme in wanted)
    there = [*dict.fromkeys(p.scheme for p in packings)]
    several = len(there) > 1
    allowed = allowed_of(topology, collective, wanted, [*schemes_of(plan, collective), "mpi"]) if wanted else there
    rules: list[Rule] = []
    for root, choices in choices_of(plan, topology, collective, [s for s in allowed if s != "mpi"] or there).items():
        if memory and (table := rows_of("memory", plan.n, collective)):
            rules += _memory_rows(table, plan.n, root, choices[0].scheme, by_name=by_name, mpi=mpi)
            continue
        shot = _shot_below(topology, collective) if not by_name and mpi and len(topology.nodes) > 1 else 0
        if shot:
            scheme = choices[0].scheme
            rules += [Rule(collective, 0, "mpi", reason="in place of what is no shot", root=root)] if small else []
            rules.append(Rule(collective, int(small > 0), scheme, *MEMORY_SLOTS, SHOT_WHY, "one_shot", root=root))
        rules += [replace(short[0], min_bytes=shot, root=root)] if small > shot else []
        rules += _link_rows(collective, root, choices, max(small, shot), several=several)
    if not wanted:
        return rules
    return asked_for([r for r in rules if r.scheme in allowed] or [Rule(collective, 0, allowed[0])])


def asked_for(rules: Sequence[Rule]) -> list[Rule]:
    """The rows that ``BLINKMPI_ALGO`` leaves, the first of each kind from 0 bytes on."""
    lowest: dict[object, int] = {}
    for r in rules:
        lowest[r.kind] = min(r.min_bytes, lowest.get(r.kind, r.min_bytes))
    return [replace(r, min_bytes=r.min_bytes if r.min_bytes > lowest[r.kind] else 0, reason="BLINKMPI_ALGO")
            for r in rules]  # fmt: skip


def _memory_rows(table: Sequence[Rule], n: int, root: int, scheme: str, *, by_name: bool, mpi: bool) -> list[Rule]:
    """The rows of ``n`` ranks that share a memory, by those of a table for one collective.

    Args:
        by_name: whether the scheme was asked for: then short vectors take slots, because one shot is no
            scheme of trees.
        mpi: whether MPI's own may be taken where the ranks cannot do what the rows say (:func:`.memory_rows.by_slots`).
    """
    collective = table[0].collective
    rows = [replace(row, scheme=scheme, root=root) for row in table]
    if n > MANY and collective in REDUCTIONS:
        rows[1] = replace(rows[1], min_bytes=rows[1].min_bytes * MANY // n)
    if by_name:
        rows = [row for row in rows if row.protocol not in ONE_SHOTS]
        if rows and rows[0].protocol == "slots":
            return [replace(rows[0], min_bytes=0), *rows[1:]]
        return [Rule(collective, 0, scheme, *MEMORY_SLOTS, BY_NAME, root=root), *rows]
    if mpi and n > 1 and rows_of("no_cma", n, collective):
        reason = "in place of what the ranks of one memory cannot do"
        rows = [Rule(collective, 0, "mpi", reason=reason, root=root), replace(rows[0], min_bytes=1), *rows[1:]]
    return rows


def _shot_below(topology: Topology, collective: Collective) -> int:
    """Below how many bytes a collective goes in one shot between nodes."""
    most = max(len(topology.ranks_of(node)) for node in topology.nodes)
    crowded = max(most, SHOT_RANKS) if collective in REDUCTIONS else SHOT_RANKS
    return SHOT_BELOW_BYTES_ACROSS * SHOT_RANKS // crowded


def _link_rows(
    collective: Collective, root: int, choices: Sequence[Choice], small: int, *, several: bool
) -> list[Rule]:
    """The rows from ``small`` bytes on, for one root or (-1) for most of them."""
    why = BY_MODEL if several else f"the one scheme for {collective} here"
    return [
        _row(collective, choice._replace(min_bytes=max(small, choice.min_bytes)), why, root)
        for i, choice in enumerate(choices)
        if i == 0 or choices[i - 1].min_bytes > small
    ]


def choices_of(
    plan: Plan, topology: Topology, collective: Collective, schemes: Sequence[str]
) -> dict[int, tuple[Choice, ...]]:
    """The fastest of some schemes for each size, of most roots (-1) and of those for which others are."""
    packed = plan.packed_as(collective)
    if packed != collective:
        memory = any(p.multicast for p in plan.packings)
        return {-1: (Choice(0, plan.schemes(collective)[0], *(MEMORY_SLOTS if memory else LINK_SLOTS)),)}
    by_root: dict[int, list[Packing]] = {}
    for p in plan.packings:
        if p.collective == packed and p.scheme in schemes:
            by_root.setdefault(p.root, []).append(p)
    estimated = plan.n > 1 and all(d.kind == "gpu" for d in topology.devices)
    found: dict[int, tuple[Choice, ...]] = {}
    for root, packings in by_root.items():
        if estimated:
            from .by_size import fastest_once

            found[root] = fastest_once(packings, topology, link_slots, LINK_SLOTS)
            continue
        best = max(packings, key=lambda p: 0 if p.multicast else p.rate)  # the first of equals
        slots = MEMORY_SLOTS if best.multicast else _slots_on_links(best, topology)
        found[root] = (Choice(0, best.scheme, *slots),)
    found |= {turn.root: found[turn.like] for turn in plan.turns if turn.like in found}
    usual = Counter(found.values()).most_common(1)[0][0]
    return {-1: usual, **{root: own for root, own in found.items() if root >= 0 and own != usual}}


def rule_of(packing: Packing, topology: Topology, call: Call) -> Rule:
    """The row for one call and packing over links: the chunks that are the best ones by the cost model."""
    from .by_size import fastest

    choices = fastest([packing], topology, link_slots, LINK_SLOTS)
    return _row(call.collective, next(choice for choice in choices if choice.min_bytes <= call.nbytes))


def _row(collective: Collective, choice: Choice, reason: str = BY_MODEL, root: int = -1) -> Rule:
    least = choice.least_chunk_bytes
    at, scheme, chunk, depth = choice[:4]
    return Rule(collective, at, scheme, chunk, depth, reason, root=root, least_chunk_bytes=least)


def _slots_on_links(packing: Packing, topology: Topology) -> tuple[int, int]:
    """The largest slots within a node, and how many of them."""
    from ..program.estimate import Estimate

    return LINK_SLOTS[0], slots_for(Estimate(packing, topology), LINK_SLOTS[0])


def link_slots(estimate: Estimate) -> list[tuple[int, int]]:
    """The slots that trees on links may have."""
    largest = LINK_CHUNKS[-1] if estimate.crosses else LINK_SLOTS[0]
    return [(chunk, slots_for(estimate, chunk)) for chunk in LINK_CHUNKS if chunk <= largest]


def slots_for(estimate: Estimate, chunk_bytes: int) -> int:
    """Slots of a channel that keep the trees of a packing at their rates; within a node each CTA has so many."""
    wanted = SPARE_SLOTS * estimate.slots(chunk_bytes) / estimate.ctas
    return min(MOST_LINK_SLOTS, max(LINK_SLOTS[1], math.ceil(wanted)))


def schemes_of(plan: Plan, collective: Collective) -> list[str]:
    """The schemes for a collective, in the plan's order: those that every root has, for one that is asked for."""
    roots: dict[str, set[int]] = {}
    packed = plan.packed_as(collective)
    for p in plan.packings:
        if p.collective == packed:
            roots.setdefault(p.scheme, set()).add(p.root)
    everybody = set().union(*roots.values())
    return [scheme for scheme, have in roots.items() if have == everybody] or list(roots)


def allowed_of(topology: Topology, collective: Collective, wanted: tuple[str, ...], there: list[str]) -> list[str]:
    """The schemes of ``there`` that ``wanted`` allows, in the order of preference."""
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
