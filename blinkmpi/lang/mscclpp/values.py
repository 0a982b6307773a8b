"""An execution plan's run, on values: whether it ends, what its thread blocks do to one another, what the outputs hold.

Thread blocks take turns, each as far as it gets; one order is enough, since a plan without races has one meaning. A
signal is matched with a wait by number: of N signals on a channel, the j-th wait has surely seen one if fewer than j
of the N could come without it.

An access races with an earlier one of the same place, one of them a write, if the order that it needs
(:mod:`.seen`) is not there. Within a phase of a thread block, threads keep to their parts: two moves over the same
range go from thread to thread in order, others do not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from ..flow import Contribution
from ..xml.wiring import Fault
from .seen import Process, Seen
from .steps import PACKETS, Await, Count, PlanMove, PlanStep, Range, Signal
from .wiring import PlanWiring

Place = tuple[int, str, int]  # GPU, buffer, piece


class Access(NamedTuple):
    """A use of a place: by which move, when, and over which range, which says by which thread."""

    move: int
    step: PlanStep
    process: Process
    phase: int
    start: int
    packets: bool


class Packet(NamedTuple):
    """What lies in a place of packets, and what its making had behind it."""

    value: int
    move: int
    step: PlanStep
    seen: Seen
    process: Process
    phase: int


class _RunningBlock:
    """A thread block where it stands."""

    def __init__(self, steps: tuple[PlanStep, ...]) -> None:
        self.steps, self.at, self.phase = steps, 0, 0
        first = steps[0] if steps else None
        self.process: Process = (first.gpu, first.block) if first else (-1, -1)
        self.seen = Seen()  # at the start of the phase
        self.seen.begun = frozenset({self.process[0]})
        self.threads: dict[int, Seen] = {}  # what single threads have seen since then
        self.pending = Seen()  # what all will have seen when they meet
        self.waits: Counter[Count] = Counter()
        self.meets: Counter[int] = Counter()

    def thread(self, number: int) -> Seen:
        if number not in self.threads:
            self.threads[number] = self.seen.copy()
        return self.threads[number]

    def meet(self) -> None:
        """All threads of the block have come: a new phase."""
        for seen in self.threads.values():
            self.seen.join(seen)
        self.seen.join(self.pending)
        self.threads, self.pending = {}, Seen()
        self.seen.passed(self.process, self.phase)
        self.phase += 1


class PlanRun:
    """A plan's run; its faults, and the values in all places at its end.

    A value ``v > 0`` is made by ``made_by[v]`` of ``operands[v]``, values or ``~piece`` of the input of GPU
    ``gpus[v]``; 0 is what was never written.

    Args:
        keys: from (GPU, buffer, piece) to the place; several names may be one memory.
        given: pieces of each GPU's input.
    """

    def __init__(self, wiring: PlanWiring, keys: dict[tuple[int, str], tuple[str, int]], given: list[int]) -> None:
        self.wiring, self._keys = wiring, keys
        self.operands: list[tuple[int, ...]] = [()]
        self.gpus: list[int] = [-1]
        self.made_by: list[PlanStep | None] = [None]
        self.memory: dict[Place, int] = {}
        self._inputs: dict[tuple[int, int], int] = {}
        for gpu, pieces in enumerate(given):
            for piece in range(pieces):
                self.memory[self.key(gpu, "i", piece)] = self._value(gpu, (~piece,), None)
        self.faults: dict[tuple[str, str, str], Fault] = {}
        self.early: dict[str, str] = {}
        self._written: dict[Place, Access] = {}
        self._read: dict[Place, list[Access]] = defaultdict(list)
        self._packets: dict[Place, Packet] = {}
        self._signals: dict[Count, list[tuple[Signal, Seen, tuple[int, int]]]] = defaultdict(list)
        self._without: dict[Count, list[int]] = defaultdict(list)  # for each signal, how many could come without it
        self._total, self._by_block = self._count_signals()
        self._proxies: dict[Process, Seen] = {}
        self._moves = 0
        self._blocks = [_RunningBlock(steps) for steps in wiring.blocks if steps]
        self.stuck = self._go()

    def key(self, gpu: int, buffer: str, piece: int) -> Place:
        """The place that a piece of a buffer is."""
        name, offset = self._keys.get((gpu, buffer), (buffer, 0))
        return gpu, name, piece + offset

    def _value(self, gpu: int, operands: tuple[int, ...], step: PlanStep | None) -> int:
        self.operands.append(operands)
        self.gpus.append(gpu)
        self.made_by.append(step)
        return len(self.operands) - 1

    def _count_signals(self) -> tuple[Counter[Count], Counter[tuple[Count, Process]]]:
        total, by_block = Counter[Count](), Counter[tuple[Count, Process]]()
        for steps in self.wiring.blocks:
            for step in steps:
                for signal in step.signals:
                    total[signal.counter] += 1
                    by_block[signal.counter, (step.gpu, step.block)] += 1
        return total, by_block

    # ---- going on

    def _go(self) -> list[PlanStep]:
        """Run all that can run; the steps at which thread blocks are left."""
        going = True
        while going:
            going = False
            for block in self._blocks:
                while block.at < len(block.steps) and self._ready(block, block.steps[block.at]):
                    self._step(block, block.steps[block.at])
                    going = True
        return [block.steps[block.at] for block in self._blocks if block.at < len(block.steps)]

    def _ready(self, block: _RunningBlock, step: PlanStep) -> bool:
        if step.barrier >= 0:
            return self._meets(block, step)
        for wait in step.waits:
            have = self.wiring.initial.get(wait.counter, 0) + len(self._signals[wait.counter])
            if have < block.waits[wait.counter] + 1:
                return False
        return all(self._packets.get(place) is not None for place in self._awaited(step))

    def missing(self, step: PlanStep) -> str:
        """What a thread block that is left waits for."""
        if step.barrier >= 0:
            return f"barrier {step.barrier} of gpu {step.gpu}"
        block = next(b for b in self._blocks if b.at < len(b.steps) and b.steps[b.at] is step)
        for wait in step.waits:
            number = block.waits[wait.counter] + 1
            if self.wiring.initial.get(wait.counter, 0) + len(self._signals[wait.counter]) < number:
                return f"signal {number} {count_text(wait.counter)}"
        place = next(p for p in self._awaited(step) if p not in self._packets)
        return f"a packet in scratch[{place[2] // self.wiring.pieces}] of gpu {place[0]}"

    def _awaited(self, step: PlanStep) -> Iterator[Place]:
        for move in step.moves:
            for r in move.operands if move.waits else ():
                if r.buffer == PACKETS:
                    yield from ((r.gpu, PACKETS, piece) for piece in r.pieces())

    def _meets(self, block: _RunningBlock, step: PlanStep) -> bool:
        """At a barrier: whether all have come; then all go on together."""
        there = [
            b for b in self._blocks
            if b.process[0] == step.gpu and b.at < len(b.steps) and b.steps[b.at].barrier == step.barrier
        ]  # fmt: skip
        if len(there) < self.wiring.barriers[step.gpu, step.barrier]:
            return False
        for other in there:
            other.meet()
        together = Seen()
        for other in there:
            together.join(other.seen)
        for other in there:
            other.seen.join(together)
            if other is not block:
                other.at += 1
        return True

    def _step(self, block: _RunningBlock, step: PlanStep) -> None:
        block.at += 1
        if step.name == "nop":
            block.meet()
        for move in step.moves:
            self._moves += 1
            self._move(block, step, move)
        for signal in step.signals:
            self._signal(block, signal)
        for wait in step.waits:
            self._await(block, wait)
        for thread, port in step.flushes:
            seen = self._proxies.get((step.gpu, -1 - port))
            if seen is not None:
                block.thread(thread).join(seen)

    def _signal(self, block: _RunningBlock, signal: Signal) -> None:
        seen = block.thread(signal.thread).copy()
        if signal.port >= 0:  # the proxy does it after what it has moved
            seen.join(self._proxies.get((block.process[0], -1 - signal.port), Seen()))
        same = sum(1 for _, _, process in self._signals[signal.counter] if process == block.process)
        left = self._by_block[signal.counter, block.process] - same  # of this thread block, from this one on
        self._signals[signal.counter].append((signal, seen, block.process))
        self._without[signal.counter].append(self._total[signal.counter] - left)

    def _await(self, block: _RunningBlock, wait: Await) -> None:
        block.waits[wait.counter] += 1
        number = block.waits[wait.counter] - self.wiring.initial.get(wait.counter, 0)
        seen = block.thread(wait.thread)
        for (signal, behind, _), others in zip(self._signals[wait.counter], self._without[wait.counter], strict=True):
            if others < number:
                seen.join(behind, relaxed=signal.relaxed or wait.relaxed)

    # ---- what is moved

    def _move(self, block: _RunningBlock, step: PlanStep, move: PlanMove) -> None:
        behind = block.seen if move.port < 0 else block.thread(move.thread)
        process, phase = block.process, block.phase
        if move.port >= 0:
            process = step.gpu, -1 - move.port
            proxy = self._proxies.setdefault(process, Seen())
            proxy.join(behind)
            behind, phase = proxy.copy(), proxy.memory.get(process, -1) + 1
            proxy.passed(process, phase)
        self._note_early(step, move, behind)
        packets = any(r.buffer == PACKETS for r in (*move.operands, *move.targets))
        for lane in range(len(move.operands[0].pieces())):
            came = [self._load(step, move, r, lane, behind, process, phase, packets) for r in move.operands]
            seen = behind
            arrived = [p for p, _ in came if p is not None]
            if arrived:
                seen = behind.copy()
                for packet in arrived:
                    seen.take_packet(packet.seen, packet.move)
                block.pending.begun |= seen.begun
                for packet in arrived:
                    block.pending.take_packet(packet.seen, packet.move)
            value = self._value(step.gpu, tuple(v for _, v in came), step)
            for r in move.targets:
                self._store(step, r, lane, seen, process, phase, packets, value)

    def _note_early(self, step: PlanStep, move: PlanMove, behind: Seen) -> None:
        """Buffers of a GPU that may not have begun; packets find their way by their flags."""
        for r in (*move.operands, *move.targets):
            if r.gpu != step.gpu and r.buffer != PACKETS and r.gpu not in behind.begun:
                what = f"uses {r.buffer} of gpu {r.gpu} before anything says that this GPU has begun"
                self.early.setdefault(f"gpu {step.gpu} {r.gpu}", f"{step.place} ({step.name}) {what}")

    def _load(
        self,
        step: PlanStep,
        move: PlanMove,
        r: Range,
        lane: int,
        seen: Seen,
        process: Process,
        phase: int,
        packets: bool,
    ) -> tuple[Packet | None, int]:
        """The value at a place; and the packet, if it was waited for."""
        piece = r.pieces()[lane]
        if r.buffer == PACKETS:
            packet = self._packets.get((r.gpu, PACKETS, piece))
            if packet is None:  # taken as it is
                self._fault("read", step, step, f"takes a packet from scratch[{piece // self.wiring.pieces}] of gpu "
                            f"{r.gpu}, which nobody has made")  # fmt: skip
                return None, 0
            if not move.waits and seen.memory.get(packet.process, -1) < packet.phase:
                self._race(packet.step, step, (r.gpu, PACKETS, piece))
            return (packet if move.waits else None), packet.value
        place = self.key(r.gpu, r.buffer, piece)
        own = Access(self._moves, step, process, phase, int(r.start), packets)
        writer = self._written.get(place)
        if writer is not None and not _ordered(writer, own, seen.memory):
            self._race(writer.step, step, place)
        self._read[place].append(own)
        if place not in self.memory:
            self._fault("read", step, step, f"reads {self._text(place)}, where nothing was written")
            return None, 0
        return None, self.memory[place]

    def _store(
        self, step: PlanStep, r: Range, lane: int, seen: Seen, process: Process, phase: int, packets: bool, value: int
    ) -> None:
        piece = r.pieces()[lane]
        if r.buffer == PACKETS:
            place = r.gpu, PACKETS, piece
            if place in self._packets:
                first = self._packets[place].step
                self._fault("race", first, step, f"and {step.place} ({step.name}) both put packets into "
                            f"{self._text(place)}, and a reader takes whichever it finds")  # fmt: skip
            self._packets[place] = Packet(value, self._moves, step, seen.copy(), process, phase)
            return
        place = self.key(r.gpu, r.buffer, piece)
        own = Access(self._moves, step, process, phase, int(r.start), packets)
        writer = self._written.get(place)
        if writer is not None and not _ordered(writer, own, seen.memory):
            self._race(writer.step, step, place)
        for reader in self._read.pop(place, []):
            if reader.move not in seen.moves and not _ordered(reader, own, seen.cause):
                self._race(reader.step, step, place)
        self._written[place] = own
        self.memory[place] = value

    def _race(self, one: PlanStep, other: PlanStep, place: Place) -> None:
        self._fault("race", one, other, f"and {other.place} ({other.name}) both use {self._text(place)}, one of them "
                    "writes, and nothing orders them")  # fmt: skip

    def _fault(self, kind: str, one: PlanStep, other: PlanStep, text: str) -> None:
        key = kind, one.place, other.place
        if key not in self.faults:
            self.faults[key] = Fault(kind, f"{one.place} ({one.name}) {text}", (one.place, other.place))

    def _text(self, place: Place) -> str:
        gpu, buffer, piece = place
        return f"{'packets of s' if buffer == PACKETS else buffer}[{piece // self.wiring.pieces}] of gpu {gpu}"

    # ---- what the values are

    def folded(self) -> list[tuple[Contribution, ...] | None]:
        """What is folded in each value, in ascending order, twice what is folded twice; None: of what is unwritten."""
        found: list[tuple[Contribution, ...] | None] = [None]
        for value in range(1, len(self.operands)):
            parts = [((self.gpus[value], ~o),) if o < 0 else found[o] for o in self.operands[value]]
            if len(parts) == 1:
                found.append(parts[0])
            else:
                whole = None if None in parts else sorted(c for part in parts for c in part or ())
                found.append(None if whole is None else tuple(whole))
        return found

    def users(self, wanted: list[int]) -> set[str]:
        """The places of the steps that took part in some values."""
        live, todo = set[int](), [v for v in wanted if v > 0]
        while todo:
            value = todo.pop()
            if value not in live:
                live.add(value)
                todo += [o for o in self.operands[value] if o > 0]
        return {step.place for v in live if (step := self.made_by[v]) is not None}


def _ordered(first: Access, second: Access, passed: dict[Process, int]) -> bool:
    """Whether the first access is over before the second one, which has this behind it."""
    if passed.get(first.process, -1) >= first.phase:
        return True
    same = (first.process, first.phase, first.start, first.packets)
    return same == (second.process, second.phase, second.start, second.packets)


def count_text(count: Count) -> str:
    """What is counted, in words."""
    kind, one, other, number = count
    if kind == "sem":
        return f"of semaphore {other} of gpu {one}"
    return f"on {kind} channel {number} from gpu {one} to gpu {other}"
