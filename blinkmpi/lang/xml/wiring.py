"""Structure of MSCCL's XML: which step receives what which one sends, who waits for whom, and whether places exist.

A connection leads from a GPU to another one on a channel. At most one thread block of the sender and one of the
receiver have it; the k-th step that sends there is met by the k-th that receives. What the executors of MSCCL refuse
when they read a file (Azure/msccl-executor-nccl, ``msccl_parser.cc``) is refused here too. Pure functions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import PlanError
from ...program.call import BLOCKED
from ...trees.tree import ROOTED
from ...util.codec import Value
from ..flow import Goal, goal_of
from .file import RECEIVES, SENDS, Place, XmlAlgorithm, XmlGpu, XmlStep

MOST_NAMED = 1 << 16  # missing results, one by one
Connection = tuple[int, int, int]  # sender, receiver, channel


class Fault(Value, frozen=True):
    """Something wrong: ``kind`` is structure, deadlock, race, read or result; ``steps`` are the steps it is about."""

    kind: str
    text: str
    steps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FlatStep:
    """A step and where it is: GPU, thread block, step."""

    gpu: int
    block: int
    number: int
    step: XmlStep

    @property
    def place(self) -> str:
        """``gpu 3 tb 1 step 4``."""
        return f"gpu {self.gpu} tb {self.block} step {self.number}"


@dataclass(frozen=True, slots=True)
class Wiring:
    """All steps of a file in one sequence, and what each waits for, as numbers in it; -1 for nothing.

    Args:
        before: the step before it in its thread block.
        awaited: the step of another thread block that it names in ``depid`` and ``deps``.
        sender: the step whose message it receives.
        connections: for each connection, the steps that send and those that receive, in their order.
    """

    steps: tuple[FlatStep, ...]
    before: tuple[int, ...]
    awaited: tuple[int, ...]
    sender: tuple[int, ...]
    connections: dict[Connection, tuple[tuple[int, ...], tuple[int, ...]]]


def goal_of_file(algorithm: XmlAlgorithm, root: int = -1) -> Goal | None:
    """What the collective of the file gives and wants; None for a custom one, of which the file does not say it.

    Raises:
        PlanError: if its chunks cannot be blocks of equal length.
    """
    n, chunks = len(algorithm.gpus), algorithm.chunks
    if algorithm.collective == "custom":
        return None
    if algorithm.collective in BLOCKED:
        if chunks % n:
            raise PlanError(f"nchunksperloop={chunks} is no multiple of {n} GPUs; {algorithm.collective} has a block "
                            "of equally many chunks for each")  # fmt: skip
        chunks //= n
    return goal_of(algorithm.collective, n, chunks, max(root, 0) if algorithm.collective in ROOTED else -1)


def wire(algorithm: XmlAlgorithm) -> tuple[Wiring | None, list[Fault]]:
    """Join the steps of a file; no wiring if its structure is wrong."""
    faults = [Fault("structure", text) for text in _structure(algorithm)]
    if faults:
        return None, faults
    steps: list[FlatStep] = []
    before: list[int] = []
    first: dict[tuple[int, int], int] = {}
    sends: dict[Connection, list[int]] = {}
    receives: dict[Connection, list[int]] = {}
    for g, gpu in enumerate(algorithm.gpus):
        for b, block in enumerate(gpu.blocks):
            first[g, b] = len(steps)
            for s, step in enumerate(block.steps):
                before.append(len(steps) - 1 if s else -1)
                if step.type in SENDS:
                    sends.setdefault((g, block.send, block.channel), []).append(len(steps))
                if step.type in RECEIVES:
                    receives.setdefault((block.recv, g, block.channel), []).append(len(steps))
                steps.append(FlatStep(g, b, s, step))
    sender = [-1] * len(steps)
    for connection in sorted({*sends, *receives}):
        out, into = sends.get(connection, []), receives.get(connection, [])
        faults += _unmatched(connection, [steps[i] for i in out], [steps[i] for i in into])
        for i, j in zip(out, into, strict=False):
            sender[j] = i
    if faults:
        return None, faults
    awaited = [first[f.gpu, f.step.depid] + f.step.deps if f.step.depid >= 0 else -1 for f in steps]
    connections = {c: (tuple(sends[c]), tuple(receives[c])) for c in sorted(sends)}
    return Wiring(tuple(steps), tuple(before), tuple(awaited), tuple(sender), connections), []


def _unmatched(connection: Connection, sends: list[FlatStep], receives: list[FlatStep]) -> Iterator[Fault]:
    """Say what of a connection does not fit."""
    src, dst, channel = connection
    name = f"gpu {src} to gpu {dst} on channel {channel}"
    for k, (out, into) in enumerate(zip(sends, receives, strict=False)):
        if out.step.count != into.step.count:
            text = (f"{name}: message {k} has cnt {out.step.count} where it is sent ({out.place}) and "
                    f"{into.step.count} where it is received ({into.place})")  # fmt: skip
            yield Fault("structure", text, (out.place, into.place))
            return
    if len(sends) != len(receives):
        extra = (sends[len(receives) :] or receives[len(sends) :])[0].place
        yield Fault("structure", f"{name}: {len(sends)} messages are sent and {len(receives)} received; the first one "
                    f"without the other side is {extra}", (extra,))  # fmt: skip


def _structure(algorithm: XmlAlgorithm) -> Iterator[str]:
    """Say what is wrong in a GPU alone."""
    n = len(algorithm.gpus)
    needed = _least_moves(algorithm)
    if needed > max(algorithm.moves, MOST_NAMED):
        yield (f"nchunksperloop={algorithm.chunks}: {algorithm.collective} of {n} GPUs moves {needed} chunks or more, "
               f"and the steps move {algorithm.moves}")  # fmt: skip
        return
    try:
        goals = [goal_of_file(algorithm, algorithm.root)] * n
    except PlanError as error:
        yield str(error)
        return
    if not algorithm.in_place and not algorithm.out_of_place:
        yield "inplace=0 and outofplace=0: it is for no call"
    for g, gpu in enumerate(algorithm.gpus):
        sizes = _sizes(gpu, goals[g], g)
        ends: dict[tuple[str, int, int], int] = {}
        for b, block in enumerate(gpu.blocks):
            here = f"gpu {g} tb {b}"
            if not 0 <= block.channel < max(algorithm.channels, 1):
                yield f"{here}: channel {block.channel}; there are {algorithm.channels}, see nchannels"
            for side, peer in (("send", block.send), ("recv", block.recv)):
                if peer >= n or peer == g:
                    yield f"{here}: {side}={peer}; expected another one of {n} GPUs, or -1"
                elif peer >= 0 and ends.setdefault((side, peer, block.channel), b) != b:
                    yield (f"{here}: {side}={peer} on channel {block.channel} is also that of "
                           f"tb {ends[side, peer, block.channel]}; their messages would mix")  # fmt: skip
            for s, step in enumerate(block.steps):
                where = f"{here} step {s}"
                if step.type in SENDS and block.send < 0:
                    yield f"{where}: {step.type} in a thread block that sends to nobody"
                if step.type in RECEIVES and block.recv < 0:
                    yield f"{where}: {step.type} in a thread block that receives from nobody"
                yield from (f"{where}: {text}" for text in _out_of_bounds(step, sizes))
                yield from (f"{where}: {text}" for text in _waits(step, gpu))
            yield from (f"{here} {text}" for text in _sequence(block.steps))
        for i, o in gpu.copies:
            if not (i < sizes["i"][0] and o < sizes["o"][0]):
                yield f"gpu {g}: <copy i_off={i} o_off={o}> with {sizes['i'][0]} and {sizes['o'][0]} chunks"


def _least_moves(algorithm: XmlAlgorithm) -> int:
    """How many chunks the steps must move, as all of a result but a rank's own input comes from other GPUs."""
    n, chunks = len(algorithm.gpus), algorithm.chunks
    of_root = {"custom": 0, "gather": chunks // n, "scatter": chunks // n}  # blocks that one GPU has
    return (n - 1) * of_root.get(algorithm.collective, chunks)


def _sizes(gpu: XmlGpu, goal: Goal | None, rank: int) -> dict[str, tuple[int, str]]:
    """Chunks of each buffer, and who says so: the file, or the collective where it has less."""
    sizes = {"i": (gpu.inputs, "i_chunks"), "o": (gpu.outputs, "o_chunks"), "s": (gpu.scratch, "s_chunks")}
    if goal is not None:
        users = f"in the buffer of the user, {goal.collective}"
        sizes["i"] = min(sizes["i"], (max(goal.given[rank], _like_output(goal, rank)), users))
        sizes["o"] = min(sizes["o"], (len(goal.wanted[rank]), users))
    return sizes


def _like_output(goal: Goal, rank: int) -> int:
    """A broadcast has one buffer: who gives nothing has an input all the same, which is its output."""
    return len(goal.wanted[rank]) if goal.collective == "broadcast" else 0


def _out_of_bounds(step: XmlStep, sizes: dict[str, tuple[int, str]]) -> Iterator[str]:
    place: Place | None
    for side, place in (("src", step.src), ("dst", step.dst)):
        if place is not None and place[1] + step.count > sizes[place[0]][0]:
            most, who = sizes[place[0]]
            last = place[1] + step.count - 1
            yield f"{step.type} {side} {place[0]}[{place[1]}..{last}]; there are {most} chunks ({who})"


def _waits(step: XmlStep, gpu: XmlGpu) -> Iterator[str]:
    """Whether what a step waits for is there, and says that it is waited for: else executors never set its flag."""
    if step.depid < 0:
        return
    if step.depid >= len(gpu.blocks) or not 0 <= step.deps < len(gpu.blocks[step.depid].steps):
        yield f"waits for tb {step.depid} step {step.deps}, which is not there"
        return
    target = f"tb {step.depid} step {step.deps}"
    found = gpu.blocks[step.depid].steps[step.deps]
    if found.type == "nop":
        yield f"waits for {target}, a nop, whose end no executor announces"
    elif not found.awaited:
        yield f"waits for {target}, which has hasdep=0: no executor announces its end"


def _sequence(steps: tuple[XmlStep, ...]) -> Iterator[str]:
    """What an executor makes of steps in a row: a nop joins the next step, reductions into one place are one."""
    for s, step in enumerate(steps):
        after = steps[s + 1] if s + 1 < len(steps) else None
        if step.type == "nop" and (step.depid < 0 or after is None or after.depid < 0):
            yield f"step {s}: a nop must wait for a step, and the step after it too"
        if after is None or not after.type == step.type == "re" or after.depid >= 0 or step.awaited:
            continue
        if (after.dst, _buffer(after)) == (step.dst, _buffer(step)) and after.count != step.count:
            yield f"step {s}: re into the place of the next step, of another cnt; an executor makes one of them"


def _buffer(step: XmlStep) -> str:
    return "" if step.src is None else step.src[0]
