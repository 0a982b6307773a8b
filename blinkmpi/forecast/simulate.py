"""How long a program takes on ranks that share cores, from what each of its steps costs: a simulation, pure.

A rank does its rows in turn, a chunk each, as far as flags allow. When none is ready it yields its core, and the next
rank there goes on. Linux takes ranks that poll for ranks at work and leaves them on their cores, so each core has its
ranks for good; where they are more than the cores, some of these have more of them than others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from ..planning.plan import Rule
from ..planning.predictor import Basis
from ..program.call import Call
from ..program.ir import Stage
from .rates import StepRates
from .steps import HostSteps

MOST_STEPS = 40_000  # that are played; longer calls are extrapolated from their first part


@dataclass
class _Row:
    """A row of a rank: what it waits for, and how far it is."""

    stage: Stage
    waits: bool
    us: float  # a full chunk
    chunks: int
    last: float  # the last chunk, as a part of a full one
    inputs: list[_Row] = field(default_factory=list)
    readers: list[_Row] = field(default_factory=list)  # of its slots, or of the buffers that it waits for
    done: int = 0


@dataclass(frozen=True)
class BySteps:
    """A :class:`~..planning.predictor.Predictor`: by what each step of a call costs here.

    Args:
        steps: the steps of a call that goes by a row of the selection table.
        in_place: whether the calls are in place.
    """

    rates: StepRates
    steps: Callable[[Call, Rule], HostSteps]
    in_place: bool = False
    basis: ClassVar[Basis] = "steps"

    def seconds(self, call: Call, rule: Rule) -> float | None:
        """Seconds of a call; None if a kind of its steps was never measured."""
        steps, rates, found = self.steps(call, rule), self.rates, {}
        for kind in {steps.kind(stage) for rank in range(call.n) for stage, waits in steps.rows(rank) if not waits}:
            us = rates.cost(call.collective, call.nbytes, kind, in_place=self.in_place)
            if us is None:
                return None
            found[kind] = us
        return seconds(steps, found.__getitem__, cores=rates.hardware.cores, meeting_us=rates.meeting_us)


def seconds(steps: HostSteps, cost: Callable[[str], float], *, cores: int, meeting_us: float) -> float:
    """Seconds from the first rank's entering to the last one's leaving.

    Args:
        cost: microseconds for each MiB of a kind of steps.
        cores: that the ranks of the node have together.
        meeting_us: in which the ranks enter a call, and agree on it.
    """
    ranks = range(steps.program.call.n)
    total = sum(-(-stage.count // steps.program.chunk_of(stage)) for stage in steps.program.stages)
    part = min(1.0, MOST_STEPS / max(1, total))
    played = _play([_rows(steps, rank, cost, part) for rank in ranks], steps, cores)
    if part < 1:
        half = _play([_rows(steps, rank, cost, part / 2) for rank in ranks], steps, cores)
        played += (played - half) / (part / 2) * (1 - part)
    return (meeting_us + played) * 1e-6


def _rows(steps: HostSteps, rank: int, cost: Callable[[str], float], part: float) -> list[_Row]:
    found = []
    for stage, waits in steps.rows(rank):
        step = steps.program.chunk_of(stage)
        count = max(1, int(stage.count * part))
        chunks = -(-count // step)
        per_element = 0.0 if waits or not stage.count else cost(steps.kind(stage)) * steps.mib(stage) / stage.count
        last = (count - (chunks - 1) * step) / step
        found.append(_Row(stage, waits, per_element * step, chunks, last))
    return found


def _join(rows: list[list[_Row]], steps: HostSteps) -> None:
    """Who waits for whom."""
    works = {id(row.stage): row for of in rows for row in of if not row.waits}
    writer = {c: stage for stage in steps.program.stages for c in stage.outs}
    for of in rows:
        for row in of:
            for c in () if row.waits else row.stage.ins:
                source = writer[c]
                sent = c in steps.exported and steps.exported[c].buffer == "send"
                if not sent:
                    row.inputs.append(works[id(source)])
            for c in row.stage.outs:
                if (c in steps.exported) == row.waits:
                    readers = steps.program.channels[c].readers
                    row.readers += [w for w in works.values() if w.stage.rank in readers and c in w.stage.ins]


def _play(rows: list[list[_Row]], steps: HostSteps, cores: int) -> float:
    """Microseconds until all rows of all ranks are done."""
    _join(rows, steps)
    depth, n = steps.program.depth, len(rows)
    cores = min(cores, n)
    here = [[rank for rank in range(n) if rank % cores == core] for core in range(cores)]
    turn, at = [0] * cores, [0] * n

    def ready(row: _Row) -> bool:
        k = row.done
        if k >= row.chunks or any(source.done <= k for source in row.inputs):
            return False
        if row.waits:
            return all(reader.done > k for reader in row.readers)
        return k < depth or all(reader.done > k - depth for reader in row.readers)

    def next_of(rank: int) -> _Row | None:
        own = rows[rank]
        for i in range(len(own)):
            row = own[(at[rank] + i) % len(own)]
            if ready(row):
                at[rank] = (at[rank] + i + 1) % len(own)
                return row
        return None

    def pick(core: int) -> _Row | None:
        """The next chunk for a core: of the rank that it has, or else of the next one there."""
        for i in range(len(here[core])):
            place = (turn[core] + i) % len(here[core])
            row = next_of(here[core][place])
            if row is not None:
                turn[core] = place
                return row
        return None

    heap: list[tuple[float, int]] = []
    working: dict[int, _Row] = {}
    now = 0.0
    while True:
        for core in range(cores):
            while core not in working and (row := pick(core)) is not None:
                us = row.us * (row.last if row.done + 1 == row.chunks else 1.0)
                if us == 0.0:
                    row.done += 1
                    continue
                working[core] = row
                heapq.heappush(heap, (now + us, core))
        if not heap:
            break
        now, core = heapq.heappop(heap)
        working.pop(core).done += 1
    return now
