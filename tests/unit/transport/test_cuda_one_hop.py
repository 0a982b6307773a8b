"""Who moves what to whom by the one-hop protocols, executed against the reference; and what fits the LL buffers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi.errors import ArgumentError
from blinkmpi.program.call import REDUCTIONS, Call
from blinkmpi.program.reduction import Array, accumulator_of, combine, dtype_of
from blinkmpi.transport.cuda.direct_segments import in_blocks, longest_segment, segment, spread
from blinkmpi.transport.cuda.memory_layout import (
    LINE,
    LL16_BUFFER_BYTES,
    MAX_RANKS,
    SETS,
    SHOTS,
    ll128_at,
    ll128_buffer_bytes,
    slots_at,
)
from blinkmpi.transport.cuda.packets import LL128, PACK_BYTES, PROTOCOLS, PacketStreams, fits, longest_slice, streams
from blinkmpi.trees.tree import COLLECTIVES, MAY_BE_CARRIED, Collective
from tests.unit.trees.packings import call_of, reference, sends_of

# ---------------------------------------------------------------- between registered buffers


REAL: list[Collective] = [c for c in COLLECTIVES if c not in ("barrier", "alltoall")]


def reduced(call: Call, operands: list[Array]) -> Array:
    """The reduction of some operands, from the left."""
    if call.collective not in REDUCTIONS:
        (only,) = operands
        return only
    wide = [x.view(dtype_of(call.dtype)).astype(accumulator_of(call.dtype)) for x in operands]
    for x in wide[1:]:
        combine(call.op, wide[0], x, wide[0])
    return wide[0].astype(dtype_of(call.dtype)).view(np.uint8)


def ranks_in(mask: int) -> list[int]:
    return [r for r in range(MAX_RANKS) if mask >> r & 1]


def bytes_of(array: Array | None) -> Array:
    assert array is not None, "a rank is named that has no such buffer"
    return array.view(np.uint8)


def receivers(call: Call, want: list[Array | None]) -> tuple[list[Array | None], list[Array | None]]:
    """Receive buffers, and how often each of their bytes was written."""
    recvs = [None if w is None else np.zeros_like(w) for w in want]
    return recvs, [None if r is None else np.zeros(r.nbytes, np.int64) for r in recvs]


some_calls = given(
    collective=st.sampled_from(REAL),
    n=st.integers(1, MAX_RANKS),
    count=st.sampled_from([1, 2, 7, 31, 64, 129, 1000, 4097]),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "complex128"]),
    root=st.integers(0, MAX_RANKS - 1),
)


@pytest.mark.slow
@some_calls
@settings(max_examples=300)
def test_direct_writes_every_byte_once_and_right(
    collective: Collective, n: int, count: int, dtype: str, root: int
) -> None:
    call = call_of(collective, n, count, dtype=dtype, root=root % n)
    sends = sends_of(call, np.random.default_rng(count))
    want = reference(call, sends)
    recvs, writes = receivers(call, want)
    for rank in range(n):
        sources, targets, src_at, dst_at, size = segment(call, rank)
        if not size:
            continue
        value = reduced(call, [bytes_of(sends[r])[src_at : src_at + size] for r in ranks_in(sources)])
        assert value.size == size
        for r in ranks_in(targets):
            bytes_of(recvs[r])[dst_at : dst_at + size] = value
            writes[r][dst_at : dst_at + size] += 1  # type: ignore[index]
    check(call, recvs, writes, want)


@pytest.mark.parametrize("dtype", ["float32", "int8", "complex128"])
@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("count", [1, 7, 129, 4096, 100_003])
def test_rs_ag_writes_every_byte_once_and_right(n: int, count: int, dtype: str) -> None:
    call = call_of("allreduce", n, count, dtype=dtype)
    sends = sends_of(call, np.random.default_rng(count))
    want = reference(call, sends)
    recvs, writes = receivers(call, want)
    blocks = in_blocks(call)
    assert (blocks.collective, blocks.op, sum(blocks.counts)) == ("reduce_scatter", call.op, count)
    assert all(blocks.block(r)[0] * dtype_of(blocks.dtype).itemsize % 128 == 0 for r in range(n) if blocks.counts[r])
    for part, recv, count_of, (start, size) in zip(
        reference(blocks, sends), recvs, writes, map(blocks.block, range(n)), strict=True
    ):
        assert recv is not None
        assert count_of is not None
        recv[start : start + size] = part
        count_of[start * recv.itemsize : (start + size) * recv.itemsize] += 1
    for rank in range(n):
        sources, targets, src_at, dst_at, size = spread(blocks, rank)
        assert (ranks_in(sources), rank in ranks_in(targets)) == ([rank], False)
        for r in ranks_in(targets):
            bytes_of(recvs[r])[dst_at : dst_at + size] = bytes_of(recvs[rank])[src_at : src_at + size]
            writes[r][dst_at : dst_at + size] += 1  # type: ignore[index]
    check(call, recvs, writes, want)


# ---------------------------------------------------------------- by packets


def slice_of(made: PacketStreams, rank: int) -> slice:
    """The bytes of the vector that a rank owns in two shots, as two_shot of packets.cu cuts it."""
    packs, owners = -(-made.nbytes // PACK_BYTES), ranks_in(made.owners)
    each = PACK_BYTES * -(-packs // len(owners))
    begin = min(owners.index(rank) * each, made.nbytes)
    return slice(begin, min(begin + each, made.nbytes))


def check(call: Call, recvs: list[Array | None], writes: list[Array | None], want: list[Array | None]) -> None:
    """Every byte was written once, and is right."""
    for result, expected, counts in zip(recvs, want, writes, strict=True):
        if result is not None and expected is not None and counts is not None:
            assert (counts == 1).all(), call
            assert result.tobytes() == expected.tobytes(), call


@given(
    collective=st.sampled_from([*REAL, *MAY_BE_CARRIED]),
    n=st.integers(1, MAX_RANKS),
    count=st.sampled_from([1, 2, 7, 31, 64, 129, 1000, 4097]),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "complex128"]),
    root=st.integers(0, MAX_RANKS - 1),
    uneven=st.booleans(),
)
@settings(max_examples=300)
def test_one_shot_reaches_who_waits_for_it(
    collective: Collective, n: int, count: int, dtype: str, root: int, uneven: bool
) -> None:
    call = call_of(collective, n, count, dtype=dtype, root=root % n, uneven=uneven)
    if collective in ("scan", "exscan") or len(set(call.counts)) > 1:
        assert not fits(call, "ll16_one_shot")
        with pytest.raises(ArgumentError, match="uneven"):
            streams(call, 0)
        return
    sends = sends_of(call, np.random.default_rng(count))
    want = reference(call, sends)
    recvs, writes = receivers(call, want)
    made = [streams(call, r) for r in range(n)]
    for rank, mine in enumerate(made):
        assert (mine.owners, mine.out_mask, mine.in_mask, mine.keep) == (0, 0, 0, True)
        got = []
        for r in ranks_in(mine.recv_mask):
            assert r == rank or made[r].send_mask >> rank & 1, f"rank {rank} waits for {r}, which sends nothing"
            at = rank * made[r].send_stride
            got.append(bytes_of(sends[r])[at : at + mine.nbytes])
            assert got[-1].size == mine.nbytes
        assert all(made[r].recv_mask >> rank & 1 for r in ranks_in(mine.send_mask)), "nobody reads these packets"
        parts = [(r * mine.recv_stride, x) for r, x in zip(ranks_in(mine.recv_mask), got, strict=True)]
        for at, value in parts if mine.recv_stride or not got else [(0, reduced(call, got))]:
            bytes_of(recvs[rank])[at : at + mine.nbytes] = value
            writes[rank][at : at + mine.nbytes] += 1  # type: ignore[index]
    check(call, recvs, writes, want)


@some_calls
@settings(max_examples=300)
def test_two_shots_reach_who_waits_for_them(collective: Collective, n: int, count: int, dtype: str, root: int) -> None:
    call = call_of(collective, n, count, dtype=dtype, root=root % n)
    if collective not in ("allreduce", "reduce", "broadcast"):
        with pytest.raises(ArgumentError, match="takes one shot"):
            streams(call, 0, two_shot=True)
    if not fits(call, "ll128_two_shot"):
        return
    sends = sends_of(call, np.random.default_rng(count))
    want = reference(call, sends)
    recvs, writes = receivers(call, want)
    made = [streams(call, r, two_shot=True) for r in range(n)]
    assert len({(m.owners, m.nbytes) for m in made}) == 1
    for rank, mine in enumerate(made):
        assert bool(mine.owners >> rank & 1) == bool(mine.recv_mask)
        assert not (mine.send_mask | mine.out_mask | mine.in_mask) >> rank & 1, "it sends nothing to itself"
        assert all(made[r].recv_mask >> rank & 1 for r in ranks_in(mine.send_mask)), "nobody reads the first shot"
        assert all(made[r].in_mask >> rank & 1 for r in ranks_in(mine.out_mask)), "nobody reads the second shot"
        assert all(made[r].out_mask >> rank & 1 for r in ranks_in(mine.in_mask)), "nobody sends the second shot"
        if not mine.recv_mask:
            continue
        part = slice_of(mine, rank)
        sources = ranks_in(mine.recv_mask)
        assert all(r == rank or made[r].send_mask >> rank & 1 for r in sources)
        value = reduced(call, [bytes_of(sends[r])[part] for r in sources])
        for r in [*([rank] if mine.keep else []), *ranks_in(mine.out_mask)]:
            bytes_of(recvs[r])[part] = value
            writes[r][part] += 1  # type: ignore[index]
    check(call, recvs, writes, want)


def test_what_fits_the_ll16_buffers() -> None:
    data = LL16_BUFFER_BYTES // 2  # the other half is flags
    one = Call("allreduce", 8, (data,), "int8", "sum")
    assert fits(one, "ll16_one_shot")
    assert not fits(Call("allreduce", 8, (data + 1,), "int8", "sum"), "ll16_one_shot")
    assert fits(Call("allreduce", 8, (8 * data,), "int8", "sum"), "ll16_two_shot")
    assert not fits(Call("allreduce", 8, (8 * data + 1,), "int8", "sum"), "ll16_two_shot")
    assert fits(Call("broadcast", 8, (7 * data,), "int8", "", 0), "ll16_two_shot"), "the root owns nothing"
    assert not fits(Call("broadcast", 8, (7 * data + 1,), "int8", "", 0), "ll16_two_shot")
    assert not fits(Call("broadcast", 2, (16,), "int8", "", 0), "ll16_two_shot"), "who is alone needs one shot"
    assert not fits(Call("allgather", 8, (16,), "int8"), "ll16_two_shot")


@pytest.mark.parametrize("n", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("protocol", ["ll128_one_shot", "ll128_two_shot"])
def test_lines_fill_the_ll128_buffers_and_no_more(n: int, protocol: str) -> None:
    assert ll128_at(n) + SETS * SHOTS * n * ll128_buffer_bytes(n) <= slots_at(n)
    most = ll128_buffer_bytes(n) // LINE * LL128.data * PACK_BYTES * (n if protocol == "ll128_two_shot" else 1)
    for nbytes, room in ((most, True), (most + 1, False)):
        call = Call("allreduce", n, (nbytes,), "int8", "sum")
        assert fits(call, protocol) is room
        taken = PACK_BYTES * LL128.positions(longest_slice(call, two_shot=PROTOCOLS[protocol].two_shot))
        assert (taken <= ll128_buffer_bytes(n)) is room
        assert taken % LINE == 0


@pytest.mark.parametrize("collective", REAL)
@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_longest_segment_is_known_without_asking_for_all(collective: Collective, n: int) -> None:
    """The grid follows from it, which all ranks must have the same."""
    for count in (1, 31, 127, 1000, 1025, 99_999):
        call = call_of(collective, n, count, dtype="bfloat16", root=n - 1)
        assert longest_segment(call) == max(segment(call, rank).nbytes for rank in range(n))
    blocks = in_blocks(Call("allreduce", n, (1000,), "float32", "sum"))
    assert max(blocks.counts) * 4 == max(spread(blocks, rank).nbytes for rank in range(n))
