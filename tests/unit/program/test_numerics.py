"""What a reduction means for every operation and type, and the conformance suite on the simulator."""

from functools import cache

import ml_dtypes
import numpy as np
import pytest

from blinkmpi.errors import BufferTypeError
from blinkmpi.planning.plan import Plan
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import program_for
from blinkmpi.program.call import Call
from blinkmpi.program.interpreter import run
from blinkmpi.program.reduction import (
    DTYPES,
    FLOATS,
    INTEGERS,
    accumulator_of,
    check_op,
    combine,
    dtype_of,
    finish,
    fold,
)
from blinkmpi.topology import machine, modify
from tests.conformance import COLLECTIVES, PLANNED, VARIANTS, Case, cases, expected, inputs, mistakes


def test_every_type_has_a_dtype_and_an_accumulator_at_least_as_wide() -> None:
    for name in DTYPES:
        assert dtype_of(name).name == name
        assert accumulator_of(name).itemsize >= dtype_of(name).itemsize


def test_half_types_accumulate_in_float32() -> None:
    assert accumulator_of("float16") == accumulator_of("bfloat16") == np.float32


@pytest.mark.parametrize(
    ("op", "dtype"),
    [("land", "float32"), ("band", "bool"), ("sum", "bool"), ("min", "complex64"), ("max", "bool"), ("avg", "bool")],
)
def test_undefined_pairs_are_type_errors_that_name_the_remedy(op: str, dtype: str) -> None:
    with pytest.raises(BufferTypeError, match=rf"'{op}' is not defined for {dtype}.*convert"):
        check_op(op, dtype)


def test_unknown_names_are_type_errors() -> None:
    with pytest.raises(TypeError, match=r"'median' is unknown; use one of sum"):
        check_op("median", "float32")
    with pytest.raises(TypeError, match=r"'float8' is not supported; use one of bool"):
        dtype_of("float8")


def test_integers_wrap() -> None:
    out = np.empty(1, np.int8)
    fold("sum", [np.array([100], np.int8), np.array([100], np.int8)], out, final=True, n=2)
    assert out[0] == -56


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_min_and_max_propagate_nan(op: str, dtype: str) -> None:
    a, b = np.array([1, np.nan, 3], dtype_of(dtype)), np.array([np.nan, 2, 2], dtype_of(dtype))
    out = np.empty(3, accumulator_of(dtype))
    combine(op, a, b, out)
    assert np.isnan(out).tolist() == [True, True, False]
    assert out[2] == (2 if op == "min" else 3)


def test_logical_operations_of_integers_give_zero_or_one() -> None:
    a, b = np.array([0, 2, 4], np.int32), np.array([0, 0, 8], np.int32)
    out = np.empty(3, np.int32)
    for op, want in (("land", [0, 0, 1]), ("lor", [0, 1, 1]), ("lxor", [0, 1, 0])):
        combine(op, a, b, out)
        assert out.tolist() == want


def test_a_half_sum_is_rounded_once_at_the_end() -> None:
    parts = [np.array([v], np.float16) for v in (2048, 1, 1)]  # 2048 + 1 is 2048 in float16
    out = np.empty(1, np.float32)
    fold("sum", parts, out, final=True, n=3)
    assert out[0] == 2050


def test_operands_fold_from_the_left() -> None:
    parts = [np.array([v], np.float32) for v in (1e8, -1e8, 1)]
    out = np.empty(1, np.float32)
    fold("sum", parts, out, final=True, n=3)
    assert out[0] == 1
    fold("sum", [parts[2], parts[0], parts[1]], out, final=True, n=3)
    assert out[0] == 0


@pytest.mark.parametrize("where", [0, 1])
def test_the_accumulator_may_be_the_memory_of_one_of_the_first_two(where: int) -> None:
    parts = [np.array([v], np.float64) for v in (5, 7, 11)]
    fold("sum", parts, parts[where], final=False, n=3)
    assert parts[where][0] == 23


def test_avg_divides_a_complete_fold_only() -> None:
    parts = [np.array([2 + 4j], np.complex64), np.array([4 + 0j], np.complex64)]
    out = np.empty(1, np.complex64)
    fold("avg", parts, out, final=False, n=2)
    assert out[0] == 6 + 4j
    fold("avg", parts, out, final=True, n=2)
    assert out[0] == 3 + 2j


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 200])
def test_an_average_of_integers_is_rounded_towards_zero(dtype: str, n: int) -> None:
    """As C divides, and so NCCL: the sum as it wraps, also by more ranks than the type has numbers for."""
    info = np.iinfo(dtype)
    sums = [v for v in (info.min, info.min + 1, -7, -3, -1, 0, 1, 3, 7, info.max - 1, info.max) if v >= info.min]
    value = np.array(sums, dtype)
    finish("avg", n, value)
    assert value.tolist() == [abs(v) // n * (1 if v >= 0 else -1) for v in sums]


def test_an_average_of_integers_is_of_the_wrapped_sum() -> None:
    out = np.empty(1, np.int8)
    fold("avg", [np.array([v], np.int8) for v in (100, 100)], out, final=True, n=2)
    assert out.tolist() == [-28]


def test_one_operand_is_converted_to_the_accumulator_type() -> None:
    out = np.empty(2, np.float32)
    fold("sum", [np.array([1.5, -2], ml_dtypes.bfloat16)], out, final=False, n=4)
    assert out.tolist() == [1.5, -2.0]


# ---------------------------------------------------------------- the conformance suite on the simulator


MACHINES = ("cpu:1", "cpu:3", "cpu:4", "dgx-1v[1,4,5,6]", "dgx-1v", "dgx-a100", "pcie-8[0,2,5]")


@cache
def plan_of(name: str) -> Plan:
    spec, _, gpus = name.rstrip("]").partition("[")
    return make_plan(modify(machine(spec), gpus=gpus or None))


def call_of(case: Case) -> Call:
    kind, counts = case.planned, (case.count,)
    if kind == "reduce_scatter" or case.collective in VARIANTS:
        counts = case.counts()
    if case.collective == "alltoallv":
        counts = tuple(count for rank in range(case.n) for count in case.row(rank))
    root = case.root if kind in ("broadcast", "reduce", "gather", "scatter") else -1
    return Call(kind, case.n, counts, case.dtype, case.op, root)


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", MACHINES)
def test_every_scheme(name: str, collective: str) -> None:
    plan = plan_of(name)
    kind = PLANNED.get(collective, collective)
    for case in cases(collective, plan.n, full=name == "dgx-1v[1,4,5,6]"):
        call = call_of(case)
        if call.total == 0 or case.in_place:  # a program does not know whose memory it works on
            continue
        sends = inputs(case)
        for scheme in plan.schemes(kind, call.root):
            rule = next(r for r in plan.rules if r.collective == kind)
            program = program_for(plan, call, type(rule)(kind, 0, scheme, rule.chunk_bytes, rule.depth))
            for rank, got in enumerate(run(program, list(sends))):
                want = expected(case, rank)
                if want is None or want.size == 0:
                    continue
                assert got is not None, f"{case}: {scheme}: rank {rank} received nothing"
                wrong = mistakes(case, np.asarray(got), want, rank)
                assert wrong == 0, f"{case}: {scheme}: rank {rank}: {wrong} of {want.size} elements wrong"


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_wrong_element_is_found(collective: str) -> None:
    for case in cases(collective, 3):
        for rank in range(case.n):
            want = expected(case, rank)
            if want is None or not want.size:
                continue
            got = want.astype(dtype_of(case.dtype))
            assert mistakes(case, got, want, rank) == 0, case
            last = want[-1]
            if want.dtype.kind in "fcV":
                got[-1] = 0 if np.isnan(last) else last + (2 if last.real < 0 else -2)
            else:
                got[-1] = ~last
            assert mistakes(case, got, want, rank) == 1, case
            assert mistakes(case, got[:-1], want, rank) == want.size, case
