"""What MSCCL's XML computes: all steps in one order, on values; races, places read before they are written, results.

Two accesses of a chunk of a GPU, one of them a write, are a race if nothing orders them: neither the thread block, nor
a dependency, nor a message (slots are no order: an executor may have more of them). A vector clock for each thread
block decides that. A file without races has one meaning, so one order is enough. Pure functions.

The values are those of :mod:`..flow`: a message that arrives is a copy on its GPU, a reduction is a fold of what was
there and what comes, a copy within a GPU is no value of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..flow import Contribution, Flow, Goal, Node, several
from .file import RECEIVES, SENDS, XmlAlgorithm
from .wiring import Fault, Wiring

UNWRITTEN = 0  # the value of what was never written
Key = tuple[int, int]  # (buffer, chunk) of a GPU's memory, one for each place


@dataclass(slots=True)
class Trace:
    """What happened: values, each made by a step, and where they are in the end.

    A value ``v > 0`` has ``operands[v]``: values, or chunks of its GPU's input as ``~chunk``. Value 0 is
    :data:`UNWRITTEN`.

    Args:
        arrived: whether it came as a message; what is neither is a copy within the GPU, or on its way out.
        memory: the value at each place of each GPU.
    """

    gpus: list[int] = field(default_factory=lambda: [-1])
    operands: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    steps: list[int] = field(default_factory=lambda: [-1])
    arrived: list[bool] = field(default_factory=lambda: [False])
    memory: list[dict[Key, int]] = field(default_factory=list)

    def add(self, gpu: int, step: int, operands: tuple[int, ...], *, arrived: bool) -> int:
        """Give a new value its number."""
        self.gpus.append(gpu)
        self.operands.append(operands)
        self.steps.append(step)
        self.arrived.append(arrived)
        return len(self.steps) - 1


def keys_of(collective: str, n: int, chunks: int, *, in_place: bool) -> Callable[[int, str, int], Key]:
    """A function from (gpu, buffer, chunk) to the place; in place, input and output are one memory.

    A blocked call in place has the smaller buffer as the rank's block of the larger one, as NCCL defines it.

    Args:
        chunks: of the larger buffer.
    """
    larger, smaller = {"allgather": (1, 0), "gather": (1, 0), "reduce_scatter": (0, 1), "scatter": (0, 1)}.get(
        collective, (0, -1)
    )
    code = {"i": 0, "o": 1, "s": 2}
    blocks = [rank * (chunks // n) for rank in range(n)]

    def key(gpu: int, buffer: str, chunk: int) -> Key:
        which = code[buffer]
        if not in_place or which == 2:
            return which, chunk
        return larger, chunk + (blocks[gpu] if which == smaller else 0)

    return key


class _Clocks:
    """Vector clocks: for each thread block, how far of every other one it has seen."""

    def __init__(self, wiring: Wiring) -> None:
        pairs = sorted({(f.gpu, f.block) for f in wiring.steps})
        numbers = {pair: i for i, pair in enumerate(pairs)}
        self.block = [numbers[f.gpu, f.block] for f in wiring.steps]
        self._now = [np.full(len(pairs), -1, np.int32) for _ in pairs]
        self._kept: dict[int, NDArray[np.int32]] = {}
        self._users = [0] * len(wiring.steps)  # of the clock at a step
        for other in (*wiring.awaited, *wiring.sender):
            if other >= 0:
                self._users[other] += 1

    def step(self, i: int, number: int, others: Sequence[int]) -> NDArray[np.int32]:
        """Go on to step ``i``, number ``number`` of its thread block; what it has seen then."""
        now = self._now[self.block[i]]
        for other in others:
            if other >= 0:
                np.maximum(now, self._kept[other], out=now)
                self._users[other] -= 1
                if not self._users[other]:
                    del self._kept[other]
        now[self.block[i]] = number
        if self._users[i]:
            self._kept[i] = now.copy()
        return now


class Execution:
    """All steps of a file, run once in an order that is possible.

    Args:
        order: from :func:`.order.order`.
        goal: what each GPU's input holds; None for a custom collective.
    """

    def __init__(
        self, algorithm: XmlAlgorithm, wiring: Wiring, order: Sequence[int], goal: Goal | None, *, in_place: bool
    ) -> None:
        self.wiring = wiring
        self.key = keys_of(algorithm.collective, len(algorithm.gpus), algorithm.chunks, in_place=in_place)
        self.trace = Trace()
        self.races: dict[tuple[int, int], str] = {}  # two steps, and the place
        self.unwritten: dict[int, str] = {}  # a step, and the place that it reads
        self._written: list[dict[Key, int]] = [{} for _ in algorithm.gpus]  # the last step that wrote
        self._read: list[dict[Key, dict[int, int]]] = [{} for _ in algorithm.gpus]  # since then; block: step
        for g, gpu in enumerate(algorithm.gpus):
            given = gpu.inputs if goal is None else goal.given[g]
            memory = {self.key(g, "i", c): ~c for c in range(given)}
            if not in_place:
                memory |= {self.key(g, "o", o): memory[self.key(g, "i", i)] for i, o in gpu.copies if i < given}
            self.trace.memory.append(memory)
        self._messages: dict[int, list[int]] = {}
        self._clocks = _Clocks(wiring)
        for i in order:
            self._run(i)

    def _run(self, i: int) -> None:
        flat, trace, wiring = self.wiring.steps[i], self.trace, self.wiring
        step, g = flat.step, flat.gpu
        seen = self._clocks.step(i, flat.number, (wiring.awaited[i], wiring.sender[i]))
        if step.type == "nop":
            return
        sources = [] if step.src is None else [self.key(g, step.src[0], step.src[1] + c) for c in range(step.count)]
        targets = [] if step.dst is None else [self.key(g, step.dst[0], step.dst[1] + c) for c in range(step.count)]
        if sources and targets and sources != targets and not set(sources).isdisjoint(targets):
            self.races.setdefault((i, i), _key_text(targets[0]))
        read = [self._load(i, key, seen) for key in sources]
        old = [self._load(i, key, seen) for key in targets] if step.type == "re" else []
        came = self._messages.pop(wiring.sender[i]) if step.type in RECEIVES else []
        arrived = step.type in RECEIVES
        values = [
            trace.add(g, i, operands, arrived=arrived)
            for operands in zip(*filter(None, (old, read, came)), strict=True)
        ]
        for key, value in zip(targets, values, strict=False):
            self._store(i, key, value, seen)
        if step.type in SENDS:
            self._messages[i] = values

    def _load(self, i: int, key: Key, seen: NDArray[np.int32]) -> int:
        g = self.wiring.steps[i].gpu
        writer = self._written[g].get(key)
        if writer is not None and seen[self._clocks.block[writer]] < self.wiring.steps[writer].number:
            self._race(writer, i, key)
        self._read[g].setdefault(key, {})[self._clocks.block[i]] = i
        value = self.trace.memory[g].get(key)
        if value is None:
            self.unwritten.setdefault(i, _key_text(key))
            return UNWRITTEN
        return value

    def _store(self, i: int, key: Key, value: int, seen: NDArray[np.int32]) -> None:
        g, steps, block = self.wiring.steps[i].gpu, self.wiring.steps, self._clocks.block
        writer = self._written[g].get(key)
        if writer is not None and seen[block[writer]] < steps[writer].number:
            self._race(writer, i, key)
        for reader in self._read[g].pop(key, {}).values():
            if seen[block[reader]] < steps[reader].number:
                self._race(reader, i, key)
        self._written[g][key] = i
        self.trace.memory[g][key] = value

    def _race(self, i: int, j: int, key: Key) -> None:
        self.races.setdefault((i, j), _key_text(key))

    def faults(self) -> Iterator[Fault]:
        """Races, and places that are read before anything is written there."""
        steps = self.wiring.steps
        for (i, j), place in self.races.items():
            one, other = steps[i], steps[j]
            if i == j:
                text = f"{one.place} ({one.step.type}) reads and writes places that overlap, from {place} on"
            else:
                text = (f"{one.place} ({one.step.type}) and {other.place} ({other.step.type}) both use "
                        f"{place} of gpu {one.gpu}, one of them writes, and nothing orders them")  # fmt: skip
            yield Fault("race", text, (one.place, other.place))
        for i, place in self.unwritten.items():
            flat = steps[i]
            text = f"{flat.place} ({flat.step.type}) reads {place} of gpu {flat.gpu}, where nothing was written"
            yield Fault("read", text, (flat.place,))

    def output(self, gpu: int, chunk: int) -> int | None:
        """The value at a place of the output; None where nothing is."""
        return self.trace.memory[gpu].get(self.key(gpu, "o", chunk))


@dataclass(frozen=True, slots=True)
class XmlResults:
    """What an execution leaves in the outputs that are wanted: wrong places, the steps that took part, and the flow."""

    faults: tuple[Fault, ...]
    used: frozenset[int]
    flow: Flow


def results(execution: Execution, goal: Goal) -> XmlResults:
    """Follow the values in the outputs back to the inputs, and compare them with what is wanted there."""
    trace = execution.trace
    wanted = [(r, c) for r, of in enumerate(goal.wanted) for c, want in enumerate(of) if want]
    values = {place: execution.output(*place) for place in wanted}
    live: set[int] = set()
    todo = [v for v in values.values() if v is not None and v > 0]
    while todo:
        value = todo.pop()
        if value not in live:
            live.add(value)
            todo += [operand for operand in trace.operands[value] if operand > 0]
    nodes: list[Node] = []
    held: dict[int, frozenset[Contribution]] = {}  # what is folded in a value
    wrong: dict[int, str] = {}  # a value that is folded from something twice, or from what was never written
    names: dict[int, int] = {}  # value to reference
    inputs: dict[tuple[int, int], int] = {}  # an input chunk that is sent: its node
    for value in sorted(live):
        gpu, operands = trace.gpus[value], trace.operands[value]
        held[value], why = _folded(trace, value, held, wrong)
        if why:
            wrong[value] = why.replace("HERE", execution.wiring.steps[trace.steps[value]].place)
        where = execution.wiring.steps[trace.steps[value]].place
        references = [names.get(operand, operand) for operand in operands]
        for k, (operand, reference) in enumerate(zip(operands, references, strict=True)):
            if reference < 0 and operand > 0 and trace.gpus[operand] != gpu:  # a message that is an input chunk
                sent = (trace.gpus[operand], reference)
                if sent not in inputs:
                    inputs[sent] = len(nodes)
                    nodes.append(Node(sent[0], (reference,), execution.wiring.steps[trace.steps[operand]].place))
                references[k] = inputs[sent]
        if len(operands) == 1 and not trace.arrived[value]:  # a copy within the GPU
            names[value] = references[0]
        else:
            names[value] = len(nodes)
            nodes.append(Node(gpu, tuple(references), where))
    faults = tuple(_compared(goal, values, held, wrong))
    outputs = tuple(
        tuple(_reference(values.get((r, c)), names) for c in range(len(of))) for r, of in enumerate(goal.wanted)
    )
    used = frozenset(trace.steps[value] for value in live)
    return XmlResults(faults, used, Flow(goal, tuple(nodes), outputs))


def _reference(value: int | None, names: dict[int, int]) -> int | None:
    return None if value is None or value == UNWRITTEN else names.get(value, value)


def _folded(
    trace: Trace, value: int, held: dict[int, frozenset[Contribution]], wrong: dict[int, str]
) -> tuple[frozenset[Contribution], str]:
    """What is folded in a value, and what is wrong with it; HERE stands for its step."""
    total: frozenset[Contribution] = frozenset()
    why = ""
    for operand in trace.operands[value]:
        if operand == UNWRITTEN:
            why = why or "what was never written, read by HERE"
            continue
        part = held[operand] if operand > 0 else frozenset({(trace.gpus[value], ~operand)})
        why = why or wrong.get(operand, "")
        if not total.isdisjoint(part):
            rank, chunk = min(total & part)
            why = why or f"rank {rank}'s chunk {chunk} twice, folded by HERE"
        total = total | part if total else part
    return total, why


def _compared(
    goal: Goal, values: dict[tuple[int, int], int | None], held: dict[int, frozenset[Contribution]],
    wrong: dict[int, str],
) -> Iterator[Fault]:  # fmt: skip
    for (rank, chunk), value in values.items():
        want = goal.wanted[rank][chunk]
        name = f"rank {rank}: chunk {chunk} of its output"
        if value is None:
            yield Fault("result", f"{name} is never written; wanted {several(want)}")
        elif value == UNWRITTEN or value in wrong:
            yield Fault("result", f"{name} holds {wrong.get(value, 'what was never written')}; wanted {several(want)}")
        else:
            got = held[value] if value > 0 else frozenset({(rank, ~value)})
            if got != frozenset(want):
                yield Fault("result", f"{name} is {several(tuple(sorted(got)))}; wanted {several(want)}")


def custom_goal(algorithm: XmlAlgorithm, execution: Execution) -> Goal:
    """For a collective that the file does not define: what its outputs hold, taken as what is wanted."""
    n = len(algorithm.gpus)
    given = tuple(gpu.inputs for gpu in algorithm.gpus)
    trace, held = execution.trace, dict[int, frozenset[Contribution]]()
    wrong: dict[int, str] = {}
    for value in range(1, len(trace.operands)):
        held[value], why = _folded(trace, value, held, wrong)
        if why:
            wrong[value] = why
    wanted = []
    for g, gpu in enumerate(algorithm.gpus):
        size = max(gpu.outputs, gpu.inputs if gpu.outputs == 0 else 0)
        found = [execution.output(g, c) for c in range(size)]
        wanted.append(tuple(
            () if v is None or v == UNWRITTEN or v in wrong else tuple(sorted(held[v] if v > 0 else {(g, ~v)}))
            for v in found
        ))  # fmt: skip
    return Goal("custom", n, max(*given, 1), -1, given, tuple(wanted))


def _key_text(key: Key) -> str:
    return f"{'ios'[key[0]]}[{key[1]}]"
