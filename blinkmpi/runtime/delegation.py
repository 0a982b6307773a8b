"""Compare what must be equal on all ranks before MPI makes a call: operation, root, element type and lengths.

MPI's own collectives wait without a deadline, or return what is no sum, where the ranks' operation, root, element type
or lengths differ. Of a datatype the bytes are told, and in reductions the basic types that it is of.
"""

from __future__ import annotations

from typing import Any

from mpi4py import MPI
from mpi4py.util import dtlib

from ..errors import MismatchError
from ..util.text import brief, error_text
from .buffers import OPS, DelegatedToMPI, detached, flat, in_place, unpack
from .collectives import Invocation

OPERATIONS = {
    **OPS, "maxloc": MPI.MAXLOC, "minloc": MPI.MINLOC, "replace": MPI.REPLACE, "no_op": MPI.NO_OP,
}  # fmt: skip

BY_A_PEER = "another rank's arguments are MPI's"  # the reason where this rank's own arguments need no MPI


def delegated_in_group(name: str) -> MismatchError:
    """The error where a group has met a call of another rank's that is MPI's."""
    text = f"a group of {name} here meets a single call of another rank's that only MPI can make"
    return MismatchError(f"{text}; make such calls outside of groups on all ranks. The communicator is dead")


def told(invocation: Invocation, rank: int, n: int) -> str:
    """What the calls of all ranks have in common, if they fit: ``Iallreduce(8000 bytes of float64, op sum)``."""
    name = invocation.method.mpi.__name__.strip("_").capitalize()
    try:
        return f"{name}({', '.join(_parts(name, invocation.args, rank, n))})"
    except Exception as error:  # mpi4py raises the same for the call itself
        return f"{name}(with arguments that MPI cannot read: {brief(error_text(error))})"


def _parts(name: str, args: tuple[Any, ...], rank: int, n: int) -> list[str]:
    """One for each thing that must be equal; none of what only pairs of ranks know."""
    parts: list[str] = []
    name = name.lower()
    if name in ("ireduce", "iallreduce", "iscan", "iexscan"):
        send, recv, op, *root = args
        parts = [_vector(recv if in_place(send) else send), _operation(op), *map(_root, root)]
    elif name in ("ireduce_scatter", "ireduce_scatter_block"):
        send, recv, *counts, op = args
        parts = [_operation(op)]
        if not counts:
            parts += [_vector(recv, n if in_place(send) else 1)]
        elif counts[0] is not None:
            parts += [_vector(recv if in_place(send) else send), f"blocks {[int(c) for c in counts[0]]}"]
    elif name == "ibcast":
        parts = [_bytes(args[0]), _root(args[1])]
    elif name in ("igather", "iscatter"):
        send, recv, root = args
        one, all_blocks = (send, recv) if name == "igather" else (recv, send)
        whole = in_place(one) and rank == int(root)
        parts = [_bytes(all_blocks, n) if whole else _bytes(one), _root(root)]
    elif name == "iallgather":
        parts = [_bytes(args[1], n) if in_place(args[0]) else _bytes(args[0])]
    elif name == "ialltoall":
        parts = [_bytes(args[1], n)]
    elif name in ("igatherv", "iscatterv"):
        parts = [_root(args[2])]
    return parts


def _root(root: Any) -> str:
    return f"root {int(root)}"


def _operation(op: MPI.Op | str) -> str:
    if isinstance(op, MPI.Op):
        if not op.is_predefined:
            return "op of the user's" if op.is_commutative else "op of the user's that does not commute"
        op = next((name for name, known in OPERATIONS.items() if known == op), "unknown")
    return f"op {op}"


def _bytes(spec: Any, blocks: int = 1) -> str:
    return f"{_length(spec, blocks)[0]} bytes"


def _vector(spec: Any, blocks: int = 1) -> str:
    nbytes, kind = _length(spec, blocks)
    return f"{nbytes} bytes of {', '.join(sorted(_basic_types(kind)))}"


def _length(spec: Any, blocks: int) -> tuple[int, MPI.Datatype]:
    """The bytes of one of so many blocks, and their datatype, as mpi4py reads a specification."""
    data, count, displacement, kind = spec, None, None, None
    if isinstance(spec, list | tuple):
        data, count, displacement, kind = unpack(spec, "buffer")
    nothing = data is None or data is MPI.BOTTOM
    nbytes = 0 if nothing else MPI.buffer.frombuffer(detached(data), readonly=True).nbytes
    if isinstance(kind, str):
        kind = MPI._typedict[kind]
    if kind is None:
        kind = _kind_of(data)
    if count is None:
        count = (nbytes // max(1, kind.extent) - int(displacement or 0)) // blocks
    return int(count) * kind.size, kind


def _kind_of(data: Any) -> MPI.Datatype:
    try:
        array: Any = flat(data, "buffer", writable=False)
        return MPI._typedict.get(memoryview(array).format, MPI.BYTE)
    except (DelegatedToMPI, ValueError):  # NumPy lacks the type
        return MPI.BYTE


def _basic_types(kind: MPI.Datatype) -> set[str]:
    """The basic types that a datatype is of, by NumPy's names where it has them."""
    if kind.is_predefined:
        try:
            return {dtlib.to_numpy_dtype(kind).name}
        except (ValueError, MPI.Exception):
            return {kind.name}
    base, _, made = kind.decode()
    parts = made.get("datatypes", [base])
    found = set().union(*map(_basic_types, parts))
    for part in parts:
        if part and not part.is_predefined:
            part.Free()
    return found
