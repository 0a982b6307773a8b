"""Judge MSCCL++'s execution plan: what it names, its signals, whether it ends, races, and what the outputs hold.

``blinkmpi lang check`` prints the report. Signals and semaphores must come out even, because what is left on one is
there in the next call. Pure functions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import ClassVar

from ...util.codec import Document
from ..flow import Contribution, Goal, goal_of, several
from ..xml.values import keys_of
from ..xml.wiring import Fault
from .file import MscclppPlan
from .steps import PACKETS, Count
from .values import PlanRun, count_text
from .wiring import PlanWiring, wire

KINDS = ("structure", "signal", "deadlock", "race", "read", "result")  # of faults, in the order in which they are told
COLLECTIVES = {name.replace("_", ""): name for name in ("allreduce", "allgather", "reduce_scatter", "alltoall")}


class MscclppReport(Document, frozen=True):
    """What the checker found.

    Args:
        pieces: of a chunk, that thread blocks and pipelines divide.
        unused: operations of which nothing reaches an output.
        warnings: what is no fault of the plan alone: a GPU's buffers that are used before it is known to have begun.
        computes: for a collective that is none of NCCL's, what is in each chunk of the outputs.
    """

    KIND: ClassVar[str] = "mscclpp_check"
    VERSION: ClassVar[int] = 1

    source: str
    name: str
    collective: str
    protocol: str
    in_place: bool
    ranks: int
    chunks: int
    blocks: int
    operations: int
    pieces: int
    proved: bool
    faults: tuple[Fault, ...]
    unused: tuple[str, ...]
    warnings: tuple[str, ...]
    computes: tuple[str, ...]


def judge_mscclpp(plan: MscclppPlan, *, source: str = "") -> MscclppReport:
    """Check a plan.

    Args:
        source: the file's name, for the report.
    """
    wiring, faults = wire(plan)
    chunks = max((max(g.input_chunks, g.output_chunks) for g in plan.gpus), default=0)
    unused: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    computes: tuple[str, ...] = ()
    pieces = 1
    if wiring is not None:
        pieces = wiring.pieces
        goal, wrong = _goal(plan, pieces)
        faults += [*wrong, *_signals(wiring), *_scratch(wiring)]
        if not wrong:
            run = PlanRun(wiring, _keys(plan, pieces), [_given(plan, g, goal) * pieces for g in range(len(plan.gpus))])
            warnings = (*wiring.warnings, *run.early.values())
            if run.stuck:
                faults += _deadlock(run)
            faults += run.faults.values()
            outputs = _outputs(plan, run, goal, pieces)
            unused = _unused(wiring, run, outputs)
            open_end = run.stuck or any(fault.kind == "race" for fault in run.faults.values())
            if not open_end and goal is not None:
                faults += _results(run, outputs, goal, pieces)
            elif not open_end:
                computes = tuple(_computes(run, outputs, pieces))
    faults.sort(key=lambda fault: KINDS.index(fault.kind))
    return MscclppReport(
        source=source, name=plan.name, collective=plan.collective, protocol=plan.protocol, in_place=plan.inplace,
        ranks=len(plan.gpus), chunks=chunks, blocks=sum(len(g.threadblocks) for g in plan.gpus),
        operations=sum(len(b.ops) for g in plan.gpus for b in g.threadblocks), pieces=pieces, proved=not faults,
        faults=tuple(faults), unused=unused, warnings=warnings, computes=computes,
    )  # fmt: skip


Outputs = dict[tuple[int, int], int | None]  # (GPU, piece): the value, if there is one


def _goal(plan: MscclppPlan, pieces: int) -> tuple[Goal | None, list[Fault]]:
    """What the plan's collective wants, in pieces; None for one that is none of NCCL's."""
    name, n = COLLECTIVES.get(plan.collective.replace("_", "")), len(plan.gpus)
    if name is None:
        return None, []
    sizes = {(g.input_chunks, g.output_chunks) for g in plan.gpus}
    given, made = max(i for i, _ in sizes), max(o for _, o in sizes)
    per = max(given, made)
    if name != "allreduce":
        per //= n
    wrong = len(sizes) > 1 or per < 1
    if not wrong:
        goal = goal_of(name, n, per * pieces)
        wants = goal.given[0] // pieces, len(goal.wanted[0]) // pieces
        one_memory = plan.inplace and max(wants) in (given, made)  # the smaller one is a block of the larger one
        if (given, made) == wants or one_memory:
            return goal, []
    text = f"{plan.collective} of {n} GPUs with {', '.join(f'{i} chunks in and {o} out' for i, o in sorted(sizes))}"
    return None, [Fault("structure", f"{text}; expected the buffers of that collective on every GPU")]


def _given(plan: MscclppPlan, gpu: int, goal: Goal | None) -> int:
    """Chunks that the input holds at the start."""
    own = plan.gpus[gpu]
    if goal is None or goal.collective != "allgather":
        return own.input_chunks
    return min(own.input_chunks or own.output_chunks, own.output_chunks // len(plan.gpus))


def _keys(plan: MscclppPlan, pieces: int) -> dict[tuple[int, str], tuple[str, int]]:
    """Buffers that are one memory with another: of which, and from where on."""
    name, n = COLLECTIVES.get(plan.collective.replace("_", "")), len(plan.gpus)
    if not plan.inplace or name is None:
        return {}
    larger = max(max(g.input_chunks, g.output_chunks) for g in plan.gpus) * pieces
    key = keys_of(name, n, larger, in_place=True)
    found = {}
    for gpu in range(n):
        for buffer in "io":
            which, at = key(gpu, buffer, 0)
            if len({plan.gpus[gpu].input_chunks, plan.gpus[gpu].output_chunks}) == 1:
                which, at = 0, 0  # both are named as the whole of one memory
            found[gpu, buffer] = "io"[which], at
    return found


def _outputs(plan: MscclppPlan, run: PlanRun, goal: Goal | None, pieces: int) -> Outputs:
    found: Outputs = {}
    for gpu, own in enumerate(plan.gpus):
        size = len(goal.wanted[gpu]) if goal is not None else (own.output_chunks or own.input_chunks) * pieces
        buffer = "o" if own.output_chunks or goal is not None else "i"
        for piece in range(size):
            found[gpu, piece] = run.memory.get(run.key(gpu, buffer, piece))
    return found


def _signals(wiring: PlanWiring) -> Iterator[Fault]:
    """Counts that do not come out even, or that several thread blocks take from."""
    sent, taken = Counter[Count](), Counter[Count]()
    takers: dict[Count, set[int]] = defaultdict(set)
    steps: dict[Count, list[str]] = defaultdict(list)
    for block in wiring.blocks:
        for step in block:
            sent.update(signal.counter for signal in step.signals)
            taken.update(wait.counter for wait in step.waits)
            for wait in step.waits:
                takers[wait.counter].add(step.block)
            for count in (*(s.counter for s in step.signals), *(w.counter for w in step.waits)):
                steps[count].append(step.place)
    for count in sorted(sent | taken):
        if sent[count] != taken[count]:
            what = ("releases", "acquires") if count[0] == "sem" else ("signals", "waits")
            text = f"{sent[count]} {what[0]} and {taken[count]} {what[1]} {count_text(count)}: "
            more = "what is left is taken by the next call" if sent[count] > taken[count] else "a wait never ends"
            yield Fault("signal", text + more, tuple(steps[count][:2]))
        if len(takers[count]) > 1:
            text = (
                f"thread blocks {sorted(takers[count])} wait {count_text(count)}: which takes which is left to chance"
            )
            yield Fault("signal", text, tuple(steps[count][:2]))


def _scratch(wiring: PlanWiring) -> Iterator[Fault]:
    """Scratch that holds packets and plain data: a chunk of packets takes the bytes of two."""
    plain: dict[tuple[int, int], str] = {}
    packets: dict[tuple[int, int], str] = {}
    for block in wiring.blocks:
        for step in block:
            for move in step.moves:
                for r in (*move.operands, *move.targets):
                    if r.buffer == "s":
                        plain |= dict.fromkeys(((r.gpu, piece) for piece in r.pieces()), step.place)
                    elif r.buffer == PACKETS:
                        packets |= dict.fromkeys(
                            ((r.gpu, 2 * p + half) for p in r.pieces() for half in (0, 1)), step.place
                        )
    for gpu in sorted({gpu for gpu, _ in plain.keys() & packets.keys()}):
        place = min(place for place in plain.keys() & packets.keys() if place[0] == gpu)
        text = f"{plain[place]} and {packets[place]} use the same bytes of gpu {gpu}'s scratch, one for packets"
        yield Fault("race", text, (plain[place], packets[place]))


def _deadlock(run: PlanRun) -> Iterator[Fault]:
    shown = [f"{step.place} ({step.name}) waits for {run.missing(step)}" for step in run.stuck]
    more = f", and {len(shown) - 4} more" if len(shown) > 4 else ""
    yield Fault("deadlock", "these never go on: " + "; ".join(shown[:4]) + more, tuple(s.place for s in run.stuck))


def _unused(wiring: PlanWiring, run: PlanRun, outputs: Outputs) -> tuple[str, ...]:
    used = run.users([v for v in outputs.values() if v is not None])
    return tuple(
        f"{step.place} ({step.name})" for block in wiring.blocks for step in block
        if step.moves and step.place not in used
    )  # fmt: skip


def _results(run: PlanRun, outputs: Outputs, goal: Goal, pieces: int) -> Iterator[Fault]:
    """Chunks of outputs that are wrong, each told once."""
    folded, told = run.folded(), set[tuple[int, int]]()
    for (gpu, piece), value in outputs.items():
        want = goal.wanted[gpu][piece]
        got = None if value is None else folded[value]
        if got == want or (gpu, piece // pieces) in told:
            continue
        told.add((gpu, piece // pieces))
        what = "is never written" if value is None else "holds what was never written"
        what = what if got is None else f"is {several(_chunks(got, pieces))}"
        text = f"rank {gpu}: chunk {piece // pieces} of its output {what}; wanted {several(_chunks(want, pieces))}"
        yield Fault("result", text)


def _computes(run: PlanRun, outputs: Outputs, pieces: int) -> Iterator[str]:
    folded = run.folded()
    for (gpu, piece), value in outputs.items():
        got = None if value is None else folded[value]
        if got is not None and piece % pieces == 0:
            yield f"rank {gpu}: chunk {piece // pieces} of its output is {several(_chunks(got, pieces))}"


def _chunks(contributions: Sequence[Contribution], pieces: int) -> tuple[Contribution, ...]:
    return tuple((rank, piece // pieces) for rank, piece in contributions)
