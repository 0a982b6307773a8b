"""Run a program for all ranks in one process, on NumPy: exactly the bits that a real executor gives.

The same folds, in the same order, in the same types. No MPI, no GPU.
"""

from collections.abc import Sequence

import numpy as np

from ..errors import ArgumentError, PlanError
from .call import Call
from .check import order_of
from .ir import Program, Stage
from .reduction import Array, accumulator_of, check_op, dtype_of, fold


def run(program: Program, sends: Sequence[Array | None]) -> list[Array | None]:
    """Execute ``program`` for all ranks.

    Args:
        sends: one 1-D array of the call's type for each rank, or None where the rank sends nothing.

    Returns:
        The receive array of each rank, or None where it receives nothing (the root of a broadcast, all but
        the root of a reduce or gather, rank 0 of an exscan, everybody in a barrier).

    Raises:
        ArgumentError: if a send array is missing or has another type or length than the call.
    """
    call = program.call
    dtype, accumulator = dtype_of(call.dtype), accumulator_of(call.dtype)
    reduces = call.reduces
    if reduces:
        check_op(call.op, call.dtype)
    _check_sends(call, sends)
    recvs = [np.zeros(call.recv_count(rank), dtype) if call.receives(rank) else None for rank in range(call.n)]
    slots: dict[int, Array] = {}
    with np.errstate(all="ignore"):
        for i in order_of(program):
            stage = program.stages[i]
            operands = [slots[stage.ins[k]] if k >= 0 else _local(sends, stage) for k in stage.fold]
            value = np.empty(stage.count, accumulator if reduces and stage.way != "down" else dtype)
            fold(call.op, operands, value, final=stage.final, n=call.n)
            if stage.way != "up":
                value = value.astype(dtype)
            slots |= {c: value if program.channels[c].wide else value.astype(dtype) for c in stage.outs}
            target = None if stage.store is None else recvs[stage.rank]
            if stage.store is not None and target is not None:
                target[stage.store : stage.store + stage.count] = value
    return recvs


def _check_sends(call: Call, sends: Sequence[Array | None]) -> None:
    if len(sends) != call.n:
        raise ArgumentError(f"{call.collective}: got {len(sends)} send arrays for {call.n} ranks; give one per rank")
    for rank, send in enumerate(sends):
        want = call.send_length(rank) if call.sends(rank) else -1
        if want >= 0 and (send is None or send.dtype != dtype_of(call.dtype) or send.shape != (want,)):
            got = "nothing" if send is None else f"{send.dtype} of shape {send.shape}"
            raise ArgumentError(
                f"{call.collective}: rank {rank} sends {got}, wanted {call.dtype} of shape ({want},); give that array"
            )


def _local(sends: Sequence[Array | None], stage: Stage) -> Array:
    send = sends[stage.rank]
    if send is None or stage.local is None:
        raise PlanError(f"rank {stage.rank}: a stage of tree {stage.tree} reads a send buffer that the rank has not; "
                        "check() the program")  # fmt: skip
    return send[stage.local : stage.local + stage.count]
