"""The proof of a program: it cannot deadlock, and every rank receives exactly what the collective says.

Every stage is executed symbolically once, not once a byte, so the proof costs the same for any length.
"""

from collections import defaultdict
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

from ..errors import PlanError
from ..topology.model import MOST_DEVICES
from ..trees.tree import ROOTED
from ..util.text import quoted
from .call import BLOCKED, REDUCTIONS, Call
from .ir import Program, Stage
from .reduction import DTYPES, OPS

Piece = tuple[int, int, tuple[tuple[int, int], ...]]  # start, length, contributions as (rank, offset in its buffer)


def check(program: Program, *, wanted: Sequence[Sequence[Piece]] = (), switches: int = 0) -> Program:
    """Prove the program and return it.

    Args:
        wanted: of a custom collective, what each rank must receive, as :func:`expected` says it of others.
        switches: so many vertices after the ranks may fold and copy, without data of their own. No executor has them.

    Proved: stages and channels fit together, no cyclic wait (module docstring), every contribution is folded
    exactly once, every element of every receive buffer is written exactly once, with the right value.

    Raises:
        PlanError: naming stage, channel, got and wanted.
    """
    if program.chunk < 1 or program.depth < 1:
        raise PlanError(f"chunk {program.chunk} and depth {program.depth} must be at least 1; lower the call again")
    _check_call(program, switches)
    writers = _wiring(program)
    values: dict[int, tuple[tuple[int, int], ...]] = {}
    stores: dict[int, list[Piece]] = defaultdict(list)
    _check_spans(program, writers)
    for i in order_of(program):
        stage = program.stages[i]
        parts = [values[writers[c]] for c in stage.ins]
        own = ((stage.rank, stage.local),) if stage.local is not None else ()
        value = tuple(sorted([*own, *(p for part in parts for p in part)]))
        values[i] = value
        _check_stage(program, i, stage)
        if stage.store is not None:
            stores[stage.rank].append((stage.store, stage.count, value))
    for rank in range(program.call.n):
        _check_stores(rank, wanted[rank] if wanted else expected(program.call, rank), sorted(stores[rank]))
    return program


def _check_call(program: Program, switches: int) -> None:
    """A call that could have been made, and stages of its ranks."""
    call = program.call
    every = call.n**2 if call.collective == "alltoall" else call.n  # numbers where blocks differ
    lengths = (every,) if call.collective == "reduce_scatter" else (1, every) if call.collective in BLOCKED else (1,)
    if call.collective == "custom":
        lengths = (1 + 2 * call.n,)
    ops = OPS if call.collective in REDUCTIONS else ("", *(OPS if call.collective == "custom" else ()))
    if call.dtype not in DTYPES or call.op not in ops:
        raise PlanError(
            f"the call is a {call.collective} of {quoted(call.dtype)}, op {quoted(call.op)}; lower it again"
        )
    if not 1 <= call.n <= MOST_DEVICES or len(call.counts) not in lengths or min(call.counts) < 0:
        raise PlanError(f"the call has {call.n} ranks and counts {quoted(call.counts)}; lower it again")
    if call.root not in (range(call.n) if call.collective in ROOTED else (-1,)):
        raise PlanError(f"the call is a {call.collective} of {call.n} ranks from root {call.root}; lower it again")
    if program.longest < 0:
        raise PlanError(f"the longest stage has {program.longest} elements; expected 0 or more, lower the call again")
    for i, stage in enumerate(program.stages):
        switch = call.n <= stage.rank < call.n + switches and stage.local is stage.store is None
        if not (0 <= stage.rank < call.n or switch) or (stage.local or 0) < 0 or (stage.store or 0) < 0:
            raise PlanError(f"stage {i} of rank {stage.rank}: local {stage.local}, store {stage.store}; expected one "
                            f"of {call.n} ranks, and offsets from 0 on")  # fmt: skip


def _wiring(program: Program) -> dict[int, int]:
    """The stage that writes each channel; each is read as it says."""
    writers: dict[int, int] = {}
    readers: dict[int, set[int]] = defaultdict(set)
    for i, stage in enumerate(program.stages):
        for c in (*stage.ins, *stage.outs):
            if not 0 <= c < len(program.channels):
                raise PlanError(f"stage {i}: channel {c} does not exist; channels are 0..{len(program.channels) - 1}")
        for c in stage.outs:
            writer = program.channels[c].writer
            if c in writers or writer != stage.rank:
                raise PlanError(f"stage {i} of rank {stage.rank}: channel {c} is written by rank {writer} once")
            writers[c] = i
        for c in stage.ins:
            wanted = program.channels[c].readers
            if stage.rank in readers[c] or stage.rank not in wanted:
                raise PlanError(f"stage {i} of rank {stage.rank}: channel {c} is read once by each of {wanted}")
            readers[c].add(stage.rank)
    for c, channel in enumerate(program.channels):
        if c not in writers or readers[c] != set(channel.readers) or not channel.readers:
            raise PlanError(
                f"channel {c} of tree {channel.tree}: wants writer {channel.writer} and readers {channel.readers}, "
                f"has {'a' if c in writers else 'no'} writer and readers {sorted(readers[c])}"
            )
    return writers


def order_of(program: Program) -> list[int]:
    """Stage numbers, every stage after those that it reads from; PlanError for a cyclic wait."""
    writer = {c: i for i, stage in enumerate(program.stages) for c in stage.outs}
    graph = {i: [writer[c] for c in stage.ins] for i, stage in enumerate(program.stages)}
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        stuck = sorted(set(error.args[1]))
        raise PlanError(
            f"stages {stuck} wait for one another in a cycle; the trees of this plan are not trees"
        ) from error


def check_sorted(program: Program) -> None:
    """Prove that every stage stands behind those that it reads from.

    Then executors that run one stage's chunk after another's cannot wait for one another, however the stages are dealt
    out among them, if each keeps to the order of (chunk, place in the program): in this one order, each step stands
    behind all that it waits for.

    Raises:
        PlanError: naming both stages.
    """
    writer = {c: i for i, stage in enumerate(program.stages) for c in stage.outs}
    for i, stage in enumerate(program.stages):
        for c in stage.ins:
            if writer[c] >= i:
                raise PlanError(f"stage {i} stands before stage {writer[c]}, whose channel {c} it reads; sort the "
                                "stages of this program")  # fmt: skip


def _check_spans(program: Program, writers: dict[int, int]) -> None:
    for i, stage in enumerate(program.stages):
        for j in sorted({writers[c] for c in stage.ins}):
            if program.stages[j].count != stage.count:
                raise PlanError(f"stages {j} and {i} share a channel but walk {program.stages[j].count} and "
                                f"{stage.count} elements; both must walk the same span")  # fmt: skip


def _check_stage(program: Program, i: int, stage: Stage) -> None:
    operands = sorted([*range(len(stage.ins)), *([-1] if stage.local is not None else [])])
    if sorted(stage.fold) != operands or not operands or stage.count < 1:
        raise PlanError(f"stage {i}: fold {stage.fold} over {stage.count} elements must name operands {operands} once")
    if len(operands) > 1 and not program.call.reduces:
        kind = program.call.collective
        raise PlanError(f"stage {i}: folds {len(operands)} operands in a {kind}, which reduces nothing")
    if not stage.outs and stage.store is None:
        raise PlanError(f"stage {i} of rank {stage.rank}: its value goes nowhere")
    partial = program.call.reduces and stage.way == "up"
    if any(program.channels[c].partial != partial for c in stage.outs):
        values = "partial" if partial else "final"
        raise PlanError(f"stage {i}: way {stage.way} writes {values} values; its channels disagree")
    if any(program.channels[c].operands for c in stage.outs) and (stage.fold != (-1,) or not partial):
        raise PlanError(f"stage {i}: writes what it has folded into a channel of operands; lower the call again")
    if stage.final != (stage.way == "turn"):
        raise PlanError(f"stage {i}: a fold is final at the turn and nowhere else, got way {stage.way}")


def _check_stores(rank: int, wanted: Sequence[Piece], stores: list[Piece]) -> None:
    for start, length, sources in wanted:
        at, stop = start, start + length
        while at < stop:
            if not stores or stores[0][0] != at:
                raise PlanError(f"rank {rank}: element {at} of its result is written by no stage, or twice")
            first, count, got = stores.pop(0)
            want = tuple(sorted((r, off + first - start) for r, off in sources))
            if first + count > stop or got != want:
                what = f"rank {rank}: elements {first}..{first + count - 1}"
                raise PlanError(f"{what} hold contributions {got}, wanted {want}")
            at = first + count
    if stores:
        raise PlanError(f"rank {rank}: writes elements {stores[0][0]}.. of its result, which is nobody's")


def expected(call: Call, rank: int) -> list[Piece]:
    """What ``rank`` must receive: (start, length, contributions as (rank, offset in its send buffer)), by start."""
    if not call.total:
        return []
    everyone = tuple(range(call.n))
    kind = call.collective
    if kind == "custom":
        raise PlanError(f"what {call.name} must receive is said by its algorithm; give it to check()")
    pieces: list[Piece] = []
    if kind == "allreduce" or (kind == "reduce" and rank == call.root):
        pieces = [(0, call.counts[0], tuple((r, 0) for r in everyone))]
    elif kind == "broadcast" and rank != call.root:
        pieces = [(0, call.counts[0], ((call.root, 0),))]
    elif kind == "allgather" or (kind == "gather" and rank == call.root):
        pieces = [(*call.block(r), ((r, 0),)) for r in everyone]
    elif kind == "scatter":
        start, length = call.block(rank)
        pieces = [(0, length, ((call.root, start),))]
    elif kind == "reduce_scatter":
        start, length = call.block(rank)
        pieces = [(0, length, tuple((r, start) for r in everyone))]
    elif kind == "alltoall":
        for r in everyone:
            read, store, length = call.piece(r, rank)
            pieces.append((store, length, ((r, read),)))
    elif kind in ("scan", "exscan"):
        earlier = everyone[: rank + (kind == "scan")]
        pieces = [(0, call.counts[0] if earlier else 0, tuple((r, 0) for r in earlier))]
    return [piece for piece in pieces if piece[1] > 0]
