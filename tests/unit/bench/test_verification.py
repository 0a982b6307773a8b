"""What the benchmark runs: sizes and names, inputs, and the check of every result."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi.bench.nccl_tests import OP_NAMES, TEST_NAMES, TYPE_NAMES, call_of_size, dtype_named
from blinkmpi.bench.verification import PERIOD, count_wrong, fill, pieces, poison
from blinkmpi.errors import BufferTypeError
from blinkmpi.program.call import Call
from blinkmpi.program.reduction import accumulator_of, check_op, dtype_of, fold
from tests.unit.bench.calls import call_of_count

# ---------------------------------------------------------------- sizes and names


def test_unknown_types_name_the_known_ones() -> None:
    with pytest.raises(BufferTypeError, match="half, float"):
        dtype_named("float128")
    assert dtype_named("float32") == dtype_named("float") == "float32"


def test_bus_factors() -> None:
    factor = {c: call_of_count(c, 4, 8, "float32").bus_factor for c in TEST_NAMES}
    assert factor == {
        "allreduce": 1.5,
        "allgather": 0.75,
        "reduce_scatter": 0.75,
        "gather": 0.75,
        "scatter": 0.75,
        "broadcast": 1.0,
        "reduce": 1.0,
    }


@given(st.sampled_from(sorted(TEST_NAMES)), st.integers(1, 9), st.integers(0, 1 << 20))
def test_a_row_is_never_larger_than_asked(collective: Any, n: int, nbytes: int) -> None:
    call = call_of_size(collective, n, nbytes, "float32", "sum", 0)
    assert nbytes - 16 * n < call.nbytes <= nbytes
    assert max(call.send_count, call.recv_count(0)) == call.total
    if collective in ("allgather", "reduce_scatter"):
        assert call.counts[0] * 4 % 16 == 0


# ---------------------------------------------------------------- the check


def honest(call: Call, rank: int, *, sources: list[int] | None = None, shift: int = 0) -> Any:
    """The result of ``rank`` by the package's own arithmetic, or with wrong contributions or a shift."""
    result = np.empty(call.recv_count(rank), dtype_of(call.dtype))
    poison(result)
    for start, length, folded, offset in pieces(call, rank):
        ranks = sources if sources is not None and len(folded) > 1 else list(folded)
        inputs = [np.empty(length, dtype_of(call.dtype)) for _ in ranks]
        for values, r in zip(inputs, ranks, strict=True):
            fill(values, r, call.dtype, offset + shift)
        total = np.empty(length, accumulator_of(call.dtype))
        with np.errstate(all="ignore"):
            fold(call.op or "sum", inputs, total, final=True, n=call.n)
        result[start : start + length] = total.astype(result.dtype)
    return result


CASES = [
    (collective, dtype, op)
    for collective in TEST_NAMES
    for dtype in TYPE_NAMES.values()
    for op in (OP_NAMES if collective in ("allreduce", "reduce", "reduce_scatter") else ("",))
    if not (op == "avg" and "int" in dtype)
]


@pytest.mark.parametrize(("collective", "dtype", "op"), CASES)
def test_right_results_pass_and_poison_does_not(collective: Any, dtype: str, op: str) -> None:
    call = call_of_count(
        collective, 5, 1003, dtype, op, 3 if collective in ("broadcast", "reduce", "gather", "scatter") else -1
    )
    if op:
        check_op(op, dtype)
    for rank in range(call.n):
        result = honest(call, rank)
        assert count_wrong(call, rank, result) == 0
        expected = sum(length for _, length, _, _ in pieces(call, rank))
        poison(result)
        assert count_wrong(call, rank, result) >= 0.95 * expected


@pytest.mark.parametrize("dtype", TYPE_NAMES.values())
@pytest.mark.parametrize("op", ["sum", "prod"])
def test_a_missing_or_repeated_contribution_shows(dtype: str, op: str) -> None:
    call = call_of_count("allreduce", 4, 2000, dtype, op)
    for sources in ([0, 1, 2], [0, 1, 2, 3, 3], [0, 1, 2, 2]):
        assert count_wrong(call, 0, honest(call, 0, sources=sources)) > 0.9 * call.counts[0]


def test_the_order_of_the_fold_does_not_matter() -> None:
    call = call_of_count("allreduce", 8, 5000, "float32", "sum")
    assert count_wrong(call, 0, honest(call, 0, sources=[7, 3, 5, 1, 0, 2, 4, 6])) == 0


@pytest.mark.parametrize("collective", TEST_NAMES)
def test_a_displaced_chunk_shows(collective: Any) -> None:
    root = 1 if collective in ("broadcast", "reduce", "gather", "scatter") else -1
    call = call_of_count(collective, 3, 4096, "float32", "sum" if "reduce" in collective else "", root)
    assert count_wrong(call, 1, honest(call, 1, shift=1024)) > 0.99 * call.recv_count(1)


def test_vectors_longer_than_the_period() -> None:
    call = call_of_count("reduce_scatter", 2, PERIOD + 10, "int32", "sum")
    result = honest(call, 1)
    assert count_wrong(call, 1, result) == 0
    result[PERIOD + 3] += 1
    assert count_wrong(call, 1, result) == 1


class Elsewhere:
    """NumPy under another name, as CuPy is: buffers are compared in pieces, references uploaded."""

    asarray = staticmethod(np.asarray)
    count_nonzero = staticmethod(np.count_nonzero)


@pytest.mark.parametrize(("collective", "dtype", "op"), CASES)
def test_results_outside_host_memory_are_checked_alike(collective: Any, dtype: str, op: str) -> None:
    root = 1 if collective in ("broadcast", "reduce", "gather", "scatter") else -1
    call = call_of_count(collective, 2, 2 * PERIOD + 7, dtype, op, root)
    result = honest(call, 1)
    assert count_wrong(call, 1, result, xp=Elsewhere) == 0
    for at in (0, PERIOD + 3, call.recv_count(1) - 1):
        poison(result[at : at + 1])
    assert count_wrong(call, 1, result, xp=Elsewhere) == 3


@given(st.integers(0, 3 * PERIOD), st.integers(0, 3 * PERIOD))
@settings(max_examples=20, deadline=None)
def test_inputs_repeat_with_their_period(size: int, start: int) -> None:
    out, more = np.empty(size, np.float32), np.empty(start + size, np.float32)
    fill(out, 2, "float32", start, xp=Elsewhere)
    fill(more, 2, "float32")
    assert np.array_equal(out, more[start:])
