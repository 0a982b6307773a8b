"""From the calls of a group to launches: calls of one vector, whose operands are gathered from many buffers.

Each launch says what the whole group is from there on, and the ranks compare that: so they differ before the first has
moved anything, wherever in the group their calls do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from mpi4py import MPI
from msgspec.structs import replace

from ...errors import ArgumentError, BlinkError, BufferTypeError
from ...program.call import Call
from ...program.memory import DeviceArray, Segments, address
from ...program.reduction import NARROW, Array, dtype_of
from ..arguments import Copy, NeedsNumbers, Prepared
from ..buffers import DelegatedToMPI, mpi_op
from ..call_keys import Keyed
from ..collectives import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BCAST,
    BLOCKS,
    GATHER,
    REDUCE,
    SCATTER,
    CollectiveMethod,
    Invocation,
    describe,
)
from ..cuda.buffers import stream_address
from . import buckets
from .buckets import BucketLayout, Item, UsedMemory

if TYPE_CHECKING:
    from ..making import CallMaker

PACKED = frozenset((BCAST, REDUCE, ALLREDUCE, GATHER, SCATTER, ALLGATHER, BLOCKS, ALLTOALL))
# Bytes of a call that is not packed, and of the calls that are packed into one. On CPU ranks copying takes longer than
# a call from about there on (benchmarks/groups.py). On GPUs, calculated and not measured: gathering and
# scattering 8 MiB takes as long as the launch of a kernel that waits for its peers.
HOST_ALONE, HOST_MOST = 16 << 10, 16 << 20
GPU_ALONE, GPU_MOST = 8 << 20, 64 << 20
ON_DEVICE_ALIGNED = 16  # bytes that one thread moves at once
APART = 64  # bytes: send and receive buckets share no line
LONG_TEXT = 120  # characters of what ranks compare, from which it has a digest in front: messages show its head
_numbers = count()  # of launches that are kept


class NotedCall(NamedTuple):
    """A call of a group, as it was made."""

    method: CollectiveMethod
    args: tuple[Any, ...]
    timeout_s: float | None
    stream: Any


@dataclass(frozen=True, slots=True)
class GroupLaunch(Keyed):
    """Some calls of a group that are one call of ours; the argument of a grouped :class:`CollectiveMethod`.

    Attributes:
        calls: their numbers in the group.
        method: whose only argument this is; or the call's own, which has its own arguments, if there is no ``ready``.
        ready: the call, or what all ranks must learn.
        key: finds it again; None: it is not kept.
        own: the collective without a group, and its arguments where MPI makes it.
        streams: on which its buffers are used: the one that it takes, and others.
    """

    calls: tuple[int, ...]
    method: CollectiveMethod
    ready: Prepared | Exception | None = None
    key: int | None = None
    own: Invocation | None = None
    streams: tuple[int, ...] = ()

    def begin(self, comm: MPI.Intracomm) -> Any:
        """Begin MPI's own collective on the bucket."""
        ready, own = cast(Prepared, self.ready), cast(Invocation, self.own)
        for to, source in ready.before:
            to[...] = source  # type: ignore[index]
        return Unpacking(own.begin(comm), ready.after)


class Unpacking:
    """A request of MPI's whose result goes to the user's buffers when it is complete."""

    def __init__(self, request: MPI.Request, after: Sequence[Copy]) -> None:
        self._request, self._after = request, after

    def Test(self) -> bool:
        """Whether the results are there."""
        if not self._request.Test():
            return False
        for to, source in self._after:
            to[...] = source  # type: ignore[index]
        return True


def _ready(_rank: int, _n: int, launch: GroupLaunch) -> Prepared:
    if isinstance(launch.ready, Exception):
        raise launch.ready
    return cast(Prepared, launch.ready)


def _begin(comm: MPI.Intracomm, launch: GroupLaunch) -> Any:
    return launch.begin(comm)


@cache
def grouped(method: CollectiveMethod) -> CollectiveMethod:
    """The form of a collective whose argument is a :class:`GroupLaunch`."""
    return CollectiveMethod(method.name, _ready, _begin, grouped=True)


def refused(method: CollectiveMethod, error: Exception) -> tuple[GroupLaunch, ...]:
    """What tells all ranks that this one cannot make a group that begins with ``method``."""
    return (GroupLaunch((), grouped(method), error),)


def launches(maker: CallMaker, calls: Sequence[NotedCall], *, kept: bool) -> tuple[GroupLaunch, ...]:
    """What a group's calls make.

    Args:
        kept: whether they are made again on the same buffers; they do not keep these alive.
    """
    read: list[Prepared | None] = []
    for i, call in enumerate(calls):
        ready = _read(maker, call)
        if isinstance(ready, Exception):
            return refused(calls[0].method, _in_group(ready, i, call.method.name) if len(calls) > 1 else ready)
        read.append(ready)
    if pair := buckets.conflict([() if ready is None else _spans(ready) for ready in read]):
        text = (
            f"calls {pair[0]} and {pair[1]} of the group ({calls[pair[0]].method.name}, {calls[pair[1]].method.name}) "
            "use the same memory, and one of them writes it; make the second one behind the group"
        )
        return refused(calls[0].method, ArgumentError(text))
    found: list[GroupLaunch] = []
    rows = _rows(read)
    texts = [_text([read[i] for i in row], calls[row[0]].method.name) for row in rows]
    if len(rows) > 1:
        texts = [f"{text} [calls {buckets.numbered(row)}]" for text, row in zip(texts, rows, strict=True)]
    for at, row in enumerate(rows):
        mine = [read[i] for i in row]
        if mine[0] is None:
            found.append(GroupLaunch(row, calls[row[0]].method))
            continue
        streams = _streams(mine, [calls[i] for i in row])
        single = len(row) == 1 or not any(one.call.total for one in mine if one is not None)
        ready = _unowned(mine[0], streams) if single else _packed(maker, mine, streams)
        own: Invocation | None = None
        if ready.call.dtype not in NARROW and not ready.on_device:  # else MPI lacks the type
            args = calls[row[0]].args if single else _for_mpi(ready, maker.context.rank)
            own = Invocation(calls[row[0]].method, args)
            own = own.unowned() if single and kept else own
        said = "" if len(rows) == len(row) == 1 else _said(texts[at:])
        method = grouped(calls[row[0]].method)
        found.append(
            GroupLaunch(row, method, replace(ready, said=said), next(_numbers) if kept else None, own, streams)
        )
    return tuple(found)


def _read(maker: CallMaker, call: NotedCall) -> Prepared | Exception | None:
    """A call's arguments, or what is wrong with them; None for a call that is made by itself."""
    if call.method not in PACKED:
        return None
    ready = maker.binder.prepare(Invocation(call.method, call.args), call.timeout_s, call.stream)
    if isinstance(ready, DelegatedToMPI):
        return BufferTypeError(f"{ready}, and MPI makes such calls one by one; make it outside of the group")
    assert not isinstance(ready, NeedsNumbers), "those are not packed"
    return None if isinstance(ready, Prepared) and (ready.before or ready.after) else ready


def _in_group(error: Exception, i: int, name: str) -> Exception:
    kind = type(error) if isinstance(error, BlinkError) else BufferTypeError
    return kind(f"call {i} of the group, {name}: {error}")


def _rows(read: Sequence[Prepared | None]) -> list[tuple[int, ...]]:
    items = [Item(None, 0) if ready is None else Item(_kind(ready), ready.call.nbytes) for ready in read]
    on_device = any(ready is not None and ready.on_device for ready in read)
    return buckets.together(items, *((GPU_ALONE, GPU_MOST) if on_device else (HOST_ALONE, HOST_MOST)))


def _kind(ready: Prepared) -> tuple[Any, ...]:
    call = ready.call
    return call.collective, call.dtype, call.op, call.root, ready.on_device


def _text(mine: Sequence[Prepared | None], name: str) -> str:
    """Some calls in words that differ if they do."""
    if mine[0] is None:
        return f"{name}(...)"
    call = mine[0].call
    if len(mine) == 1:
        return describe(call)
    counts = buckets.runs([ready.call.counts[0] for ready in mine if ready is not None])
    op, root = f", op {call.op}" if call.op else "", f", root {call.root}" if call.root >= 0 else ""
    return f"{call.collective}(group of {len(mine)}: {counts} x {call.dtype}{op}{root})"


def _said(texts: Sequence[str]) -> str:
    """What the ranks compare: this launch and those behind it."""
    text = "; then ".join(texts)
    if len(text) > LONG_TEXT:
        digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        text = text.replace("(", f"({digest}: ", 1)
    return text


def _spans(ready: Prepared) -> list[UsedMemory]:
    """The user's memory that a call reads and writes; what it does within itself was looked at."""
    spans = []
    if ready.send is not None:
        spans.append(UsedMemory(_source(ready.send), ready.send.nbytes, False))
    if (target := ready.recv if ready.final is None else ready.final) is not None:
        spans.append(UsedMemory(address(target), target.nbytes, True))
    return spans


def _source(send: Array | DeviceArray) -> int:
    return (isinstance(send, DeviceArray) and send.copy_of) or address(send)


def _streams(mine: Sequence[Prepared | None], calls: Sequence[NotedCall]) -> tuple[int, ...]:
    """The streams on which buffers in GPU memory are used; the first is the one for the launch."""
    found: dict[int, None] = {}
    for ready, call in zip(mine, calls, strict=True):
        told = stream_address(call.stream)
        buffers = (ready.recv, ready.send) if ready is not None else ()
        for stream in [b.stream for b in buffers if isinstance(b, DeviceArray)] if told is None else [told]:
            found[stream] = None
    return tuple(found)


def _unowned(ready: Prepared, streams: tuple[int, ...]) -> Prepared:
    """A call on the same memory that does not keep it alive."""

    def view(array: Array | DeviceArray | None) -> Any:
        if isinstance(array, DeviceArray):
            return replace(array, owner=None, stream=streams[0])
        return None if array is None else _at(address(array), array.nbytes).view(array.dtype)

    send = view(ready.send)
    recv = send if ready.recv is ready.send else view(ready.recv)
    if ready.final is not None and isinstance(ready.recv, np.ndarray):  # it is ours
        recv = ready.recv
    return replace(ready, send=send, recv=recv, final=view(ready.final))


def _at(place: int, nbytes: int) -> Array:
    """Bytes of host memory at an address, which are not kept alive."""
    if not nbytes:
        return np.empty(0, np.uint8)
    memory: Any = MPI.memory.fromaddress(place, nbytes)
    return np.ndarray(nbytes, np.uint8, memory)


def _packed(maker: CallMaker, mine: Sequence[Prepared | None], streams: tuple[int, ...]) -> Prepared:
    """A call of buckets, with the copies between these and the users' buffers."""
    some = [ready for ready in mine if ready is not None]
    first, rank, on_device = some[0].call, maker.context.rank, some[0].on_device
    item, n = first.itemsize, first.n
    lengths = [ready.call.counts[0] * item for ready in some]
    aligned = ON_DEVICE_ALIGNED if on_device else item
    sent, received = (buckets.layout(lengths, n if b else 1, aligned) for b in buckets.BLOCKS[first.collective])
    call = replace(first, counts=(sent.stride // item,) * len(first.counts), in_place=False)  # of two buckets
    vector = sent.blocks == received.blocks == 1  # then one bucket is both
    recv_at = 0 if vector else -(-sent.nbytes // APART) * APART
    nbytes = recv_at + received.nbytes
    sends = [_source(ready.send) for ready in some if ready.send is not None]
    targets = [ready.recv if ready.final is None else ready.final for ready in some]
    receives = [address(target) for target in targets if target is not None]
    if on_device:
        return _on_device(maker, call, (sent, received), (0, recv_at), nbytes, (sends, receives), streams)
    memory = maker.binder.own.room(nbytes)
    dtype = dtype_of(call.dtype)
    out, into = memory[: sent.nbytes], memory[recv_at : recv_at + received.nbytes]
    before = tuple(Copy(ours, theirs) for ours, theirs in _copies(out, sent, sends))
    after = tuple(Copy(theirs, ours) for ours, theirs in _copies(into, received, receives))
    send = out.view(dtype) if call.sends(rank) else None
    recv = send if vector and send is not None else into.view(dtype)
    return Prepared(call, send, recv if call.receives(rank) else None, before=before, after=after)


def _copies(bucket: Array, place: BucketLayout, buffers: Sequence[int]) -> list[tuple[Array, Array]]:
    """Pieces of a bucket and of the users' buffers, at these addresses, in host memory."""
    if not buffers:
        return []
    return [(bucket[p.place : p.place + p.nbytes], _at(buffers[p.buffer] + p.offset, p.nbytes)) for p in place.pieces()]


def _on_device(
    maker: CallMaker,
    call: Call,
    layouts: tuple[BucketLayout, BucketLayout],
    places: tuple[int, int],
    nbytes: int,
    buffers: tuple[list[int], list[int]],
    streams: tuple[int, ...],
) -> Prepared:
    """As in host memory; the copies of all buffers are one kernel before and one behind."""
    assert maker.cuda is not None
    at, rank, item = maker.cuda.buckets.room(nbytes), maker.context.rank, call.itemsize
    arrays, segments = [], []
    for layout, place, theirs in zip(layouts, places, buffers, strict=True):
        pieces = tuple(zip(theirs, layout.places, layout.lengths, strict=True)) if theirs else ()
        pieces = tuple(piece for piece in pieces if piece[2])
        segments.append(Segments(at + place, layout.stride, layout.blocks, pieces))
        arrays.append(DeviceArray(at + place, layout.nbytes // item, item, streams[0], None))
    send, recv = arrays
    return Prepared(
        call,
        send if call.sends(rank) else None,
        recv if call.receives(rank) else None,
        segments=(segments[0], segments[1]),
    )


def _for_mpi(ready: Prepared, rank: int) -> tuple[Any, ...]:
    """The arguments of MPI's own collective on buckets in host memory."""
    call, send, recv = ready.call, ready.send, ready.recv
    if call.collective == "broadcast":
        return (send if rank == call.root else recv, call.root)
    if call.collective in ("reduce", "allreduce") and recv is not None:
        send = cast(Any, MPI.IN_PLACE)
    op = (mpi_op(call.op),) if call.op in _OF_MPI else (call.op,) if call.op else ()
    return (send, recv, *op, *((call.root,) if call.root >= 0 else ()))


_OF_MPI = frozenset(("sum", "prod", "min", "max", "land", "lor", "lxor", "band", "bor", "bxor"))
