"""From an mpi4py call to a Call and two flat arrays, for each collective.

Each function checks the arguments of one rank (peers are compared later) and
returns a :class:`Prepared`. What only MPI can do raises ``buffers.Foreign``.
Meaning of arguments: MPI 4.1 chapter 6, spelled as in mpi4py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from .buffers import Buffer, in_place, op_name, parse
from .errors import ArgumentError
from .numerics import Array, check_op
from .program import Call


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call as this rank made it: what it sends from and receives into (views of the user's memory, or None)."""

    call: Call
    send: Array | None
    recv: Array | None


def broadcast(rank: int, n: int, buf: Any, root: int) -> Prepared:
    """``Bcast``: the root's vector to everybody."""
    check_root(root, n)
    buffer = parse(buf, name="buf", writable=rank != root)
    call = Call("broadcast", n, (buffer.count,), buffer.dtype, "", root)
    return Prepared(call, buffer.array if rank == root else None, None if rank == root else buffer.array)


def reduce(rank: int, n: int, sendbuf: Any, recvbuf: Any, op: MPI.Op | str, root: int) -> Prepared:
    """``Reduce``: the fold of all vectors to the root."""
    check_root(root, n)
    if rank != root:
        if in_place(sendbuf):
            raise ArgumentError(f"rank {rank}: MPI.IN_PLACE is for the root {root} alone; pass sendbuf")
        send = parse(sendbuf, name="sendbuf", writable=False)
        return Prepared(_reduction("reduce", n, (send.count,), send.dtype, op, root), send.array, None)
    send, recv = _pair(sendbuf, recvbuf)
    _equal(send, recv, recv.count)
    return Prepared(_reduction("reduce", n, (send.count,), send.dtype, op, root), send.array, recv.array)


def allreduce(rank: int, n: int, sendbuf: Any, recvbuf: Any, op: MPI.Op | str) -> Prepared:
    """``Allreduce``: the fold of all vectors to everybody."""
    send, recv = _pair(sendbuf, recvbuf)
    _equal(send, recv, recv.count)
    return Prepared(_reduction("allreduce", n, (send.count,), send.dtype, op, -1), send.array, recv.array)


def allgather(rank: int, n: int, sendbuf: Any, recvbuf: Any) -> Prepared:
    """``Allgather``: every rank's block to everybody."""
    recv = parse(recvbuf, name="recvbuf", writable=True)
    count = _blocks(recv, n, "recvbuf")
    block = recv.array[rank * count : (rank + 1) * count]
    send = Buffer(block, recv.dtype) if in_place(sendbuf) else parse(sendbuf, name="sendbuf", writable=False)
    _equal(send, recv, count)
    _apart(send.array, recv.array, block)
    return Prepared(Call("allgather", n, (count,), send.dtype), send.array, recv.array)


def gather(rank: int, n: int, sendbuf: Any, recvbuf: Any, root: int) -> Prepared:
    """``Gather``: every rank's block to the root."""
    check_root(root, n)
    if rank != root:
        if in_place(sendbuf):
            raise ArgumentError(f"rank {rank}: MPI.IN_PLACE is for the root {root} alone; pass sendbuf")
        send = parse(sendbuf, name="sendbuf", writable=False)
        return Prepared(Call("gather", n, (send.count,), send.dtype, "", root), send.array, None)
    recv = parse(recvbuf, name="recvbuf", writable=True)
    count = _blocks(recv, n, "recvbuf")
    block = recv.array[rank * count : (rank + 1) * count]
    send = Buffer(block, recv.dtype) if in_place(sendbuf) else parse(sendbuf, name="sendbuf", writable=False)
    _equal(send, recv, count)
    _apart(send.array, recv.array, block)
    return Prepared(Call("gather", n, (count,), send.dtype, "", root), send.array, recv.array)


def scatter(rank: int, n: int, sendbuf: Any, recvbuf: Any, root: int) -> Prepared:
    """``Scatter``: the root's blocks, one to each rank."""
    check_root(root, n)
    if rank != root:
        recv = parse(recvbuf, name="recvbuf", writable=True)
        return Prepared(Call("scatter", n, (recv.count,), recv.dtype, "", root), None, recv.array)
    send = parse(sendbuf, name="sendbuf", writable=False)
    count = _blocks(send, n, "sendbuf")
    block = send.array[rank * count : (rank + 1) * count]
    recv = Buffer(block, send.dtype) if in_place(recvbuf) else parse(recvbuf, name="recvbuf", writable=True)
    _equal(recv, send, count)
    _apart(recv.array, send.array, block)
    return Prepared(Call("scatter", n, (count,), send.dtype, "", root), send.array, recv.array)


def reduce_scatter(
    rank: int, n: int, sendbuf: Any, recvbuf: Any, counts: Callable[[int], tuple[int, ...]], op: MPI.Op | str
) -> Prepared:
    """``Reduce_scatter`` and ``Reduce_scatter_block``: the fold of all vectors, one block to each rank.

    Args:
        counts: gives every rank's block length from the length of this rank's receive buffer.
    """
    recv = parse(recvbuf, name="recvbuf", writable=True)
    if in_place(sendbuf):
        send = Buffer(recv.array.copy(), recv.dtype)  # the result overlaps the input of other blocks
        lengths = counts(recv.count // n if recv.count % n == 0 else -1)
    else:
        send = parse(sendbuf, name="sendbuf", writable=False)
        lengths = counts(recv.count)
    if send.count != sum(lengths):
        raise ArgumentError(
            f"rank {rank}: sendbuf has {send.count} elements, the blocks {list(lengths)} {sum(lengths)}; match them"
        )
    if recv.count < lengths[rank] or send.dtype != recv.dtype:
        raise ArgumentError(
            f"rank {rank}: recvbuf is {recv.count} x {recv.dtype}, its block is {lengths[rank]} x {send.dtype}; "
            "make them equal"
        )
    result = recv.array[: lengths[rank]]
    _apart(send.array, result, None)
    return Prepared(_reduction("reduce_scatter", n, lengths, send.dtype, op, -1), send.array, result)


def barrier(n: int) -> Prepared:
    """``Barrier``: meeting is all there is to it."""
    return Prepared(Call("barrier", n, (0,), ""), None, None)


def check_root(root: int, n: int) -> None:
    """Raise ArgumentError unless ``root`` is a rank."""
    if not isinstance(root, int | np.integer) or not 0 <= root < n:
        raise ArgumentError(f"root={root!r}: expected a rank 0..{n - 1}")


def _reduction(kind: Any, n: int, counts: tuple[int, ...], dtype: str, op: MPI.Op | str, root: int) -> Call:
    name = op_name(op)
    check_op(name, dtype)
    return Call(kind, n, counts, dtype, name, root)


def _pair(sendbuf: Any, recvbuf: Any) -> tuple[Buffer, Buffer]:
    """Send and receive buffers of a reduction; the same object twice, or IN_PLACE, is in place."""
    recv = parse(recvbuf, name="recvbuf", writable=True)
    if in_place(sendbuf) or sendbuf is recvbuf:
        return recv, recv
    send = parse(sendbuf, name="sendbuf", writable=False)
    _apart(send.array, recv.array, recv.array)
    return send, recv


def _equal(one: Buffer, other: Buffer, count: int) -> None:
    if (one.count, one.dtype) != (count, other.dtype):
        raise ArgumentError(
            f"send and receive buffers differ: {one.count} x {one.dtype} against {count} x {other.dtype}; "
            "make them equal"
        )


def _blocks(buffer: Buffer, n: int, name: str) -> int:
    if buffer.count % n:
        raise ArgumentError(f"{name} has {buffer.count} elements, no multiple of {n} ranks; correct its length")
    return buffer.count // n


def _apart(one: Array, other: Array, same: Array | None) -> None:
    """Raise ArgumentError if two buffers overlap, unless ``one`` is exactly ``same``."""
    if not np.may_share_memory(one, other):
        return
    if same is not None and one.ctypes.data == same.ctypes.data and one.nbytes == same.nbytes:
        return
    raise ArgumentError("send and receive buffers overlap; use MPI.IN_PLACE, or buffers that lie apart")
