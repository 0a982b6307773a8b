"""Run a flow on NumPy by what it says, value by value: for collectives that no call has, and to compare others with."""

from collections.abc import Sequence

import numpy as np

from ..errors import ArgumentError
from ..program.reduction import NAMES, Array, check_op, fold
from .flow import Flow


def interpret(flow: Flow, sends: Sequence[Array | None], op: str) -> list[list[Array | None]]:
    """Each rank's chunks of output, None where nothing is written.

    Args:
        sends: a 1-D array for each rank that gives something, all of one type, in equal chunks: all of one length.
        op: folds operands, in the type of the arrays; unused where nothing is folded.

    Raises:
        ArgumentError: for arrays that cannot be cut so. BufferTypeError: for an operation that the type has not.
    """
    given = flow.goal.given
    inputs = _cut(given, sends)
    if any(len(node.operands) > 1 for node in flow.nodes):
        dtype = next(parts[0].dtype for parts in inputs if parts)
        check_op(op, NAMES.get(dtype, dtype.str))
    values: list[Array] = []
    for node in flow.nodes:
        operands = [inputs[node.rank][~o] if o < 0 else values[o] for o in node.operands]
        value = np.empty_like(operands[0])
        fold(op, operands, value, final=False, n=flow.goal.n)
        values.append(value)
    return [
        [None if o is None else inputs[rank][~o] if o < 0 else values[o] for o in outputs]
        for rank, outputs in enumerate(flow.outputs)
    ]


def _cut(given: Sequence[int], sends: Sequence[Array | None]) -> list[list[Array]]:
    """The chunks of every rank's input."""
    if len(sends) != len(given):
        raise ArgumentError(f"{len(sends)} arrays for {len(given)} ranks; give one for each")
    lengths = set()
    found: list[list[Array]] = []
    for rank, (count, send) in enumerate(zip(given, sends, strict=True)):
        if count and (send is None or send.ndim != 1 or send.size % count):
            got = "none" if send is None else f"one of shape {send.shape}"
            raise ArgumentError(
                f"rank {rank} gives {count} chunks: expected an array of {count} equal parts, got {got}"
            )
        if count and send is not None:
            lengths.add((send.size // count, send.dtype))
        found.append(list(send.reshape(count, -1)) if count and send is not None else [])
    if len(lengths) > 1:
        raise ArgumentError(f"chunks of {sorted(map(str, lengths))}; expected one length and type on all ranks")
    return found
