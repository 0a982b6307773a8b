"""Lowering and the proof of a program: right ones pass, every kind of tampering is found."""

from __future__ import annotations

import random
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi.errors import FormatError, PlanError
from blinkmpi.lower import lower, spans
from blinkmpi.program import Call, Program
from blinkmpi.trees.tree import COLLECTIVES, Collective
from tests.unit.packings import call_of, packing, random_packing, tree


def chance(collective: Collective, n: int, count: int, seed: int, *, multicast: bool = False) -> Program:
    rng = random.Random(seed)
    root = rng.randrange(n)
    found = random_packing(collective, n, rng, root=root)
    found = msgspec.structs.replace(found, multicast=multicast)
    return lower(found, call_of(collective, n, count, root=root), chunk_bytes=rng.choice([1, 64, 4096]), depth=2)


@given(
    collective=st.sampled_from(COLLECTIVES),
    n=st.integers(1, 7),
    count=st.sampled_from([0, 1, 7, 100, 1003]),
    seed=st.integers(0, 2**32),
    multicast=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_every_lowered_program_passes_and_survives_json(
    collective: Collective, n: int, count: int, seed: int, multicast: bool
) -> None:
    program = chance(collective, n, count, seed, multicast=multicast).check()
    assert Program.from_json(program.to_json()) == program
    assert program == chance(collective, n, count, seed, multicast=multicast), (
        "the same plan lowers to the same program"
    )
    assert all(1 <= program.chunk_of(lane) <= program.chunk for lane in program.lanes)


REAL: list[Collective] = [c for c in COLLECTIVES if c != "barrier"]


@given(collective=st.sampled_from(REAL), n=st.integers(2, 6), seed=st.integers(0, 2**32), pick=st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_a_dropped_lane_is_found(collective: Collective, n: int, seed: int, pick: int) -> None:
    program = chance(collective, n, 1003, seed)
    victim = pick % len(program.lanes)
    lanes = tuple(lane for i, lane in enumerate(program.lanes) if i != victim)
    with pytest.raises(PlanError):
        msgspec.structs.replace(program, lanes=lanes).check()


@given(collective=st.sampled_from(REAL), n=st.integers(2, 6), seed=st.integers(0, 2**32), pick=st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_a_shifted_store_or_source_is_found(collective: Collective, n: int, seed: int, pick: int) -> None:
    program = chance(collective, n, 1003, seed)
    which = [i for i, lane in enumerate(program.lanes) if lane.store is not None or lane.local is not None]
    i = which[pick % len(which)]
    lane = program.lanes[i]
    if lane.store is not None:
        changed = msgspec.structs.replace(lane, store=lane.store + 1)
    else:
        changed = msgspec.structs.replace(lane, local=(lane.local or 0) + 1)
    with pytest.raises(PlanError):
        replace_lane(program, i, changed).check()


def replace_lane(program: Program, i: int, lane: msgspec.Struct) -> Program:
    lanes = list(program.lanes)
    lanes[i] = lane  # type: ignore[call-overload]
    return msgspec.structs.replace(program, lanes=tuple(lanes))


def allreduce_of_three() -> Program:
    trees = [tree(0, "0-1 1-2"), tree(2, "2-0 2-1")]
    return lower(packing("allreduce", 3, trees), call_of("allreduce", 3, 96), chunk_bytes=64, depth=2).check()


def test_a_doubled_contribution_is_found() -> None:
    program = allreduce_of_three()
    i = next(i for i, lane in enumerate(program.lanes) if lane.way == "up" and lane.ins)
    lane = program.lanes[i]
    with pytest.raises(PlanError, match=r"fold .* must name operands"):
        replace_lane(program, i, msgspec.structs.replace(lane, fold=(*lane.fold, -1))).check()


def test_a_forgotten_contribution_is_found() -> None:
    program = allreduce_of_three()
    i = next(i for i, lane in enumerate(program.lanes) if lane.way == "up" and lane.ins)
    changed = msgspec.structs.replace(program.lanes[i], local=None, fold=(0,))
    with pytest.raises(PlanError, match=r"rank \d: elements .* hold contributions .* wanted"):
        replace_lane(program, i, changed).check()


def test_lanes_that_wait_for_one_another_are_found() -> None:
    program = lower(packing("broadcast", 3, [tree(0, "0-1 1-2")], root=0), call_of("broadcast", 3, 8),
                    chunk_bytes=64, depth=1)  # fmt: skip
    first, second = (lane for lane in program.lanes if lane.ins)
    a, b = msgspec.structs.replace(program.channels[0], writer=2), program.channels[1]
    ring = msgspec.structs.replace(
        program,
        channels=(a, b),
        lanes=(
            msgspec.structs.replace(first, ins=(0,), outs=(1,)),
            msgspec.structs.replace(second, ins=(1,), outs=(0,)),
        ),
    )
    with pytest.raises(PlanError, match=r"lanes \[0, 1\] wait for one another in a cycle"):
        ring.check()


def test_a_result_that_is_stored_twice_is_found() -> None:
    program = allreduce_of_three()
    stored = next(lane for lane in program.lanes if lane.store is not None)
    lone = msgspec.structs.replace(stored, ins=(), outs=(), local=stored.store, fold=(-1,))
    with pytest.raises(PlanError, match=r"written by no lane, or twice|hold contributions|nobody's"):
        msgspec.structs.replace(program, lanes=(*program.lanes, lone)).check()


def test_a_channel_without_reader_and_one_with_a_wrong_writer_are_found() -> None:
    program = allreduce_of_three()
    for changed in (
        msgspec.structs.replace(program.channels[0], readers=()),
        msgspec.structs.replace(program.channels[0], writer=(program.channels[0].writer + 1) % 3),
        msgspec.structs.replace(program.channels[0], partial=not program.channels[0].partial),
    ):
        with pytest.raises(PlanError, match=r"channel 0|lane \d"):
            msgspec.structs.replace(program, channels=(changed, *program.channels[1:])).check()


def test_chunk_and_depth_must_be_positive() -> None:
    with pytest.raises(PlanError, match=r"chunk 0 and depth 2 must be at least 1"):
        msgspec.structs.replace(allreduce_of_three(), chunk=0).check()


def test_a_tampered_file_does_not_load() -> None:
    text = allreduce_of_three().to_json()
    with pytest.raises(FormatError, match=r"evil\.json: not a valid program: .*\$\.depth"):
        Program.from_json(text.replace('"depth": 2', '"depth": "two"'), source="evil.json")
    with pytest.raises(PlanError, match=r"wants writer"):
        Program.from_json(text.replace('"readers": [', '"readers": [2, ', 1))


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
    heavy, light = (next(lane for lane in program.lanes if lane.tree == t) for t in (0, 1))
    assert program.chunk_of(heavy) == program.chunk
    assert program.chunk_of(light) == pytest.approx(program.chunk / 3, rel=0.02)


@pytest.mark.parametrize(
    ("call", "total", "send", "recv1"),
    [
        (Call("allgather", 3, (5,), "int8"), 15, 5, 15),
        (Call("scatter", 3, (5,), "int8", "", 0), 15, 15, 5),
        (Call("reduce_scatter", 3, (5, 0, 2), "int8", "sum"), 7, 7, 0),
        (Call("allreduce", 3, (5,), "int8", "sum"), 5, 5, 5),
        (Call("barrier", 3, (0,), "int8"), 0, 0, 0),
    ],
)
def test_counts_of_a_call(call: Call, total: int, send: int, recv1: int) -> None:
    assert (call.total, call.send_count, call.recv_count(1)) == (total, send, recv1)
