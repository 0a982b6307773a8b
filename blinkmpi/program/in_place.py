"""The proof that a program may run in place: send and receive buffer are one memory.

A stage that stores elements must not come before another stage of its rank has read them from the send buffer. It
comes after, chunk by chunk, if it is made of what that stage has read: then a way of channels leads from one to the
other, all stages on it walk the same span in the same chunks, and each chunk is passed on before the next one takes
part in it. An alltoall's blocks are made of nothing that was there, so each store waits until what lies at its place
was sent (:func:`sent_before`). Pure.
"""

from collections import defaultdict

from msgspec.structs import replace

from ..errors import PlanError
from .call import REDUCTIONS
from .check import order_of
from .ir import Program, Stage


def check_in_place(program: Program) -> Program:
    """Prove, of a program that :func:`.check.check` has proved, that a call in place by it does the same.

    Only reductions are proved, and of these an exscan's operands are copied before the call. This holds for slots: by
    cma readers read the send buffer itself, as late as they like.

    Raises:
        PlanError: naming the rank, the elements and both stages.
    """
    if program.call.collective not in REDUCTIONS or program.call.collective == "exscan":
        return program
    writer = {c: i for i, stage in enumerate(program.stages) for c in stage.outs}
    after: dict[int, int] = {}  # a mask of the stages that each stage is made of
    for i in order_of(program):
        mask = 1 << i
        for c in program.stages[i].ins:
            mask |= after[writer[c]]
        after[i] = mask
    readers: dict[int, list[int]] = defaultdict(list)
    for i, stage in enumerate(program.stages):
        if stage.local is not None:
            readers[stage.rank].append(i)
    for i, stage in enumerate(program.stages):
        if stage.store is None:
            continue
        store = stage.store
        if program.call.collective == "reduce_scatter":  # its result lies in the rank's own block
            store += program.call.block(stage.rank)[0]
        for j in readers[stage.rank]:
            reader = program.stages[j]
            if i == j or not _overlap(store, stage.count, reader) or (_is_copy(stage) and stage.local == store):
                continue
            if not after[i] >> j & 1 or (reader.local, reader.count) != (store, stage.count):
                raise PlanError(
                    f"rank {stage.rank}: stage {i} may store elements {store}..{store + stage.count - 1} before stage "
                    f"{j} has read {reader.local}.. of them in place; read them once, or copy the input first"
                )
    return program


def sent_before(program: Program, rank: int) -> dict[Stage, tuple[int, ...]] | None:
    """What a rank's stages wait for besides in an alltoall in place: the channels that carry what they overwrite.

    A chunk is stored when the same chunk has been written to all of these. What a rank sends of its own waits for
    nothing but slots, so with this order of two stages the stages of all ranks still form no cycle.

    Returns:
        The channels by stage; None where a stage overwrites elements that are sent in other pieces: then the blocks
        must be copied before the call.
    """
    stages = program.of(rank)
    found: dict[Stage, tuple[int, ...]] = {}
    for stage in stages:
        if stage.store is None or _stays(stage):
            continue
        readers = [r for r in stages if r.local is not None and _overlap(stage.store, stage.count, r)]
        if any(r.ins or not r.outs or (r.local, r.count) != (stage.store, stage.count) for r in readers):
            return None
        found[stage] = tuple(r.outs[0] for r in readers)
    return found


def without_own_blocks(program: Program) -> Program:
    """An alltoall in place without the stages that copy a rank's block for itself to where it lies."""
    return replace(program, stages=tuple(stage for stage in program.stages if stage.outs or not _stays(stage)))


def _overlap(start: int, count: int, reader: Stage) -> bool:
    local = reader.local or 0
    return start < local + reader.count and local < start + count


def _stays(stage: Stage) -> bool:
    return _is_copy(stage) and stage.local == stage.store


def _is_copy(stage: Stage) -> bool:
    return stage.fold == (-1,)
