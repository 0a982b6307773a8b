"""From values to programs: proved, right for any count, as few stages as there can be, and safe in place."""

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi import lang
from blinkmpi.errors import PlanError
from blinkmpi.lang import Algorithm, chunk, library
from blinkmpi.lang.flow import custom_call
from blinkmpi.program.call import REDUCTIONS, Call
from blinkmpi.program.check import check
from blinkmpi.program.in_place import check_in_place
from blinkmpi.program.interpreter import run
from blinkmpi.program.ir import Channel, Program, Stage
from blinkmpi.trees.tree import Collective
from tests.effort import Effort
from tests.unit.lang.algorithms import COLLECTIVES, by_chance, custom_by_chance, of_ranks
from tests.unit.lang.any_order import run_in_place
from tests.unit.trees.packings import call_of, reference, sends_of

RANKS = range(2, 10)
TYPES = (("int32", "sum"), ("float32", "sum"), ("bfloat16", "sum"), ("float16", "avg"), ("float64", "max"),
         ("complex64", "prod"), ("uint8", "bxor"), ("bool", "land"))  # fmt: skip


def agrees(made: Algorithm, call: Call, seed: int = 0) -> None:
    """A program of the algorithm does what NumPy says, in one slot for all readers and in one for each."""
    sends = sends_of(call, np.random.default_rng(seed))
    for multicast in (False, True):
        program = made.program(call, chunk_bytes=256, depth=2, multicast=multicast)
        assert Program.from_json(program.to_json()) == program
        for rank, (got, want) in enumerate(zip(run(program, sends), reference(call, sends), strict=True)):
            assert (got is None) == (want is None), f"{made.name}: rank {rank}"
            assert got is None or want is None or np.array_equal(got, want), f"{made.name}: rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize("n", RANKS)
def test_every_algorithm_of_the_library_equals_numpy(n: int) -> None:
    for made in of_ranks(n):
        for count in (0, 1, n - 1, 37, 1003):
            agrees(made, call_of(made.collective, n, count))
        for dtype, op in TYPES if made.collective in REDUCTIONS else [("int8", ""), ("complex128", "")]:
            agrees(made, call_of(made.collective, n, 501, dtype=dtype, op=op))
        agrees(made, call_of(made.collective, n, 40, uneven=True))


@pytest.mark.slow
@given(collective=st.sampled_from(COLLECTIVES), n=st.integers(1, 6), chunks=st.integers(1, 5),
       count=st.sampled_from([0, 1, 7, 100, 1003]), uneven=st.booleans(), seed=st.integers(0, 2**32))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_whatever_is_written_becomes_a_right_program(
    collective: Collective, n: int, chunks: int, count: int, uneven: bool, seed: int
) -> None:
    made = by_chance(collective, n, chunks, seed)
    call = call_of(collective, n, count, root=made.flow.goal.root, uneven=uneven)
    agrees(made, call, seed % 1000)
    assert Algorithm.from_json(made.to_json()) == made


@pytest.mark.slow
@given(n=st.integers(1, 5), seed=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_whatever_is_written_for_a_collective_of_ones_own_becomes_a_right_program(n: int, seed: int) -> None:
    custom_agrees(custom_by_chance(n, seed), seed % 1000)


def to_the_next(parts: int, width: int) -> Algorithm:
    """MSCCLang's AllToNext: rank r's input goes to rank r + 1, ``parts`` chunks, ``width`` at once."""
    goal = lang.custom(
        given=lambda n, rank: parts, wanted=lambda n, rank: [[(rank - 1, i)] for i in range(parts)] if rank else []
    )

    @lang.algorithm(goal, chunks=parts)
    def to_next(n: int) -> None:
        for r in range(1, n):
            for i in range(0, parts, width):
                chunk(r - 1, "input", i, width).copy(r, "output", i)

    return to_next(4)


@pytest.mark.parametrize(("parts", "width"), [(2, 2), (4, 1), (6, 3)])
def test_neighbours_of_a_custom_collective_take_their_way_as_one(parts: int, width: int) -> None:
    made = to_the_next(parts, width)
    custom_agrees(made)
    program = made.program(custom_call(made.flow.goal, made.identity, 10, "int64", "sum"))
    assert [(s.rank, s.count) for s in program.stages] == [(r + end, parts * 10) for r in range(3) for end in (0, 1)], (
        "one stage sends all chunks of a rank, and one receives them"
    )


def test_what_neighbours_is_no_one_piece_where_it_comes_from_elsewhere() -> None:
    goal = lang.custom(given=lambda n, rank: 2, wanted=lambda n, rank: [[(0, 0)], [(1, 1)], [(1, 0)], [(1, 1)]])

    @lang.algorithm(goal, chunks=1)
    def mixed(n: int) -> None:
        for r in range(n):
            chunk(0, "input", 0).copy(r, "output", 0)
            chunk(1, "input", 1).copy(r, "output", 1)
            chunk(1, "input", 0, 2).copy(r, "output", 2)

    custom_agrees(mixed(3))


def test_one_chunk_may_be_several_results_of_a_rank() -> None:
    goal = lang.custom(given=lambda n, rank: 1, wanted=lambda n, rank: [[(0, 0)]] * 3 + [[(0, 0), (1, 0)]] * 2)

    @lang.algorithm(goal, chunks=1)
    def repeated(n: int) -> None:
        both = chunk(0, "input", 0).copy(0, "sum", 0).reduce(chunk(1, "input", 0))
        for r in range(n):
            for i in range(5):
                (chunk(0, "input", 0) if i < 3 else both).copy(r, "output", i)

    custom_agrees(repeated(3))


def test_a_fold_of_several_chunks_of_a_ranks_own() -> None:
    goal = lang.custom(
        given=lambda n, rank: 3, wanted=lambda n, rank: [[(rank, i) for i in range(3)] + [(0, 0)] * (rank > 0)]
    )

    @lang.algorithm(goal, chunks=1)
    def inside(n: int) -> None:
        for r in range(n):
            own = chunk(r, "input", 0).copy(r, "output", 0)
            own.reduce(chunk(r, "input", 1)).reduce(chunk(r, "input", 2))
            if r:
                own.reduce(chunk(0, "input", 0))

    custom_agrees(inside(3))


def test_chunks_with_which_not_the_same_is_done_stay_apart_though_each_has_its_like() -> None:
    pairs = [(0, 2), (1, 5), (4, 6), (3, 7)]  # that rank 1 folds; rank 2 folds the even ones, and the odd ones

    def wanted(n: int, rank: int) -> list[list[tuple[int, int]]]:
        if rank == 1:
            return [[(0, a), (0, b)] for a, b in pairs]
        return [[(0, c) for c in range(part, 8, 2)] for part in (0, 1)] if rank == 2 else []

    @lang.algorithm(lang.custom(given=lambda n, rank: 8 * (rank == 0), wanted=wanted), chunks=1)
    def crossed(n: int) -> None:
        for part in (0, 1):
            for c in range(part, 8, 2):
                chunk(0, "input", c).copy(1, "work", c)
        for i, (a, b) in enumerate(pairs):
            chunk(1, "work", a).reduce(chunk(1, "work", b)).copy(1, "output", i)
        for part in (0, 1):
            chunk(1, "output", part).copy(2, "output", part).reduce(chunk(1, "output", 2 + part))

    custom_agrees(crossed(3))


def custom_agrees(made: Algorithm, seed: int = 0) -> None:
    """Programs of a custom collective give what its proof says, chunk by chunk, for several lengths of a chunk."""
    goal, rng = made.flow.goal, np.random.default_rng(seed)
    for width in (0, 1, 37):
        call = custom_call(goal, made.identity, width, "int64", "sum")
        sends = [rng.integers(0, 1000, count * width) for count in goal.given]
        want = [[sum(sends[r][c * width : (c + 1) * width] for r, c in of) for of in wanted] for wanted in goal.wanted]
        for multicast in (False, True):
            program = made.program(call, chunk_bytes=64, depth=2, multicast=multicast)
            for rank, got in enumerate(run(program, [send if send.size else None for send in sends])):
                for i, of in enumerate(goal.wanted[rank] if width else ()):
                    assert not of or (got is not None and (got.reshape(-1, width)[i] == want[rank][i]).all()), (rank, i)


@pytest.mark.parametrize(("made", "most"), [
    (library.one_step(8), 2),  # a rank's stages: it sends, and it folds all
    (library.all_pairs(8), 15),  # a chunk of its own that it folds; of seven others it sends one and gets one
    (library.ring(8), 15),
    (library.all_pairs_alltoall(8), 15),
    (library.bruck_allgather(8), 9),
], ids=lambda it: it.name if isinstance(it, Algorithm) else "")  # fmt: skip
def test_as_few_stages_as_there_can_be(made: Algorithm, most: int) -> None:
    program = made.program(call_of(made.collective, 8, 8000), chunk_bytes=4096, depth=4, multicast=True)
    assert max(len(program.of(rank)) for rank in range(8)) == most


def test_consecutive_chunks_with_which_the_same_is_done_become_one() -> None:
    @lang.algorithm("allreduce", chunks=64, inplace=True)
    def halves(n: int) -> None:
        for i in range(64):
            own, other = (0, 1) if i < 20 else (1, 0)
            chunk(own, "input", i).reduce(chunk(other, "input", i)).copy(other)

    program = halves(2).program(call_of("allreduce", 2, 6400), chunk_bytes=256)
    assert [(s.rank, s.way, s.count) for s in program.stages] == [
        (1, "up", 2000), (0, "turn", 2000), (1, "down", 2000), (0, "up", 4400), (1, "turn", 4400), (0, "down", 4400),
    ]  # fmt: skip


def test_a_result_that_lies_on_another_rank_is_sent_from_there() -> None:
    ring = library.ring(4)
    flow = msgspec.structs.replace(ring.flow, outputs=ring.flow.outputs[::-1])
    agrees(Algorithm.of("turned", flow), call_of("allreduce", 4, 101))


def test_what_no_result_needs_is_dropped() -> None:
    @lang.algorithm("broadcast", chunks=1)
    def wasteful(n: int) -> None:
        for r in range(1, n):
            chunk(0, "input", 0).copy(r, "output", 0).copy(0, "back")

    program = wasteful(3).program(call_of("broadcast", 3, 10), chunk_bytes=64)
    assert [(c.writer, c.readers) for c in program.channels] == [(0, (1,)), (0, (2,))]


@pytest.mark.slow
def test_a_program_of_2000_steps_is_made_and_proved_with_little_work() -> None:
    call = call_of("allreduce", 32, 100_000)
    with Effort() as effort:
        made = library.ring(32)
        program = made.program(call, chunk_bytes=4096)
    assert effort.ours < 600_000, "some hundred functions for each step"
    assert len(made.flow.nodes) >= 32 * 62
    assert len(program.stages) >= 32 * 62


def test_a_call_of_another_kind_is_refused() -> None:
    with pytest.raises(PlanError, match="lang:ring is for allreduce of 3 ranks, root -1, and cannot carry allgather"):
        library.ring(3).program(call_of("allgather", 3, 10))
    with pytest.raises(PlanError, match="cannot carry allreduce of 4 ranks"):
        library.ring(3).program(call_of("allreduce", 4, 10))


# ---------------------------------------------------------------- in place


def read_twice() -> Program:
    """An allreduce of two in one step in which each sends its vector by one stage, and folds it by another."""
    channels = (Channel(0, 0, (1,), True, True), Channel(0, 1, (0,), True, True))
    stages = []
    for r in (0, 1):
        stages.append(Stage(r, 0, "up", 4096, 0, (), (-1,), None, (r,), False))
        stages.append(Stage(r, 0, "turn", 4096, 0, (1 - r,), (-1, 0), 0, (), True))
    return check(Program(Call("allreduce", 2, (4096,), "int64", "sum"), "by hand", 64, 1, channels, tuple(stages)))


def right_in_place(program: Program) -> list[bool]:
    """Whether an allreduce in place gives the sums, in 200 orders."""
    n, count = program.call.n, program.call.counts[0]
    found = []
    for seed in range(200 if count <= 4096 else 20):
        buffers = [np.arange(count, dtype=np.int64) * (r + 1) for r in range(n)]
        want = np.arange(count, dtype=np.int64) * (n * (n + 1) // 2)
        run_in_place(program, buffers, random.Random(seed))
        found.append(all(np.array_equal(buffer, want) for buffer in buffers))
    return found


@pytest.mark.slow
def test_what_is_stored_before_it_was_read_is_wrong_in_place_and_refused() -> None:
    program = read_twice()
    assert not all(right_in_place(program)), "a rank that folds early overwrites what it has still to send"
    with pytest.raises(PlanError, match=r"rank 0: stage 1 may store elements 0..4095 before stage 0 has read 0.. of"):
        check_in_place(program)


@pytest.mark.slow
@pytest.mark.parametrize("multicast", [False, True])
def test_one_stage_reads_an_input_and_others_of_its_rank_have_it_from_there(multicast: bool) -> None:
    program = library.one_step(2).program(
        Call("allreduce", 2, (4096,), "int64", "sum"), chunk_bytes=512, depth=1, multicast=multicast
    )
    assert any(c.writer in c.readers for c in program.channels)
    assert all(right_in_place(program))


@pytest.mark.slow
@given(n=st.integers(2, 5), chunks=st.integers(1, 4), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_whatever_is_written_is_right_in_place(n: int, chunks: int, seed: int) -> None:
    made = by_chance("allreduce", n, chunks, seed)
    program = made.program(Call("allreduce", n, (301,), "int64", "sum"), chunk_bytes=64 * 8, depth=1)
    for order in range(5):
        buffers = [np.arange(301, dtype=np.int64) * (r + 1) for r in range(n)]
        run_in_place(program, buffers, random.Random(seed + order))
        assert all(np.array_equal(b, np.arange(301) * (n * (n + 1) // 2)) for b in buffers)


def test_a_result_in_the_own_block_of_a_reduce_scatter_is_looked_at_where_it_lies() -> None:
    @lang.algorithm("reduce_scatter", chunks=1)
    def folded_twice(n: int) -> None:
        for r in range(n):  # by the owner, and once more by a neighbour, whose fold nobody would need
            chunk(r, "input", r).copy(r, "output", 0)
            for other in range(n):
                if other != r:
                    chunk(r, "output", 0).reduce(chunk(other, "input", r))

    program = folded_twice(3).program(call_of("reduce_scatter", 3, 30))
    turn = next(i for i, s in enumerate(program.stages) if s.way == "turn" and s.rank == 2)
    stage = program.stages[turn]
    assert stage.local == program.call.block(2)[0]
    lone = Stage(2, 9, "up", stage.count, stage.local, (), (-1,), None, (), False)
    with pytest.raises(PlanError, match=f"rank 2: stage {turn} may store elements"):
        check_in_place(msgspec.structs.replace(program, stages=(*program.stages, lone)))
