"""The segments that GPUs move between registered buffers, executed against the reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi.program.call import REDUCTIONS, Call
from blinkmpi.program.reduction import Array, accumulator_of, combine, dtype_of
from blinkmpi.transport.cuda.direct_segments import in_blocks, segment, spread
from blinkmpi.transport.cuda.memory_layout import MAX_RANKS
from blinkmpi.trees.tree import COLLECTIVES, Collective
from tests.unit.trees.packings import call_of, reference, sends_of

REAL: list[Collective] = [c for c in COLLECTIVES if c != "barrier"]


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
    for got, expected, counts in zip(recvs, want, writes, strict=True):
        if got is not None and expected is not None and counts is not None:
            assert (counts == 1).all()
            assert got.tobytes() == expected.tobytes()


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
    assert all(blocks.block(r)[0] * blocks_item(blocks) % 128 == 0 for r in range(n) if blocks.counts[r])
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
    for got, expected, counts in zip(recvs, want, writes, strict=True):
        assert (counts == 1).all()  # type: ignore[union-attr]
        assert got.tobytes() == expected.tobytes()  # type: ignore[union-attr]


def blocks_item(call: Call) -> int:
    return dtype_of(call.dtype).itemsize
