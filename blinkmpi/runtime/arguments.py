"""Check mpi4py's arguments of each collective, and make a Call and two flat arrays of them; bad ones are refused here.

Each function checks the arguments of one rank (the peers' are compared later) and returns a :class:`Prepared`. What
only MPI can do raises ``buffers.DelegatedToMPI``. The meaning of arguments is MPI 4.1's, chapter 6, spelled as in
mpi4py. A reduction looks at its operation first: one that is MPI's alone is so on all ranks, whatever their buffers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np
from mpi4py import MPI
from msgspec.structs import replace

from ..errors import ArgumentError, BufferTypeError
from ..program.call import Call
from ..program.memory import Buffer, DeviceArray, Segments, address, overlap
from ..program.reduction import FLOATS, NARROW, Array, check_op, dtype_of
from ..trees.tree import Collective
from ..util.numbers import rank_of
from .buffers import DelegatedToMPI, in_place, op_name, parse
from .foreign import imported

if TYPE_CHECKING:
    from ..program.blocks import BlockMoves


class Copy(NamedTuple):
    """A piece of memory and one of the same length that is copied there."""

    to: Array | DeviceArray
    source: Array | DeviceArray


class Lengths(msgspec.Struct, frozen=True):
    """What a rank tells others of lengths (all tell as many ``numbers``), and how it compares what it hears of all."""

    numbers: tuple[int, ...]
    compare: Callable[[tuple[tuple[int, ...], ...]], None]


class CountsOnGpu(msgspec.Struct, frozen=True):
    """Lengths of blocks in GPU memory, int64 and in elements, one for each rank: what is sent, and what has come.

    ``places`` is where each block that comes is to lie; None: one behind another.
    """

    counts: DeviceArray
    told: DeviceArray
    places: DeviceArray | None = None

    @property
    def arrays(self) -> tuple[DeviceArray, ...]:
        """All of them."""
        return (self.counts, self.told) if self.places is None else (self.counts, self.told, self.places)


class InBlocks(msgspec.Struct, frozen=True):
    """A call as blocks between each two ranks: what this rank moves between its whole arrays.

    In host memory ``lengths`` are told if two ranks turn out to differ, and only then; in GPU memory kernels compare.
    With ``counts`` the lengths are in GPU memory, and ``moves`` has none.
    """

    moves: BlockMoves
    send: Array | DeviceArray | None
    recv: Array | DeviceArray | None
    lengths: Lengths
    counts: CountsOnGpu | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the larger one of this rank's buffers that are moved, or that may be."""
        if self.counts is None:
            return self.moves.nbytes
        return max(array.nbytes for array in (self.send, self.recv) if array is not None)


class Prepared(msgspec.Struct, frozen=True):
    """A call as this rank made it: what it sends from and receives into (the user's memory, or None).

    ``final`` is where the result goes in the end, if peers read what lies there until then; else None. With a final
    destination in host memory and no ``recv``, memory of our own has to be received into (:meth:`received_in`).
    ``before`` and ``after`` are the copies, before each call and after it, between the user's memory and what stands
    for it: memory of our own, which lives as long as this. ``plain``: whether such memory may be another rank's, too,
    so that no rank may count on registered buffers. A launch of a group has ``said``, which the ranks compare, and in
    GPU memory the ``segments`` that are copied before it, and after it. ``blocks`` is another way to make
    it, if there is one; in GPU memory the way, and then ``call`` has no lengths.
    """

    call: Call
    send: Array | DeviceArray | None
    recv: Array | DeviceArray | None
    final: Array | DeviceArray | None = None
    before: tuple[Copy, ...] = ()
    after: tuple[Copy, ...] = ()
    plain: bool = False
    said: str = ""
    segments: tuple[Segments, Segments] | None = None
    blocks: InBlocks | None = None

    def received_in(self, memory: Array) -> Prepared:
        """The same, received into a part of ``memory``, which is bytes."""
        final = cast(Array, self.final)
        return replace(self, recv=memory[: final.nbytes].view(final.dtype))

    @property
    def on_device(self) -> bool:
        """Whether the buffers lie in GPU memory."""
        return isinstance(self.send, DeviceArray) or isinstance(self.recv, DeviceArray)


class NeedsNumbers(msgspec.Struct, frozen=True):
    """A call whose ranks must tell each other their ``numbers`` before it is known: all have as many.

    ``with_numbers`` makes the call of every rank's numbers; ``buffers`` are this rank's, for those who look at memory.
    ``blocks`` is the call as it can be made without them, if it can.
    """

    numbers: tuple[int, ...]
    with_numbers: Callable[[tuple[tuple[int, ...], ...]], Prepared]
    buffers: Prepared
    blocks: InBlocks | None = None

    @property
    def on_device(self) -> bool:
        """Whether the buffers lie in GPU memory."""
        return self.buffers.on_device


Read = Prepared | NeedsNumbers | InBlocks | Exception  # the result of reading a call's arguments


def broadcast(rank: int, n: int, buf: Any, root: int) -> Prepared:
    """``Bcast``: the root's vector to everybody."""
    root = rank_of(root, n)
    buffer = parse(buf, name="buf", writable=rank != root)
    call = Call("broadcast", n, (buffer.count,), buffer.dtype, "", root)
    return Prepared(call, buffer.array if rank == root else None, None if rank == root else buffer.array)


def reduce(rank: int, n: int, sendbuf: Any, recvbuf: Any, op: MPI.Op | str, root: int) -> Prepared:
    """``Reduce``: the fold of all vectors to the root."""
    name = op_name(op)
    root = rank_of(root, n)
    if rank == root:
        send, recv = _pair(sendbuf, recvbuf)
        return Prepared(_reduction("reduce", n, (send.count,), send.dtype, name, root), send.array, recv.array)
    send = leaf(rank, root, sendbuf)
    return Prepared(_reduction("reduce", n, (send.count,), send.dtype, name, root), send.array, None)


def allreduce(rank: int, n: int, sendbuf: Any, recvbuf: Any, op: MPI.Op | str) -> Prepared:
    """``Allreduce``: the fold of all vectors to everybody."""
    name = op_name(op)
    send, recv = _pair(sendbuf, recvbuf)
    return Prepared(_reduction("allreduce", n, (send.count,), send.dtype, name), send.array, recv.array)


def allgather(rank: int, n: int, sendbuf: Any, recvbuf: Any) -> Prepared:
    """``Allgather``: every rank's block to everybody."""
    send, recv = _collected(rank, n, sendbuf, recvbuf)
    return Prepared(Call("allgather", n, (send.count,), send.dtype), send.array, recv.array)


def gather(rank: int, n: int, sendbuf: Any, recvbuf: Any, root: int) -> Prepared:
    """``Gather``: every rank's block to the root."""
    root = rank_of(root, n)
    if rank == root:
        send, recv = _collected(rank, n, sendbuf, recvbuf)
        return Prepared(Call("gather", n, (send.count,), send.dtype, "", root), send.array, recv.array)
    send = leaf(rank, root, sendbuf)
    return Prepared(Call("gather", n, (send.count,), send.dtype, "", root), send.array, None)


def scatter(rank: int, n: int, sendbuf: Any, recvbuf: Any, root: int) -> Prepared:
    """``Scatter``: the root's blocks, one to each rank."""
    root = rank_of(root, n)
    if rank != root:
        recv = parse(recvbuf, name="recvbuf", writable=True)
        return Prepared(Call("scatter", n, (recv.count,), recv.dtype, "", root), None, recv.array)
    send = parse(sendbuf, name="sendbuf", writable=False, blocks=n)
    block = _block(send, rank, n, "sendbuf")
    recv = block if in_place(recvbuf) else parse(recvbuf, name="recvbuf", writable=True)
    check_equal(recv, block)
    check_apart(recv.array, send.array, block.array)
    return Prepared(Call("scatter", n, (recv.count,), send.dtype, "", root), send.array, recv.array)


def reduce_scatter_block(rank: int, n: int, sendbuf: Any, recvbuf: Any, op: MPI.Op | str) -> Prepared:
    """``Reduce_scatter_block``: the fold of all vectors, one of ``n`` equal blocks to each rank."""
    name = op_name(op)
    if in_place(sendbuf):
        recv = parse(recvbuf, name="recvbuf", writable=True, blocks=n)
        return _scattered_in_place(rank, n, recv, (_block(recv, 0, n, "recvbuf").count,) * n, name)
    recv = parse(recvbuf, name="recvbuf", writable=True)
    send = parse(sendbuf, name="sendbuf", writable=False, blocks=n)
    return _scattered(rank, n, send, recv, (recv.count,) * n, name)


def reduce_scatter(
    rank: int,
    n: int,
    sendbuf: Any,
    recvbuf: Any,
    recvcounts: Any,
    op: MPI.Op | str,
    exchange: Callable[[int], tuple[int, ...]],
) -> Prepared:
    """``Reduce_scatter``: the fold of all vectors, a block of ``recvcounts[i]`` elements to rank i.

    Args:
        exchange: gives every rank's number from this rank's; for ``recvcounts=None``, where blocks
            are as long as the receive buffers. All ranks must come to it, also those in trouble.
    """
    name = op_name(op)
    if recvcounts is not None:
        lengths = _lengths(recvcounts, n)
        recv = parse(recvbuf, name="recvbuf", writable=True)
    else:
        try:
            if in_place(sendbuf):
                raise ArgumentError(f"rank {rank}: recvcounts is needed with MPI.IN_PLACE; pass every block's length")
            recv = parse(recvbuf, name="recvbuf", writable=True)
        except Exception:  # the object's own code may raise anything
            exchange(-1)
            raise
        lengths = exchange(recv.count)
        if min(lengths) < 0:
            raise DelegatedToMPI("another rank's receive buffer is not ours to read")
    if not in_place(sendbuf):
        return _scattered(rank, n, parse(sendbuf, name="sendbuf", writable=False), recv, lengths, name)
    if recv.count < sum(lengths):
        raise ArgumentError(
            f"rank {rank}: recvbuf has {recv.count} elements, the blocks {list(lengths)} {sum(lengths)}; match them"
        )
    return _scattered_in_place(rank, n, Buffer(recv.array[: sum(lengths)], recv.dtype), lengths, name)


def scan(_: int, n: int, sendbuf: Any, recvbuf: Any, op: MPI.Op | str) -> Prepared:
    """``Scan``: to each rank the fold of all vectors up to its own."""
    name = _scan_op(op)
    send, recv = _pair(sendbuf, recvbuf)
    return Prepared(_reduction("scan", n, (send.count,), send.dtype, name), send.array, recv.array)


def exscan(rank: int, n: int, sendbuf: Any, recvbuf: Any, op: MPI.Op | str) -> Prepared:
    """``Exscan``: to each rank but the first the fold of all vectors before its own."""
    name = _scan_op(op)
    aside = in_place(sendbuf) or sendbuf is recvbuf
    if rank == 0:  # rank 0 receives nothing: its receive buffer stays as it is
        send = parse(recvbuf if aside else sendbuf, name="recvbuf" if aside else "sendbuf", writable=False)
        return Prepared(_reduction("exscan", n, (send.count,), send.dtype, name), send.array, None, plain=True)
    send, recv = _pair(sendbuf, recvbuf)
    call = _reduction("exscan", n, (send.count,), send.dtype, name)
    if not aside and address(send.array) != address(recv.array):
        return Prepared(call, send.array, recv.array, plain=True)
    if rank == n - 1 and isinstance(recv.array, np.ndarray):  # the last rank's operand goes to nobody
        return Prepared(call, recv.array, recv.array, plain=True)
    own = memory_like(send.array, send.count)  # the result would overwrite the operand before it is sent
    return Prepared(call, own, recv.array, before=(Copy(own, recv.array),), plain=True)


def barrier(_: int, n: int) -> Prepared:
    """``Barrier``: no data."""
    return Prepared(Call("barrier", n, (0,), ""), None, None)


def in_mpi(call: Call) -> bool:
    """Whether MPI has the element type and the operation, whichever MPI it is, and means the same by them.

    MPI's min and max of floats may lose a NaN; to mpi4py an uint8 array is MPI.BYTE, which MPI does not add; and Open
    MPI's sums of 8- and 16-bit integers saturate where its vector units do them, and wrap elsewhere.
    """
    if not call.op:
        return call.dtype not in NARROW
    if call.op == "avg" or (call.op in ("min", "max") and call.dtype in FLOATS):
        return False
    return dtype_of(call.dtype).itemsize >= 4 or call.dtype == "bool"


def memory_like(array: Array | DeviceArray, count: int) -> Array | DeviceArray:
    """Memory of our own for ``count`` elements, on the side and of the type of ``array``."""
    if not isinstance(array, DeviceArray):
        return np.empty(count, array.dtype)
    if (cupy := imported("cupy")) is None:  # without CuPy the communicator has no GPUs
        raise BufferTypeError("a buffer lies in GPU memory, and this job has no CuPy; install it, or pass NumPy copies")
    memory = cupy.empty(count * array.itemsize, "uint8")
    return DeviceArray(memory.data.ptr, count, array.itemsize, array.stream, memory, device=array.device)


def sending_copy(ready: Prepared) -> Prepared:
    """A call in place that sends a copy, which is made before it."""
    blocks = cast(Array | DeviceArray, ready.recv)
    own = memory_like(blocks, blocks.size)
    return replace(ready, send=own, before=(*ready.before, Copy(own, blocks)))


def _scan_op(op: MPI.Op | str) -> str:
    name = op_name(op)
    if name == "avg":
        raise ArgumentError("op='avg' of a scan is not defined, as each rank folds another number of vectors; pass sum")
    return name


def _reduction(kind: Collective, n: int, counts: tuple[int, ...], dtype: str, op: str, root: int = -1) -> Call:
    check_op(op, dtype)
    return Call(kind, n, counts, dtype, op, root)


def _pair(sendbuf: Any, recvbuf: Any) -> tuple[Buffer, Buffer]:
    """Send and receive buffers of a reduction; the same object twice, or IN_PLACE, is in place."""
    recv = parse(recvbuf, name="recvbuf", writable=True)
    if in_place(sendbuf) or sendbuf is recvbuf:
        return recv, recv
    send = parse(sendbuf, name="sendbuf", writable=False)
    check_equal(send, recv)
    check_apart(send.array, recv.array, recv.array)
    return send, recv


def _collected(rank: int, n: int, sendbuf: Any, recvbuf: Any) -> tuple[Buffer, Buffer]:
    """This rank's block and the buffer of all blocks."""
    recv = parse(recvbuf, name="recvbuf", writable=True, blocks=n)
    block = _block(recv, rank, n, "recvbuf")
    send = block if in_place(sendbuf) else parse(sendbuf, name="sendbuf", writable=False)
    check_equal(send, block)
    check_apart(send.array, recv.array, block.array)
    return send, recv


def leaf(rank: int, root: int, sendbuf: Any) -> Buffer:
    """What a rank that is not the root gives."""
    if in_place(sendbuf):
        raise BufferTypeError(f"rank {rank}: MPI.IN_PLACE (or None) is for the root {root} alone; pass sendbuf")
    return parse(sendbuf, name="sendbuf", writable=False)


def _scattered(rank: int, n: int, send: Buffer, recv: Buffer, lengths: tuple[int, ...], op: str) -> Prepared:
    """A Reduce_scatter with block lengths. On a GPU the result may take the place of this rank's own block."""
    if send.count != sum(lengths):
        raise ArgumentError(
            f"rank {rank}: sendbuf has {send.count} elements, the blocks {list(lengths)} {sum(lengths)}; match them"
        )
    check_equal(recv, Buffer(send.array[: lengths[rank]], send.dtype))
    call = _reduction("reduce_scatter", n, lengths, send.dtype, op)
    start, count = call.block(rank)
    own = send.array[start : start + count] if isinstance(send.array, DeviceArray) else None
    check_apart(recv.array, send.array, own)
    return Prepared(call, send.array, recv.array)


def _scattered_in_place(rank: int, n: int, whole: Buffer, lengths: tuple[int, ...], op: str) -> Prepared:
    """A Reduce_scatter of vectors that lie where the results belong: to their front.

    What lies at the front is read by others, and what lies behind the result stays as it was, on which programs for
    mpi4py may count: so a result is received elsewhere and goes to the front when all have read. On a GPU it takes the
    place of the rank's own block first, which nobody else reads, and that is then lost. A GPU cannot move what would
    overlap itself: if some rank's block would, all copy their vectors first.
    """
    call, array = _reduction("reduce_scatter", n, lengths, whole.dtype, op), whole.array
    start, count = call.block(rank)
    front = array[:count]
    if isinstance(array, DeviceArray) and any(0 < begin < length for begin, length in map(call.block, range(n))):
        return Prepared(call, _copy(array), front)
    if not start or not count:
        return Prepared(call, array, front)
    return Prepared(call, array, array[start : start + count] if isinstance(array, DeviceArray) else None, front)


def _copy(array: DeviceArray) -> DeviceArray:
    """Memory that ``array`` is copied to before each call."""
    return replace(cast(DeviceArray, memory_like(array, array.size)), copy_of=array.ptr)


def _lengths(recvcounts: Any, n: int) -> tuple[int, ...]:
    try:
        lengths = tuple(operator.index(c) for c in recvcounts)
    except TypeError:
        raise BufferTypeError(f"recvcounts={recvcounts!r}: expected {n} integers") from None
    if len(lengths) != n or min(lengths) < 0:
        raise ArgumentError(f"recvcounts={list(lengths)}: expected {n} numbers of at least 0")
    return lengths


def check_equal(one: Buffer, other: Buffer) -> None:
    if (one.count, one.dtype) != (other.count, other.dtype):
        raise ArgumentError(
            f"send and receive buffers differ: {one.count} x {one.dtype} against {other.count} x {other.dtype}; "
            "make them equal"
        )


def _block(buffer: Buffer, index: int, n: int, name: str) -> Buffer:
    """One of ``n`` equal blocks."""
    if buffer.count % n:
        raise ArgumentError(f"{name} has {buffer.count} elements, no multiple of {n} ranks; correct its length")
    count = buffer.count // n
    return Buffer(buffer.array[index * count : (index + 1) * count], buffer.dtype)


def check_apart(one: Array | DeviceArray, other: Array | DeviceArray, same: Array | DeviceArray | None) -> None:
    """Raise ArgumentError if two buffers overlap, unless ``one`` is exactly ``same``, or lie in different memories."""
    if isinstance(one, DeviceArray) != isinstance(other, DeviceArray):
        raise BufferTypeError("one buffer lies in GPU memory, the other in the host's; pass both on one side")
    if not overlap(one, other):
        return
    if same is not None and address(one) == address(same) and one.nbytes == same.nbytes:
        return
    raise ArgumentError("send and receive buffers overlap; use MPI.IN_PLACE, or buffers that lie apart")
