"""A machine that runs MSCCL's XML on numbers, as slowly and as unfairly as the format allows; for the tests alone.

It shares nothing with the checker but the values that the reader gives. Memory is NumPy arrays, in place one that
input and output are views of. A step is done in two halves, first it reads, then it writes, and whatever is allowed may
happen between them. What is in an output or in scratch at the start is noise.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from blinkmpi.lang.flow import Goal
from blinkmpi.lang.xml.file import XmlAlgorithm, XmlStep

SENDING = ("s", "rcs", "rrs", "rrcs")
RECEIVING = ("r", "rcs", "rrc", "rrs", "rrcs")
Ints = NDArray[np.uint64]
Half = tuple[XmlStep, Ints, bool]  # what a begun step will write or send, and whether noise is in it


@dataclass(slots=True)
class Line:
    """A connection: messages on their way, with whether noise is in them, and how many were sent and received."""

    messages: deque[tuple[Ints, bool]] = field(default_factory=deque)
    sent: int = 0
    received: int = 0


class Machine:
    """One run of a file.

    Args:
        goal: the collective; what each rank gives.
        slots: messages that a connection holds; None for any number.
        seed: of the inputs, the noise and the order of the steps.
    """

    def __init__(
        self, algorithm: XmlAlgorithm, goal: Goal, *, in_place: bool, slots: int | None = None, seed: int = 0
    ) -> None:
        self.algorithm, self.goal, self.slots = algorithm, goal, slots
        self.random = random.Random(seed)
        numbers = np.random.default_rng(seed)

        def noise(size: int) -> Ints:
            return numbers.integers(0, 1 << 63, size, dtype=np.uint64)

        self.inputs = [noise(count) for count in goal.given]
        self.memory: list[dict[str, Ints]] = []
        self.written: list[dict[str, NDArray[np.bool_]]] = []
        for rank, gpu in enumerate(algorithm.gpus):
            sizes = {"i": max(goal.given[rank], gpu.inputs), "o": max(len(goal.wanted[rank]), gpu.outputs)}
            places = {"i": 0, "o": 0}
            if in_place and goal.collective in ("allgather", "gather"):
                places["i"] = rank * goal.chunks
            if in_place and goal.collective in ("reduce_scatter", "scatter"):
                places["o"] = rank * goal.chunks
            both = max(places[b] + sizes[b] for b in "io")
            whole, known = noise(both), np.zeros(both, bool)
            memory, written = {"s": noise(gpu.scratch)}, {"s": np.zeros(gpu.scratch, bool)}
            for b in "io":
                part = slice(places[b], places[b] + sizes[b])
                memory[b] = whole[part] if in_place else noise(sizes[b])
                written[b] = known[part] if in_place else np.zeros(sizes[b], bool)
            memory["i"][: goal.given[rank]] = self.inputs[rank]
            written["i"][: goal.given[rank]] = True
            for i, o in gpu.copies if not in_place else ():
                memory["o"][o], written["o"][o] = memory["i"][i], written["i"][i]
            self.memory.append(memory)
            self.written.append(written)
        self.lines: dict[tuple[int, int, int], Line] = {}
        self.done = [[0] * len(gpu.blocks) for gpu in algorithm.gpus]
        self.begun: dict[tuple[int, int], Half] = {}
        self.noise_read = False
        self.blocks = [(g, b) for g, gpu in enumerate(algorithm.gpus) for b in range(len(gpu.blocks))]
        self.first = {block: self.random.random() for block in self.blocks}

    # ---------------------------------------------------------------- what can happen

    def line(self, src: int, dst: int, channel: int) -> Line:
        return self.lines.setdefault((src, dst, channel), Line())

    def next_step(self, block: tuple[int, int]) -> XmlStep | None:
        g, b = block
        steps = self.algorithm.gpus[g].blocks[b].steps
        return steps[self.done[g][b]] if self.done[g][b] < len(steps) else None

    def possible(self, block: tuple[int, int]) -> bool:
        """Whether a thread block can do the next half of a step."""
        step = self.next_step(block)
        if step is None or block in self.begun:
            return step is not None
        g, b = block
        if step.depid >= 0 and self.done[g][step.depid] <= step.deps:
            return False
        ends = self.algorithm.gpus[g].blocks[b]
        if step.type in RECEIVING and not self.line(ends.recv, g, ends.channel).messages:
            return False
        if step.type in SENDING and self.slots is not None:
            line = self.line(g, ends.send, ends.channel)
            return line.sent - line.received < self.slots
        return True

    def go(self, block: tuple[int, int]) -> None:
        """Do a half of a step."""
        g, b = block
        step = self.next_step(block)
        assert step is not None
        ends = self.algorithm.gpus[g].blocks[b]
        if block not in self.begun:
            self.begun[block] = (step, *self.read(g, step, self.line(ends.recv, g, ends.channel)))
            return
        _, values, noisy = self.begun.pop(block)
        if step.dst is not None:
            (buffer, at), count = step.dst, step.count
            self.memory[g][buffer][at : at + count] = values
            self.written[g][buffer][at : at + count] = not noisy
        if step.type in RECEIVING:
            self.line(ends.recv, g, ends.channel).received += 1
        if step.type in SENDING:
            line = self.line(g, ends.send, ends.channel)
            line.messages.append((values, noisy))
            line.sent += 1
        self.done[g][b] += 1

    def read(self, g: int, step: XmlStep, line: Line) -> tuple[Ints, bool]:
        """What a step makes of what is there now."""
        total, noisy = np.zeros(step.count, np.uint64), False
        for place in (step.src, step.dst if step.type == "re" else None):
            if place is not None:
                part = slice(place[1], place[1] + step.count)
                total = total + self.memory[g][place[0]][part]
                unknown = not self.written[g][place[0]][part].all()
                noisy, self.noise_read = noisy or unknown, self.noise_read or unknown
        if step.type in RECEIVING:
            came, unknown = line.messages.popleft()
            total, noisy = total + came, noisy or unknown
        return total, noisy

    # ---------------------------------------------------------------- runs

    def run(self) -> bool:
        """Run to the end, in an order drawn at random; False if some steps can never run."""
        fair = self.random.random() < 0.5
        while ready := [block for block in self.blocks if self.possible(block)]:
            if self.random.random() < 0.1:
                self.first[self.random.choice(self.blocks)] = self.random.random()
            self.go(self.random.choice(ready) if fair else max(ready, key=self.first.__getitem__))
        return all(self.next_step(block) is None for block in self.blocks)

    def delay(self, gpu: int, block: int, step: int) -> None:
        """Run all that can run without this step."""
        while ready := [
            other for other in self.blocks
            if self.possible(other) and not (other == (gpu, block) and self.done[gpu][block] == step)
        ]:  # fmt: skip
            self.go(ready[0])

    def right(self) -> bool:
        """Whether the outputs are what the collective says."""
        return all(
            int(self.memory[rank]["o"][chunk]) == sum(int(self.inputs[r][c]) for r, c in want) % (1 << 64)
            for rank, of in enumerate(self.goal.wanted)
            for chunk, want in enumerate(of)
            if want
        )


def by_chunk(algorithm: XmlAlgorithm) -> XmlAlgorithm:
    """The same file with a step for each chunk."""
    gpus = []
    for gpu in algorithm.gpus:
        last = []  # of each thread block, the number of the last piece of each step
        for block in gpu.blocks:
            counts = [step.count for step in block.steps]
            last.append([sum(counts[: s + 1]) - 1 for s in range(len(counts))])
        blocks = []
        for block in gpu.blocks:
            steps = []
            for step in block.steps:
                for c in range(step.count):
                    src, dst = (None if p is None else (p[0], p[1] + c) for p in (step.src, step.dst))
                    waits = step.depid >= 0 and c == 0
                    depid, deps = (step.depid, last[step.depid][step.deps]) if waits else (-1, -1)
                    steps.append(XmlStep(step.type, src, dst, 1, depid, deps, step.awaited and c == step.count - 1))
            blocks.append(replace(block, steps=tuple(steps)))
        gpus.append(replace(gpu, blocks=tuple(blocks)))
    return replace(algorithm, gpus=tuple(gpus))
