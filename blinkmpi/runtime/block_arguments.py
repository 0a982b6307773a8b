"""Arguments of collectives that move a block for each rank, of a length and at a place of its own; Alltoall; Custom.

As :mod:`.arguments`, whose meaning of a result is the same. Programs know packed vectors alone: blocks that do not lie
one behind another are copied to memory of our own before the call, and from there after it.

Only in an Allgatherv does every rank know all lengths. On one node no rank needs to: a v-variant is also a call of
blocks (:class:`.arguments.InBlocks`), for which each rank knows its own; in GPU memory neither an Allgatherv nor an
Alltoallv in place. Elsewhere each tells what it knows before all ranks, and compares what it hears with what it
expects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from msgspec.structs import replace

from ..errors import ArgumentError, BufferTypeError
from ..lang.algorithms import Algorithm
from ..lang.flow import custom_call
from ..program.call import Call
from ..program.memory import Buffer, DeviceArray, address, overlap
from ..program.reduction import DTYPES, Array, check_op
from ..trees.tree import Collective
from ..util.numbers import rank_of
from ..util.text import plural
from .arguments import (
    Copy,
    CountsOnGpu,
    InBlocks,
    Lengths,
    NeedsNumbers,
    Prepared,
    check_apart,
    check_equal,
    leaf,
    memory_like,
)
from .buffers import Blocks, in_place, op_name, parse, parse_blocks
from .cuda.buffers import device_buffer, lies_on_device

if TYPE_CHECKING:
    from ..program.blocks import Place

Memory = Array | DeviceArray


def allgatherv(rank: int, n: int, sendbuf: Any, recvbuf: Any) -> Prepared:
    """``Allgatherv``: every rank's block to everybody."""
    send, recv = _collected(rank, n, sendbuf, recvbuf)
    call = Call("allgather", n, _short(recv.counts), send.dtype)
    blocks = None
    if _on_host(recv.buffer):
        own, at = recv.block(rank).array, _places(recv)
        stays = address(send.array) == address(own)
        array, place = (recv.buffer.array, at[rank]) if stays else (send.array, (0, at[rank][1]))
        expected = recv.counts

        def compare(rows: tuple[tuple[int, ...], ...]) -> None:
            for source, ((got,), want) in enumerate(zip(rows, expected, strict=True)):
                if got != want:
                    raise ArgumentError(
                        f"Allgatherv: rank {source} sends {got} elements, but recvcounts[{source}] of rank {rank} is "
                        f"{want}; make them equal"
                    )

        lengths, text, places = (
            Lengths((send.count,), compare),
            f"allgather({send.dtype}) in blocks",
            ((place,) * n, at),
        )
        blocks = _blocks(text, "allgather", -1, (array, recv.buffer.array), places, lengths, shared=True, stays=stays)
    return replace(_received(send.array, recv, call), blocks=blocks)


def gatherv(rank: int, n: int, sendbuf: Any, recvbuf: Any, root: int) -> NeedsNumbers:
    """``Gatherv``: every rank's block to the root."""
    root = rank_of(root, n)
    if rank != root:
        send = leaf(rank, root, sendbuf)
        told = _told("gather", n, root, (send.count,), send, Prepared(_some(send), send.array, None))
        return _rooted(told, "gather", root, send.dtype, send, None, sends=_to(n, root, send))
    send, recv = _collected(rank, n, sendbuf, recvbuf)
    buffers = Prepared(_some(send), send.array, recv.buffer.array)
    told = _told("gather", n, root, (send.count,), send, buffers, recv.counts, partial(_received, send.array, recv))
    stays = address(send.array) == address(recv.block(rank).array)
    return _rooted(told, "gather", root, send.dtype, send, recv.buffer, _to(n, root, send), _places(recv), stays)


def scatterv(rank: int, n: int, sendbuf: Any, recvbuf: Any, root: int) -> NeedsNumbers:
    """``Scatterv``: the root's blocks, one to each rank."""
    root = rank_of(root, n)
    if rank != root:
        recv = parse(recvbuf, name="recvbuf", writable=True)
        told = _told("scatter", n, root, (recv.count,), recv, Prepared(_some(recv), None, recv.array))
        return _rooted(told, "scatter", root, recv.dtype, None, recv, receives=_to(n, root, recv))
    send = parse_blocks(sendbuf, name="sendbuf", writable=False, n=n)
    block = send.block(rank)
    recv = block if in_place(recvbuf) else parse(recvbuf, name="recvbuf", writable=True)
    check_equal(recv, block)
    _apart(send, [recv.array], block.array)

    def made(call: Call) -> Prepared:
        packed, copies = _packed(send)
        before = tuple(Copy(ours, theirs) for ours, theirs in copies)
        return Prepared(call, packed, recv.array, before=before, plain=True)

    buffers = Prepared(_some(recv), send.buffer.array, recv.array)
    told = _told("scatter", n, root, (recv.count,), recv, buffers, send.counts, made)
    stays = address(recv.array) == address(block.array)
    return _rooted(told, "scatter", root, recv.dtype, send.buffer, recv, _places(send), _to(n, root, recv), stays)


def alltoall(_: int, n: int, sendbuf: Any, recvbuf: Any) -> Prepared:
    """``Alltoall``: a block of everybody to everybody, all of the same length."""
    recv = parse(recvbuf, name="recvbuf", writable=True, blocks=n)
    if recv.count % n:
        raise ArgumentError(f"recvbuf has {recv.count} elements, no multiple of {n} ranks; correct its length")
    call = Call("alltoall", n, (recv.count // n,), recv.dtype)
    if in_place(sendbuf):
        return _exchanged(call, recv.array)
    send = parse(sendbuf, name="sendbuf", writable=False, blocks=n)
    check_equal(send, recv)
    check_apart(send.array, recv.array, None)
    return Prepared(call, send.array, recv.array)


def alltoallv(rank: int, n: int, sendbuf: Any, recvbuf: Any) -> Prepared | NeedsNumbers:
    """``Alltoallv``: a block of everybody to everybody, each of its own length."""
    if _counts_on_gpu(sendbuf) or _counts_on_gpu(recvbuf):
        return _counted(n, sendbuf, recvbuf)
    recv = parse_blocks(recvbuf, name="recvbuf", writable=True, n=n)
    recv.check_disjoint()
    within = in_place(sendbuf)
    if within:
        send = recv
    else:
        send = parse_blocks(sendbuf, name="sendbuf", writable=False, n=n)
        check_equal(_none(send.buffer), _none(recv.buffer))
        _apart(recv, [send.buffer.array] if send.packed else [send.block(r).array for r in range(n)], None)
    if send.counts[rank] != recv.counts[rank]:
        raise ArgumentError(
            f"rank {rank}: sendbuf has {send.counts[rank]} elements for rank {rank} itself, recvbuf room for "
            f"{recv.counts[rank]}; make the counts equal"
        )
    expected = recv.counts

    def compare(rows: tuple[tuple[int, ...], ...]) -> None:
        for source, row in enumerate(rows):
            if row[rank] != expected[source]:
                raise ArgumentError(
                    f"Alltoallv: rank {source} sends {row[rank]} elements to rank {rank}, which expects "
                    f"{expected[source]} (its recvcounts are {list(expected)}); make the counts equal"
                )

    def with_numbers(rows: tuple[tuple[int, ...], ...]) -> Prepared:
        compare(rows)
        call = Call("alltoall", n, _short([count for row in rows for count in row]), recv.buffer.dtype)
        packed, copies = _packed(send)
        before = tuple(Copy(ours, theirs) for ours, theirs in copies)
        if within:
            after = tuple(Copy(theirs, ours) for ours, theirs in copies)
            return replace(_exchanged(call, packed, before), after=after, plain=True)
        return _received(packed, recv, call, before)

    blocks = None
    if _on_host(recv.buffer) or not within:
        text = f"alltoallv({recv.buffer.dtype}{', in place' if within else ''})"
        arrays, places = (send.buffer.array, recv.buffer.array), (_places(send), _places(recv))
        lengths = Lengths(send.counts, compare)
        blocks = _blocks(text, "alltoall", -1, arrays, places, lengths, in_place=within, stays=within)
    buffers = Prepared(_some(recv.buffer), send.buffer.array, recv.buffer.array)
    return NeedsNumbers(send.counts, with_numbers, buffers, blocks)


def _counts_on_gpu(spec: Any) -> bool:
    """Whether a specification of blocks has lengths that lie in GPU memory."""
    if not isinstance(spec, list | tuple) or len(spec) < 2:
        return False
    parts = spec[1] if isinstance(spec[1], tuple) else spec[1:2]
    return any(not isinstance(part, int | list | np.ndarray) and lies_on_device(part) for part in parts)


def _counted(n: int, sendbuf: Any, recvbuf: Any) -> Prepared:
    """An Alltoallv of lengths in GPU memory."""
    forms = "[array, counts] and [array, told] or [array, (told, places)], all in GPU memory"
    if not all(isinstance(spec, list | tuple) and len(spec) == 2 for spec in (sendbuf, recvbuf)):
        raise ArgumentError(f"Alltoallv with counts in GPU memory takes {forms}")
    (sent, counts), (received, told) = sendbuf, recvbuf
    told, *places = told if isinstance(told, tuple) else (told,)
    if len(places) > 1:
        raise ArgumentError(f"recvbuf: {1 + len(places)} arrays of lengths and places; Alltoallv takes {forms}")

    def on_gpu(array: Any, name: str, writable: bool) -> Buffer:
        found = device_buffer(array, name, writable)
        if found is None:
            raise BufferTypeError(f"{name} is not in GPU memory, and counts are; Alltoallv takes {forms}")
        return found

    def numbers(array: Any, name: str, writable: bool = False) -> DeviceArray:
        found = on_gpu(array, name, writable)
        if (found.count, found.dtype) != (n, "int64"):
            raise ArgumentError(f"{name} has {found.count} x {found.dtype}; expected {n} x int64, one for each rank")
        return cast(DeviceArray, found.array)

    send, recv = on_gpu(sent, "sendbuf[0]", writable=False), on_gpu(received, "recvbuf[0]", writable=True)
    check_equal(_none(send), _none(recv))
    read, written = numbers(counts, "sendbuf[1]"), numbers(told, "recvbuf[1]", writable=True)
    where = numbers(places[0], "recvbuf[1][1]") if places else None
    for one in (recv.array, written):
        for other in (send.array, read, *((where,) if where is not None else ())):
            check_apart(one, other, None)
    check_apart(written, recv.array, None)
    nothing = ((0, 0),) * n
    moves = _blocks(f"alltoallv({send.dtype}, counts in GPU memory)", "alltoall", -1, (send.array, recv.array),
                    (nothing, nothing), Lengths((), lambda rows: None))  # fmt: skip
    blocks = replace(moves, counts=CountsOnGpu(read, written, where))
    return Prepared(_some(send), send.array, recv.array, blocks=blocks)


def _exchanged(call: Call, blocks: Memory, before: tuple[Copy, ...] = ()) -> Prepared:
    """An alltoall in place of blocks one behind another; ``before`` are the copies that made them so."""
    return Prepared(replace(call, in_place=True), blocks, blocks, before=before)


def custom(rank: int, n: int, algorithm: Any, sendbuf: Any, recvbuf: Any, op: Any) -> Prepared | NeedsNumbers:
    """``Custom``: what an algorithm says; every rank's chunks have the same length."""
    if not isinstance(algorithm, Algorithm) or algorithm.collective != "custom":
        raise ArgumentError(f"Custom({algorithm!r}): expected an algorithm of a collective that lang.custom() made; "
                            "call the method of MPI's name for others")  # fmt: skip
    if algorithm.n != n:
        raise ArgumentError(f"Custom: {algorithm.name} is for {algorithm.n} ranks, the communicator has {n}; make it "
                            f"for these, as in algorithm({n})")  # fmt: skip
    goal = algorithm.flow.goal
    name = op_name(op) if goal.reduces else ""
    if name == "avg":
        raise ArgumentError("op='avg' of a custom collective is not defined, as results fold what they name; pass sum")
    gives, gets = goal.given[rank], len(goal.wanted[rank])
    send = _part(sendbuf, "sendbuf", gives, rank, writable=False)
    recv = _part(recvbuf, "recvbuf", gets, rank, writable=True)
    there = [(b, k) for b, k in ((send, gives), (recv, gets)) if b is not None]
    for buffer, _ in there:
        if isinstance(buffer.array, DeviceArray):
            raise BufferTypeError(
                "Custom() of GPU memory: custom collectives run on host memory alone; pass NumPy copies"
            )
    if len({(b.count // k, b.dtype) for b, k in there}) > 1:
        text = " and ".join(f"{plural(k, 'chunk')} of {b.count // k} x {b.dtype}" for b, k in there)
        raise ArgumentError(f"Custom: rank {rank}'s buffers have {text}; make the chunks equal")
    if send is not None and recv is not None:
        check_apart(send.array, recv.array, None)
    arrays = send.array if send is not None else None, recv.array if recv is not None else None
    if all(g or len(w) for g, w in zip(goal.given, goal.wanted, strict=True)):
        buffer, k = there[0]
        if name:
            check_op(name, buffer.dtype)
        return Prepared(custom_call(goal, algorithm.identity, buffer.count // k, buffer.dtype, name), *arrays)
    own = (there[0][0].count // there[0][1], DTYPES.index(there[0][0].dtype)) if there else (-1, -1)

    def with_numbers(rows: tuple[tuple[int, ...], ...]) -> Prepared:
        known = {row for row in rows if row[0] >= 0}
        if len(known) > 1:
            text = ", ".join(f"{count} x {DTYPES[kind]}" for count, kind in sorted(known))
            raise ArgumentError(f"Custom: the ranks' chunks have {text}; make them equal")
        ((count, kind),) = known or {(0, 0)}
        if name:
            check_op(name, DTYPES[kind])
        return Prepared(custom_call(goal, algorithm.identity, count, DTYPES[kind], name), *arrays)

    return NeedsNumbers(own, with_numbers, Prepared(Call("barrier", n, (0,), ""), *arrays))


def _part(spec: Any, name: str, chunks: int, rank: int, *, writable: bool) -> Buffer | None:
    """A buffer of so many equal chunks; None for none."""
    if in_place(spec) and chunks == 0:
        return None
    if in_place(spec):
        raise BufferTypeError(f"Custom: rank {rank}'s {name} holds {plural(chunks, 'chunk')}; pass an array, as a "
                              "custom collective is never in place")  # fmt: skip
    buffer = parse(spec, name=name, writable=writable)
    if chunks == 0 and buffer.count:
        raise ArgumentError(f"Custom: rank {rank} has no part in this as {name}; pass None")
    if chunks and buffer.count % chunks:
        raise ArgumentError(f"Custom: rank {rank}'s {name} has {buffer.count} elements, no multiple of its {chunks} "
                            "chunks; correct its length")  # fmt: skip
    return buffer if chunks else None


def _told(
    kind: Collective, n: int, root: int, numbers: tuple[int, ...], block: Buffer, buffers: Prepared,
    expected: tuple[int, ...] = (), made: Callable[[Call], Prepared] | None = None,
) -> tuple[NeedsNumbers, Lengths]:  # fmt: skip
    """A Gatherv or Scatterv when every rank has told the length of its block; the root compares with ``expected``.

    Args:
        made: makes the root's call, whose blocks may have to be copied.
    """

    def compare(rows: tuple[tuple[int, ...], ...]) -> None:
        for rank, ((got,), want) in enumerate(zip(rows, expected or [row[0] for row in rows], strict=True)):
            if got != want:
                does, name = ("sends", "recvcounts") if kind == "gather" else ("receives", "sendcounts")
                raise ArgumentError(
                    f"{kind.capitalize()}v: rank {rank} {does} {got} elements, but {name}[{rank}] of the root {root} "
                    f"is {want}; make them equal"
                )

    def with_numbers(rows: tuple[tuple[int, ...], ...]) -> Prepared:
        compare(rows)
        call = Call(kind, n, _short([row[0] for row in rows]), block.dtype, "", root)
        return made(call) if made else replace(buffers, call=call, plain=True)

    return NeedsNumbers(numbers, with_numbers, buffers), Lengths(numbers, compare)


def _rooted(
    told: tuple[NeedsNumbers, Lengths], kind: Collective, root: int, dtype: str,
    send: Buffer | None, recv: Buffer | None,
    sends: tuple[Place, ...] = (), receives: tuple[Place, ...] = (), stays: bool = False,
) -> NeedsNumbers:  # fmt: skip
    """A Gatherv or Scatterv with the blocks that this rank moves."""
    nothing = ((0, 0),) * len(sends or receives)
    arrays = (None if send is None else send.array), (None if recv is None else recv.array)
    text, places = f"{kind}v({dtype}, root {root})", (sends or nothing, receives or nothing)
    return replace(told[0], blocks=_blocks(text, kind, root, arrays, places, told[1], stays=stays))


def _blocks(
    text: str, of: Collective, root: int, arrays: tuple[Memory | None, Memory | None],
    places: tuple[tuple[Place, ...], tuple[Place, ...]], lengths: Lengths, *,
    shared: bool = False, in_place: bool = False, stays: bool = False,
) -> InBlocks:  # fmt: skip
    """A call of blocks between two arrays: where they lie in each, in bytes."""
    from ..program.blocks import BlockMoves

    return InBlocks(BlockMoves(text, of, root, *places, shared, in_place, stays), *arrays, lengths)


def _on_host(buffer: Buffer) -> bool:
    return not isinstance(buffer.array, DeviceArray)


def _places(blocks: Blocks) -> tuple[Place, ...]:
    """Where the blocks lie in their buffer, in bytes."""
    item = blocks.buffer.array.itemsize
    return tuple((start * item, count * item) for start, count in zip(blocks.starts, blocks.counts, strict=True))


def _to(n: int, rank: int, block: Buffer) -> tuple[Place, ...]:
    """The one block that goes to a rank or comes from it."""
    return tuple((0, block.array.nbytes if r == rank else 0) for r in range(n))


def _some(buffer: Buffer) -> Call:
    """Stands for a call that is not known yet."""
    return Call("barrier", 1, (0,), buffer.dtype)


def _none(buffer: Buffer) -> Buffer:
    return Buffer(buffer.array[:0], buffer.dtype)


def _short(counts: Sequence[int]) -> tuple[int, ...]:
    """The lengths of a call's blocks: one number if they are all the same."""
    return tuple(counts[:1]) if len(set(counts)) == 1 else tuple(counts)


def _collected(rank: int, n: int, sendbuf: Any, recvbuf: Any) -> tuple[Buffer, Blocks]:
    """This rank's block and the buffer of all blocks."""
    recv = parse_blocks(recvbuf, name="recvbuf", writable=True, n=n)
    recv.check_disjoint()
    block = recv.block(rank)
    send = block if in_place(sendbuf) else parse(sendbuf, name="sendbuf", writable=False)
    check_equal(send, block)
    _apart(recv, [send.array], block.array)
    return send, recv


def _apart(blocks: Blocks, others: list[Memory], same: Memory | None) -> None:
    """Raise ArgumentError if one of ``blocks`` overlaps what the call uses besides; gaps between them may be used."""
    whole = blocks.buffer.array
    for other in (some for some in others if some.size):
        check_apart(other[:0], whole[:0], None)  # raises if one is on a GPU and the other is not
        if overlap(other, whole):
            for start, stop, _ in blocks.filled:
                check_apart(other, whole[start:stop], same)


def _packed(blocks: Blocks) -> tuple[Memory, list[tuple[Memory, Memory]]]:
    """The blocks one behind another: where they lie, or in memory of ours and the pieces of both (ours, the user's)."""
    array, total = blocks.buffer.array, sum(blocks.counts)
    if blocks.packed:
        return array[blocks.first : blocks.first + total], []
    own, at = memory_like(array, total), 0
    pieces: list[tuple[Memory, Memory]] = []
    for start, stop, _ in sorted(blocks.filled, key=lambda block: block[2]):
        pieces.append((own[at : at + stop - start], array[start:stop]))
        at += stop - start
    return own, pieces


def _received(send: Memory, recv: Blocks, call: Call, before: tuple[Copy, ...] = ()) -> Prepared:
    """A call that receives blocks."""
    packed, copies = _packed(recv)
    after = tuple(Copy(theirs, ours) for ours, theirs in copies)
    return Prepared(call, send, packed, before=before, after=after, plain=True)
