"""Algorithms on GPUs, without one: the tables that the kernels get, executed, and the kernels compiled."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from blinkmpi.errors import DeviceError, PlanError
from blinkmpi.lang import Algorithm
from blinkmpi.program import interpreter
from blinkmpi.program.call import REDUCTIONS, Call
from blinkmpi.program.check import check_sorted
from blinkmpi.transport.cuda import codegen
from blinkmpi.transport.cuda.codegen import check_rows, kinds_of, row_words, rows_of, stages_source
from blinkmpi.transport.cuda.memory_layout import SYMMETRIC_BYTES, groups, laid_out, place, stages_of
from tests.unit.lang.algorithms import COLLECTIVES, by_chance, of_ranks
from tests.unit.transport.nvrtc import all_compiled
from tests.unit.transport.table_emulator import (
    ROW,
    Deadlock,
    Made,
    Row,
    World,
    check_layout,
    compare,
    execute,
    made,
)
from tests.unit.transport.test_cuda_compile import STAGES, check
from tests.unit.trees.packings import call_of, reference, sends_of

TYPES = (("int32", "sum"), ("float32", "sum"), ("bfloat16", "sum"), ("float16", "avg"), ("float64", "max"),
         ("complex64", "prod"), ("uint8", "bxor"), ("bool", "land"))  # fmt: skip
MOVED = ("float32", "int8", "complex128")
CTAS = (1, 2, 3, 7, 40, 132)  # of a rank: with the fewest, one CTA runs all its stages


def drawn(algorithms: list[Algorithm], rng: np.random.Generator) -> Iterator[tuple[Algorithm, Call]]:
    """Algorithms in any order, with calls of any types and odd counts."""
    for i in rng.permutation(len(algorithms)).tolist():
        it = algorithms[i]
        dtype, op = TYPES[int(rng.integers(len(TYPES)))]
        if it.collective not in REDUCTIONS:
            dtype, op = MOVED[int(rng.integers(len(MOVED)))], ""
        if "scan" in it.collective and op == "avg":
            op = "sum"
        count, uneven = int(rng.choice([1, 5, 700, 1003])), bool(rng.random() < 0.5)
        yield it, call_of(it.collective, it.n, count, dtype=dtype, op=op, root=max(it.root, 0), uneven=uneven)


def run(algorithms: list[Algorithm], n: int, rng: np.random.Generator, *, in_place: bool = False) -> list[Made]:
    """Execute calls by the tables of the algorithms one after another, and compare what they give."""
    world, calls, wants, exact = World(n), [], [], []
    for it, call in drawn(algorithms, rng):
        if not call.total:
            continue
        sends = sends_of(call, rng)
        program = it.program(call, chunk_bytes=int(rng.choice([256, 1024])), depth=int(rng.integers(1, 4)))
        calls.append(made(world, program, sends, ctas=int(rng.choice(CTAS)), in_place=in_place))
        wants.append(interpreter.run(program, sends))
        exact.append(reference(call, sends))
        check_layout(world, calls[-1])
    execute(world, calls, rng)
    for ran, want, right in zip(calls, wants, exact, strict=True):
        compare(ran, want)
        for got, expected in zip(want, right, strict=True):
            assert (got is None and expected is None) or np.array_equal(got, expected)  # type: ignore[arg-type]
    return calls


@pytest.mark.parametrize("n", range(1, 9))
def test_every_algorithm_of_the_library(n: int, rng: np.random.Generator) -> None:
    calls = run(list(of_ranks(n, inner=n > 4)), n, rng)
    assert n == 1 or any(rows.shape[1] > call.words[0] for call in calls for rows in call.rows[:1]), "several rows"


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 3])
def test_algorithms_by_chance(n: int, chunks: int, rng: np.random.Generator) -> None:
    """All collectives, with values that several stages of their own rank use."""
    some = [by_chance(collective, n, chunks, seed) for collective in COLLECTIVES for seed in (1, 2)]
    calls = run(some, n, rng)
    assert any(c.writer in c.readers for call in calls for c in call.program.channels)


@pytest.mark.parametrize("n", [1, 3, 4, 8])
def test_in_place(n: int, rng: np.random.Generator) -> None:
    """Results that overwrite operands, a reduce-scatter's in the rank's own block."""
    some = [it for it in of_ranks(n, inner=n > 4) if it.collective == "allreduce"]
    some += [by_chance(kind, n, 2, seed) for kind in ("allreduce", "reduce_scatter", "scan") for seed in range(3)]
    run(some, n, rng, in_place=True)


def deal(it: Algorithm, ctas: int, count: int = 20_000, depth: int = 2) -> tuple[World, Made]:
    """A float32 call by an algorithm, on so many CTAs a rank."""
    world, call = World(it.n), call_of(it.collective, it.n, count, root=0)
    program = it.program(call, chunk_bytes=1024, depth=depth)
    return world, made(world, program, sends_of(call, np.random.default_rng(7)), ctas=ctas)


@pytest.mark.parametrize("ctas", CTAS)
def test_every_stage_is_dealt_out_once_and_in_order(ctas: int) -> None:
    it = by_chance("alltoall", 8, 2, 0)
    world, ran = deal(it, ctas)
    groups_of, _ = laid_out(ran.program, ctas, 1, 1, world.symmetric_bytes)
    for rank in range(8):
        rows, words = ran.rows[rank], ran.words[rank]
        wanted = len(stages_of(ran.program, rank, groups_of))
        each = rows_of(ran.program, rank, groups_of, ctas)
        assert rows.shape == (min(wanted, ctas), each * words)
        assert (each - 1) * ctas < wanted <= each * ctas
        numbers = [[row.row["STAGE"] for row in Row.of_cta(world, ran, rank, 1, cta)] for cta in rows.tolist()]
        assert sorted(itertools.chain(*numbers)) == list(range(wanted))
        assert all(own == sorted(own) for own in numbers)


def test_rows_in_another_order_wait_for_one_another() -> None:
    """What the order is for, and that the emulator would find it broken."""
    it = by_chance("allreduce", 4, 2, 0)
    world, ran = deal(it, 1)
    execute(world, [ran], np.random.default_rng(1))
    world, ran = deal(it, 1)
    for rank, rows in enumerate(ran.rows):
        parts = rows.reshape(-1, ran.words[rank])
        ran.rows[rank] = parts[np.argsort(parts[:, ROW.index("STAGE")])[::-1]].reshape(rows.shape)
    with pytest.raises(Deadlock):
        execute(world, [ran], np.random.default_rng(1))


def test_stages_before_those_that_they_read_are_refused_where_ctas_have_several() -> None:
    _, ran = deal(by_chance("allreduce", 4, 2, 0), 132)
    backwards = replace(ran.program, stages=ran.program.stages[::-1])
    check_sorted(ran.program)
    check_rows(backwards, groups(backwards, 132), 132)
    with pytest.raises(PlanError, match=r"stage \d+ stands before stage \d+, whose channel \d+ it reads"):
        check_rows(backwards, groups(backwards, 1), 1)


def test_more_rows_than_a_cta_has_room_for_are_an_error_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    program = by_chance("alltoall", 8, 2, 0).program(call_of("alltoall", 8, 4000), chunk_bytes=1024, depth=2)
    check_rows(program, groups(program, 1), 1)
    monkeypatch.setattr(codegen, "ROWS_BYTES", 4096)
    with pytest.raises(DeviceError, match=r"a rank has (\d+) stages .*, \1 for each of 1 groups .*, of at most 4096; "):
        check_rows(program, groups(program, 1), 1)
    check_rows(program, groups(program, 40), 40)


def test_fewer_ctas_where_slots_do_not_fit() -> None:
    it = next(it for it in of_ranks(8) if it.name == "one_step")
    program = it.program(call_of("allreduce", 8, 1 << 24), chunk_bytes=128 << 10, depth=4)
    with pytest.raises(DeviceError, match="bytes of slots"):
        place(program, groups(program, 100), 4, 4, SYMMETRIC_BYTES)
    groups_of, places = laid_out(program, 100, 4, 4, SYMMETRIC_BYTES)
    assert max(groups_of.values()) == 12
    assert places == place(program, groups_of, 4, 4, SYMMETRIC_BYTES)
    with pytest.raises(DeviceError, match="bytes of slots"):
        laid_out(program, 100, 4, 4, 1 << 20)


# ---------------------------------------------------------------- the kernels


def kernels(it: Algorithm, dtype: str, op: str, rows: int) -> str:
    """The source for the rank whose stages have the most channels."""
    program = it.program(call_of(it.collective, it.n, 100_003, dtype=dtype, op=op or "sum", root=0))
    kinds = max((kinds_of(program, rank) for rank in range(it.n)), key=lambda own: sum(k.ins + k.outs for k in own))
    rank = next(r for r in range(it.n) if kinds_of(program, r) == kinds)
    return stages_source(program.call, kinds, row_words(program, rank), it.n, rows=rows)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_kernels_compile(rows: int) -> None:
    """Those of the most channels; a CTA of several rows may spill a little."""
    library = {it.name: it for it in of_ranks(8, inner=True)}
    some = [(library["all_pairs"], "bfloat16", "avg"), (library["bruck_alltoall"], "float32", "")]
    found = all_compiled([kernels(it, dtype, op, rows) for it, dtype, op in some], "sm_90")
    for (it, dtype, op), used in zip(some, found, strict=True):
        check(f"{it.name} {dtype} {op}, {rows} rows", STAGES, used, slack=0 if rows == 1 else 64)
