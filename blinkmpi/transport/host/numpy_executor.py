"""The NumPy executor: the stages of one rank on shared memory, step for step as executor.c does them."""

import enum
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ...program.ir import Program, Stage
from ...program.reduction import Array, accumulator_of, dtype_of, fold
from ..control_pages import CONTROL, SEQ_BITS, ControlPages
from ..events import CALL, CHUNK, ENTER, WAIT, EventRing
from .channel_layout import ChannelLayout
from .shared_window import SharedWindow

YIELD_SECONDS = 0.02  # after so long without progress, sleep instead of yielding
SLEEP_SECONDS = 1e-4


class Outcome(enum.Enum):
    """How a turn of a executor ended; the values are executor.c's."""

    DONE = 0
    EXPIRED = 1
    ABORTED = 2
    DIFFER = 3  # some rank announced another call
    UNREADABLE = 4  # some rank's buffer cannot be read by the others
    FAULT = 5  # another process's memory could not be read
    UNTOLD = 6  # this rank's record has to be written first
    NETWORK = 7  # MPI failed
    REMOTE_DIFFERS = 8  # a rank announced another call, or something that only Python reads: messages tell what


OUTCOMES = tuple(Outcome)  # by executor.c's numbers


class NumpyStage:
    """A stage with its slots as array views; ``k`` is the next chunk.

    ``after`` are channels of this rank on whose chunks it waits, too.
    """

    def __init__(
        self, stage: Stage, program: Program, layout: ChannelLayout, window: SharedWindow, after: tuple[int, ...] = ()
    ) -> None:
        pages, rank = window.pages, window.pages.rank
        self.stage, self.chunk, self.depth = stage, program.chunk_of(stage), program.depth
        self.op, self.n = program.call.op, program.call.n
        self.dtype, self.acc = dtype_of(program.call.dtype), accumulator_of(program.call.dtype)
        self.words, self.fence = pages.words, pages.fence
        self.chunks = -(-stage.count // self.chunk)
        self.k = self.base = 0
        self.one_shot, self.turn = program.one_shot, 0

        def slots(c: int) -> list[Array]:
            kind = self.acc if program.channels[c].wide else self.dtype
            starts = [layout.slots[c] + i * layout.strides[c] for i in range(program.depth)]
            room = self.chunk if program.one_shot else program.chunk
            return [window.bytes[at : at + room * kind.itemsize].view(kind) for at in starts]

        self.ins = [(slots(c), layout.heads[c], layout.tails[c][rank]) for c in stage.ins]
        self.outs = [(slots(c), layout.heads[c], tuple(layout.tails[c].values())) for c in stage.outs]
        # operations that end in another type than they accumulate in need a place to do so
        wide = self.acc != self.dtype and (stage.way != "down")
        self.scratch = np.empty(program.chunk, self.acc) if wide or len(stage.fold) > 2 else None
        self.waits_in = [head for _, head, _ in self.ins]
        self.waits_out = [tail for _, _, tails in self.outs for tail in tails]
        self.waits_own = [(layout.heads[c], min(layout.tails[c].values())) for c in after]

    def start(self, base: int, send: Array | None, recv: Array | None) -> None:
        """Begin a call: flags count from ``base``."""
        stage, self.k, self.base = self.stage, 0, base
        self.turn = (base >> SEQ_BITS) & self.one_shot
        self.local = None if stage.local is None or send is None else send[stage.local : stage.local + stage.count]
        self.store = None if stage.store is None or recv is None else recv[stage.store : stage.store + stage.count]
        same = self.local is not None and self.store is not None
        self.aliased = same and self.local.ctypes.data == self.store.ctypes.data  # type: ignore[union-attr]

    def lacking(self) -> int | None:
        """The first flag that chunk ``k`` waits for; None if it can be done now."""
        words, want = self.words, self.base + self.k + 1
        for head in self.waits_in:
            if words[head] < want:
                return head
        for head, tail in self.waits_own:
            if words[head] < want:
                return tail  # that channel waits for this
        if self.k >= self.depth:
            want -= self.depth
            for tail in self.waits_out:
                if words[tail] < want:
                    return tail
        return None

    def step(self) -> None:
        """Do chunk ``k`` and raise its flags."""
        if self.fence:
            self.fence()
        k, stage = self.k, self.stage
        slot, first = (k + self.turn) % self.depth, k * self.chunk
        size = min(self.chunk, stage.count - first)
        local = None if self.local is None else self.local[first : first + size]
        sources = [ring[slot][:size] for ring, _, _ in self.ins]
        targets = [ring[slot][:size] for ring, _, _ in self.outs]
        if self.store is not None and not (self.aliased and len(stage.fold) == 1):
            targets.append(self.store[first : first + size])
        operands: list[Any] = [local if i < 0 else sources[i] for i in stage.fold]
        value = operands[0]
        if targets and (len(operands) > 1 or stage.final):
            safe = self.scratch is None and not (self.aliased and len(operands) > 2)
            value = targets[0] if safe else self.scratch[:size]  # type: ignore[index]
            fold(self.op, operands, value, final=stage.final, n=self.n)
        for target in targets:
            if target is not value:
                np.copyto(target, value, casting="unsafe")
        if self.fence:
            self.fence()
        done = self.base + k + 1
        for _, head, _ in self.outs:
            self.words[head] = done
        for _, _, tail in self.ins:
            self.words[tail] = done
        self.k = k + 1


class Idle:
    """Wait a little between polls; tell when to leave."""

    def __init__(self, pages: ControlPages, slice_s: float) -> None:
        self.pages, self.slice_s = pages, slice_s
        self.since = 0.0
        self.polls = 0

    def again(self) -> Outcome:
        """Yield or sleep once. DONE means go on polling."""
        self.polls += 1
        if self.polls % 16 == 1:
            now = time.monotonic()
            self.since = self.since or now
            self.pages.beat()
            if self.pages.abort[0]:
                return Outcome.ABORTED
            if now - self.since > self.slice_s:
                return Outcome.EXPIRED
        if self.polls > 16 and time.monotonic() - self.since > YIELD_SECONDS:
            time.sleep(SLEEP_SECONDS)
        else:
            os.sched_yield()
        return Outcome.DONE


Turn = Callable[[], tuple[Outcome, bool]]


def repeat(turn: Turn, pages: ControlPages, slice_s: float) -> tuple[Outcome, bool]:
    """Repeat ``turn`` until it is done, or nothing moved for ``slice_s``: (outcome, whether anything moved).

    Args:
        turn: does what is ready and says EXPIRED and whether anything moved; any other outcome ends it.
    """
    idle = Idle(pages, slice_s)
    ever = False
    while True:
        outcome, moved = turn()
        if moved:
            ever, idle.since, idle.polls = True, 0.0, 0
        if outcome is Outcome.EXPIRED and not moved:
            outcome = idle.again()
            if outcome is Outcome.DONE:
                continue
        if outcome is not Outcome.EXPIRED or not moved:
            return outcome, ever


class Steps(Protocol):
    """Who makes the steps of a traced call."""

    def step(self, stage: NumpyStage, /) -> None:
        """Make a step of a stage that is ready."""

    def lacks(self, stage: NumpyStage, flag: int, /) -> None:
        """Learn that a stage is not ready, for lack of a flag."""

    def idle(self) -> None:
        """Learn that none is."""


def step_numpy(left: list[NumpyStage], traced: Steps | None = None) -> tuple[Outcome, bool]:
    """A turn of started stages; those that are finished are taken out of ``left``."""
    moved = False
    for stage in left:
        lacked = stage.lacking()
        if lacked is None:
            if traced is None:
                stage.step()
            else:
                traced.step(stage)
            moved = True
        elif traced is not None:
            traced.lacks(stage, lacked)
    if traced is not None and not moved:
        traced.idle()
    if moved:
        left[:] = [stage for stage in left if stage.k < stage.chunks]
    return Outcome.EXPIRED if left else Outcome.DONE, moved


def barrier_numpy(pages: ControlPages, seq: int) -> Outcome:
    """DONE if every rank has announced call ``seq``, otherwise EXPIRED."""
    if (pages.announced < seq).any():
        return Outcome.EXPIRED
    if pages.fence:
        pages.fence()
    return Outcome.DONE


class StepTrace:
    """The events and times of a call under way, whose stages are ``steps``, as trace.h records those of executor.c."""

    def __init__(self, ring: EventRing, pages: ControlPages, steps: list[NumpyStage], program: int, seq: int) -> None:
        self._ring, self._pages, self._program, self._seq = ring, pages, program, seq
        self._row = {id(stage): row for row, stage in enumerate(steps)}
        self.busy_ns = [0] * len(steps)
        self.wait_ns: dict[int, int] = {}  # time that each rank was waited for
        self._began = self._last = time.monotonic_ns()
        self._lacked: dict[int, int] = {}  # the rank that a row lacked a flag of
        self._late = -1
        self._waiting = False

    def late(self) -> None:
        """Not all ranks have entered the call."""
        latest = int(self._pages.announced.argmin())
        if int(self._pages.announced[latest]) < self._seq:  # it may have come since
            self._late = latest

    def entered(self) -> None:
        """All have."""
        if self._late >= 0:
            self._waited(ENTER, -1, self._late)

    def lacks(self, stage: NumpyStage, flag: int) -> None:
        """A stage is not ready, for lack of a flag."""
        self._lacked[self._row[id(stage)]] = flag * 8 // CONTROL

    def idle(self) -> None:
        """No stage is ready."""
        self._waiting = True

    def step(self, stage: NumpyStage) -> None:
        """Make a step of a stage that is ready."""
        row, chunk = self._row[id(stage)], stage.k
        if self._waiting:
            self._waited(WAIT, row, self._lacked.get(row, -1))
        self._waiting = False
        start = self._last
        stage.step()
        self._last = time.monotonic_ns()
        self.busy_ns[row] += self._last - start
        self._ring.record(CHUNK, start, self._last, self._seq, self._program, row, chunk)

    def finished(self) -> None:
        """The call is complete."""
        self._ring.record(CALL, self._began, time.monotonic_ns(), self._seq, self._program)

    def _waited(self, kind: int, row: int, rank: int) -> None:
        now = time.monotonic_ns()
        if rank >= 0:
            self.wait_ns[rank] = self.wait_ns.get(rank, 0) + now - self._last
        self._ring.record(kind, self._last, now, self._seq, self._program, row, rank)
        self._last = now
