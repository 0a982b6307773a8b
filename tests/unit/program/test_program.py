"""Lowering and the proof of a program: right ones pass, every kind of tampering is found."""

import random
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi.errors import FormatError, PlanError
from blinkmpi.program.call import Call
from blinkmpi.program.check import check
from blinkmpi.program.ir import Program
from blinkmpi.program.lower import lower
from blinkmpi.program.spans import spans
from blinkmpi.trees.tree import CARRIED, COLLECTIVES, Collective, carried
from tests.unit.trees.packings import call_of, packing, random_packing, tree

EVERY: tuple[Collective, ...] = (*COLLECTIVES, *CARRIED)


def chance(
    collective: Collective, n: int, count: int, seed: int, *, multicast: bool = False, uneven: bool = False
) -> Program:
    rng = random.Random(seed)
    root = rng.randrange(n)
    found = random_packing(collective, n, rng, root=root)
    found = msgspec.structs.replace(found, multicast=multicast)
    call = call_of(collective, n, count, root=root, uneven=uneven)
    return lower(found, call, chunk_bytes=rng.choice([1, 64, 4096]), depth=2)


@given(
    collective=st.sampled_from(EVERY),
    n=st.integers(1, 7),
    count=st.sampled_from([0, 1, 7, 100, 1003]),
    seed=st.integers(0, 2**32),
    multicast=st.booleans(),
    uneven=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_every_lowered_program_passes_and_survives_json(
    collective: Collective, n: int, count: int, seed: int, multicast: bool, uneven: bool
) -> None:
    program = check(chance(collective, n, count, seed, multicast=multicast, uneven=uneven))
    assert check(Program.from_json(program.to_json())) == program
    assert program == chance(collective, n, count, seed, multicast=multicast, uneven=uneven), (
        "the same plan lowers to the same program"
    )
    assert all(1 <= program.chunk_of(stage) <= program.chunk for stage in program.stages)


@given(
    collective=st.sampled_from(["allreduce", "reduce", "reduce_scatter"]), n=st.integers(2, 7),
    seed=st.integers(0, 2**32), multicast=st.booleans(),
)  # fmt: skip
def test_operands_are_folded_in_the_order_of_ranks(collective: Collective, n: int, seed: int, multicast: bool) -> None:
    """So the same sum has the same bits; a rank's own operand has its rank's place, and not always the first."""
    program = chance(collective, n, 100, seed, multicast=multicast)
    for stage in program.stages:
        ranks = [stage.rank if i < 0 else program.channels[stage.ins[i]].writer for i in stage.fold]
        assert ranks == sorted(ranks)


REAL: list[Collective] = [c for c in EVERY if c != "barrier"]


@given(collective=st.sampled_from(REAL), n=st.integers(2, 6), seed=st.integers(0, 2**32), pick=st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_a_dropped_stage_is_found(collective: Collective, n: int, seed: int, pick: int) -> None:
    program = chance(collective, n, 1003, seed)
    victim = pick % len(program.stages)
    stages = tuple(stage for i, stage in enumerate(program.stages) if i != victim)
    with pytest.raises(PlanError):
        check(msgspec.structs.replace(program, stages=stages))


@given(collective=st.sampled_from(REAL), n=st.integers(2, 6), seed=st.integers(0, 2**32), pick=st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_a_shifted_store_or_source_is_found(collective: Collective, n: int, seed: int, pick: int) -> None:
    program = chance(collective, n, 1003, seed)
    which = [i for i, stage in enumerate(program.stages) if stage.store is not None or stage.local is not None]
    i = which[pick % len(which)]
    stage = program.stages[i]
    if stage.store is not None:
        changed = msgspec.structs.replace(stage, store=stage.store + 1)
    else:
        changed = msgspec.structs.replace(stage, local=(stage.local or 0) + 1)
    with pytest.raises(PlanError):
        check(replace_stage(program, i, changed))


def replace_stage(program: Program, i: int, stage: msgspec.Struct) -> Program:
    stages = list(program.stages)
    stages[i] = stage  # type: ignore[call-overload]
    return msgspec.structs.replace(program, stages=tuple(stages))


def allreduce_of_three() -> Program:
    trees = [tree(0, "0-1 1-2"), tree(2, "2-0 2-1")]
    return check(lower(packing("allreduce", 3, trees), call_of("allreduce", 3, 96), chunk_bytes=64, depth=2))


def test_a_doubled_contribution_is_found() -> None:
    program = allreduce_of_three()
    i = next(i for i, stage in enumerate(program.stages) if stage.way == "up" and stage.ins)
    stage = program.stages[i]
    with pytest.raises(PlanError, match=r"fold .* must name operands"):
        check(replace_stage(program, i, msgspec.structs.replace(stage, fold=(*stage.fold, -1))))


def test_a_forgotten_contribution_is_found() -> None:
    program = allreduce_of_three()
    i = next(i for i, stage in enumerate(program.stages) if stage.way == "up" and stage.ins)
    changed = msgspec.structs.replace(program.stages[i], local=None, fold=(0,))
    with pytest.raises(PlanError, match=r"rank \d: elements .* hold contributions .* wanted"):
        check(replace_stage(program, i, changed))


def test_a_channel_that_a_rank_reads_twice_is_found() -> None:
    """The values would be right; but a rank has one flag for all that it has read of a channel."""
    found = packing("broadcast", 3, [tree(0, "0-1 1-2")], root=0)
    program = check(lower(found, call_of("broadcast", 3, 8), chunk_bytes=64, depth=2))
    i = next(i for i, stage in enumerate(program.stages) if stage.ins and stage.outs)
    keeps, passes_on = (
        msgspec.structs.replace(program.stages[i], outs=()),
        msgspec.structs.replace(program.stages[i], store=None),
    )
    stages = (*program.stages[:i], keeps, passes_on, *program.stages[i + 1 :])
    with pytest.raises(PlanError, match=r"channel \d is read once by each of"):
        check(msgspec.structs.replace(program, stages=stages))


def test_stages_that_wait_for_one_another_are_found() -> None:
    program = lower(packing("broadcast", 3, [tree(0, "0-1 1-2")], root=0), call_of("broadcast", 3, 8),
                    chunk_bytes=64, depth=1)  # fmt: skip
    first, second = (stage for stage in program.stages if stage.ins)
    a, b = msgspec.structs.replace(program.channels[0], writer=2), program.channels[1]
    stages = tuple(msgspec.structs.replace(s, ins=(i,), outs=(1 - i,)) for i, s in enumerate((first, second)))
    ring = msgspec.structs.replace(program, channels=(a, b), stages=stages)
    with pytest.raises(PlanError, match=r"stages \[0, 1\] wait for one another in a cycle"):
        check(ring)


def test_a_result_that_is_stored_twice_is_found() -> None:
    program = allreduce_of_three()
    stored = next(stage for stage in program.stages if stage.store is not None)
    lone = msgspec.structs.replace(stored, ins=(), outs=(), local=stored.store, fold=(-1,))
    with pytest.raises(PlanError, match=r"written by no stage, or twice|hold contributions|nobody's"):
        check(msgspec.structs.replace(program, stages=(*program.stages, lone)))


def test_a_channel_without_reader_and_one_with_a_wrong_writer_are_found() -> None:
    program = allreduce_of_three()
    for changed in (
        msgspec.structs.replace(program.channels[0], readers=()),
        msgspec.structs.replace(program.channels[0], writer=(program.channels[0].writer + 1) % 3),
        msgspec.structs.replace(program.channels[0], partial=not program.channels[0].partial),
    ):
        with pytest.raises(PlanError, match=r"channel 0|stage \d"):
            check(msgspec.structs.replace(program, channels=(changed, *program.channels[1:])))


@pytest.mark.parametrize("collective", ["allreduce", "reduce", "reduce_scatter"])
def test_what_is_not_folded_yet_travels_in_the_calls_type(collective: Collective) -> None:
    """Only a rank that has folded sends partial results; a channel of operands behind a fold is refused."""
    trees = [tree(r, "0-1 1-2") if r == 0 else tree(r, {1: "1-0 1-2", 2: "2-1 1-0"}[r]) for r in range(3)]
    root = 0 if collective == "reduce" else -1
    found = packing(collective, 3, trees[:1] if root == 0 else trees, root=root)
    call = call_of(collective, 3, 96, dtype="bfloat16", root=0)
    program = check(lower(found, call, chunk_bytes=64, depth=2))
    folding = {c: len(stage.fold) > 1 for stage in program.stages for c in stage.outs if stage.way == "up"}
    assert {c: program.channels[c].wide for c in folding} == folding
    assert set(folding.values()) == {True, False}
    wrong = next(c for c in folding if folding[c])
    channels = list(program.channels)
    channels[wrong] = msgspec.structs.replace(channels[wrong], operands=True)
    with pytest.raises(PlanError, match="into a channel of operands"):
        check(msgspec.structs.replace(program, channels=tuple(channels)))


def test_a_star_of_halves_has_chunks_of_halves() -> None:
    """Nothing wide travels, so a slot holds as many elements as its bytes do."""
    found = packing("allreduce", 3, [tree(0, "0-1 0-2")])
    program = lower(found, call_of("allreduce", 3, 5000, dtype="bfloat16"), chunk_bytes=1024, depth=2)
    assert not any(channel.wide for channel in program.channels)
    assert program.chunk == 512


def test_chunk_and_depth_must_be_positive() -> None:
    with pytest.raises(PlanError, match=r"chunk 0 and depth 2 must be at least 1"):
        check(msgspec.structs.replace(allreduce_of_three(), chunk=0))


def test_a_tampered_file_does_not_load() -> None:
    text = allreduce_of_three().to_json()
    with pytest.raises(FormatError, match=r"evil\.json: not a valid program: .*\$\.depth"):
        Program.from_json(text.replace('"depth": 2', '"depth": "two"'), source="evil.json")
    with pytest.raises(PlanError, match=r"wants writer"):
        check(Program.from_json(text.replace('"readers": [', '"readers": [2, ', 1)))


def test_a_packing_for_another_call_is_refused() -> None:
    found = packing("broadcast", 3, [tree(0, "0-1 1-2")], root=0)
    with pytest.raises(PlanError, match=r"root 0, cannot carry broadcast of 3 ranks, root 1"):
        lower(found, call_of("broadcast", 3, 8, root=1), chunk_bytes=64, depth=1)
    with pytest.raises(PlanError, match=r"cannot carry allreduce"):
        lower(found, call_of("allreduce", 3, 8), chunk_bytes=64, depth=1)


@given(
    count=st.integers(0, 10**7),
    weights=st.lists(st.fractions(Fraction(1, 100), Fraction(100)), min_size=1, max_size=9),
    align=st.sampled_from([1, 4, 16, 64]),
)
def test_spans_tile_the_vector_in_proportion(count: int, weights: list[Fraction], align: int) -> None:
    parts = spans(count, weights, align)
    at = 0
    for start, length in parts:
        assert start == at
        assert length >= 0
        at += length
    assert at == count
    for (_, length), weight in zip(parts, weights, strict=True):
        assert abs(length - weight / sum(weights) * count) <= align + 1


def test_steps_follow_the_spans_of_the_trees() -> None:
    trees = [tree(0, "0-1 1-2", 3), tree(2, "2-0 2-1", 1)]
    program = lower(packing("allreduce", 3, trees), call_of("allreduce", 3, 1 << 20), chunk_bytes=65536, depth=4)
    heavy, light = (next(stage for stage in program.stages if stage.tree == t) for t in (0, 1))
    assert program.chunk_of(heavy) == program.chunk
    assert program.chunk_of(light) == pytest.approx(program.chunk / 3, rel=0.02)


@pytest.mark.parametrize(("call", "total", "send", "recv1"), [
    (Call("allgather", 3, (5,), "int8"), 15, 5, 15),
    (Call("scatter", 3, (5,), "int8", "", 0), 15, 15, 5),
    (Call("reduce_scatter", 3, (5, 0, 2), "int8", "sum"), 7, 7, 0),
    (Call("allreduce", 3, (5,), "int8", "sum"), 5, 5, 5),
    (Call("barrier", 3, (0,), "int8"), 0, 0, 0),
    (Call("allgather", 3, (5, 0, 2), "int8"), 7, 0, 7),
    (Call("gather", 3, (5, 4, 2), "int8", "", 0), 11, 4, 11),
    (Call("scatter", 3, (5, 4, 2), "int8", "", 0), 11, 11, 4),
    (Call("alltoall", 3, (5,), "int8"), 15, 15, 15),
    (Call("alltoall", 3, (0, 9, 0, 1, 2, 3, 0, 4, 0), "int8"), 15, 6, 15),
    (Call("scan", 3, (5,), "int8", "sum"), 5, 5, 5),
])  # fmt: skip
def test_counts_of_a_call(call: Call, total: int, send: int, recv1: int) -> None:
    assert (call.total, call.send_length(1), call.recv_count(1)) == (total, send, recv1)


def test_an_uneven_block_in_another_place_is_found() -> None:
    """Every block of an alltoall has a length of its own, and what belongs to one rank goes to no other."""
    scatters = [packing("scatter", 3, [tree(r, f"{r}-{e}") for e in range(3) if e != r], root=r) for r in range(3)]
    call = Call("alltoall", 3, (0, 9, 0, 1, 2, 3, 0, 4, 0), "int8")
    program = check(lower(carried("alltoall", scatters), call, chunk_bytes=64, depth=2))
    swapped = msgspec.structs.replace(call, counts=(0, 9, 0, 1, 2, 4, 0, 3, 0))
    with pytest.raises(PlanError, match=r"rank 1: element|hold contributions"):
        check(msgspec.structs.replace(program, call=swapped))


def test_a_scan_that_skips_a_rank_is_found() -> None:
    scatters = [packing("scatter", 3, [tree(r, f"{r}-{e}") for e in range(3) if e != r], root=r) for r in range(3)]
    program = check(lower(carried("scan", scatters), call_of("scan", 3, 8), chunk_bytes=64, depth=2))
    i = next(i for i, stage in enumerate(program.stages) if stage.rank == 1)
    with pytest.raises(PlanError, match=r"hold contributions .* wanted"):
        check(replace_stage(program, i, msgspec.structs.replace(program.stages[i], local=None, fold=(0,))))


def test_a_program_of_before_is_read_as_it_was() -> None:
    """One number stood for equal blocks, and still does; a collective that there is not is refused."""
    paths = [tree(0, "0-1"), tree(0, "0-2")]
    text = lower(packing("scatter", 3, paths, root=0), call_of("scatter", 3, 8), chunk_bytes=64, depth=2).to_json()
    assert check(Program.from_json(text)).call.counts == (8,)
    with pytest.raises(FormatError, match="not a valid program"):
        Program.from_json(text.replace('"collective": "scatter"', '"collective": "alltoallw"'))
