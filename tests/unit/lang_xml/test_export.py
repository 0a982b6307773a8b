"""Flow to XML and back: the checker proves what the exporter writes, and the same is folded in the same order."""

from typing import Any

import pytest
from msgspec.structs import replace

from blinkmpi.errors import PlanError
from blinkmpi.lang.flow import Flow, Node
from blinkmpi.lang.library import ring
from blinkmpi.lang.xml.check import flow_of, judge
from blinkmpi.lang.xml.export import export, replicated
from blinkmpi.lang.xml.file import SLOTS, XmlAlgorithm, parse_xml, write_xml
from tests.unit.lang_xml.flows import (
    MAKERS,
    Values,
    all_pairs,
    by_copies,
    direct_alltoall,
    ring_allreduce,
    step_ring_allreduce,
)
from tests.unit.lang_xml.machine import Machine, by_chunk

SHAPES = [(1, 1), (2, 1), (1, 2), (3, 2)]
Fold = tuple[object, ...]  # nested: folds of (rank, chunk)


def folds(flow: Flow) -> list[list[Fold | None]]:
    """What each place of the outputs is, as nested folds without the copies between."""
    made: list[Fold] = []
    for node in flow.nodes:
        parts = [made[r] if r >= 0 else ("input", node.rank, ~r) for r in node.operands]
        first = parts[0]
        for part in parts[1:]:  # a fold of a fold is one fold, from the left
            first = (first, part)
        made.append(first)
    return [
        [None if r is None or not want else made[r] if r >= 0 else ("input", rank, ~r)
         for r, want in zip(out, wanted, strict=True)]
        for rank, (out, wanted) in enumerate(zip(flow.outputs, flow.goal.wanted, strict=True))
    ]  # fmt: skip


def types(algorithm: XmlAlgorithm) -> set[str]:
    return {step.type for gpu in algorithm.gpus for block in gpu.blocks for step in block.steps}


@pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize(("channels", "instances"), SHAPES)
@pytest.mark.parametrize("name", list(MAKERS))
def test_what_is_exported_computes_the_same(name: str, channels: int, instances: int, in_place: bool) -> None:
    flow = MAKERS[name]()
    made = parse_xml(write_xml(export(flow, name=name, in_place=in_place, channels=channels, instances=instances)))
    report, again = judge(made)
    assert [fault.text for fault in report.faults] == []
    assert again is not None
    assert again.goal == replicated(flow, instances).goal
    assert folds(again) == folds(replicated(flow, instances))
    assert report.unused == ()
    assert report.slots_needed in (1, 2)
    assert report.slots_by_chunk in (1, 2)
    assert {channel for gpu in made.gpus for channel in [b.channel for b in gpu.blocks]} <= set(range(made.channels))
    assert export(again, name=name, in_place=in_place).collective == made.collective


@pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize("name", list(MAKERS))
def test_what_is_exported_runs(name: str, in_place: bool) -> None:
    flow = MAKERS[name]()
    made = export(flow, name=name, in_place=in_place, channels=2, instances=2)
    for seed in range(4):
        ran = by_chunk(made) if seed % 2 else made
        machine = Machine(ran, replicated(flow, 2).goal, in_place=in_place, slots=2, seed=seed)
        assert machine.run()
        assert machine.right()
        assert not machine.noise_read


def test_a_ring_is_one_thread_block_of_fused_steps() -> None:
    made = export(ring_allreduce(4), name="ring", in_place=True)
    assert [len(gpu.blocks) for gpu in made.gpus] == [1] * 4
    assert types(made) == {"s", "rrs", "rrcs", "rcs", "r"}
    assert [gpu.scratch for gpu in made.gpus] == [0] * 4
    steps = sum(len(block.steps) for gpu in made.gpus for block in gpu.blocks)
    assert steps == 4 * 7  # each chunk: one sends, two fold and send, one folds, keeps and sends, ... 7 in all


def test_steps_are_fused_only_as_far_as_messages_keep_their_order() -> None:
    made = export(step_ring_allreduce(6), name="ring")
    assert {"rcs", "s"} <= types(made)
    assert judge(made)[0].slots_needed == 2


def test_local_folds_and_copies_have_their_steps() -> None:
    made = export(by_copies(4), name="copies", in_place=True)
    assert {"r", "re", "s"} <= types(made)
    assert judge(made)[0].proved


def test_neighbours_are_one_step() -> None:
    made = export(direct_alltoall(3, 5), name="pairs", in_place=True)
    steps = [step for gpu in made.gpus for block in gpu.blocks for step in block.steps]
    assert {step.count for step in steps if step.type in "sr"} == {5}
    assert {step.type for step in steps if step.count == 1} <= {"nop", "cpy"}


def test_long_messages_are_passed_on_where_all_work_at_the_same_time() -> None:
    """Around a ring and further, a rank would have to pass on the first chunks of a message before it has the last."""
    v = Values("allgather", 3, 6)
    for source in range(3):
        values = [v.given(source, c) for c in range(6)]
        for c in range(6):
            v.give(source, source * 6 + c, values[c])
        for k in range(1, 6):  # twice around; what the second turn brings is taken
            values = [v.make((source + k) % 3, value) for value in values]
            for c, value in enumerate(values):
                v.give((source + k) % 3, source * 6 + c, value)
    made = export(v.flow(), name="twice around")
    steps = [step for gpu in made.gpus for block in gpu.blocks for step in block.steps]
    assert {step.count for step in steps if step.type == "rcs"} == {6}
    assert judge(made)[0].slots_by_chunk in (1, 2)


def test_a_thread_block_has_one_peer_on_each_side() -> None:
    made = export(all_pairs(4), name="pairs", channels=2)
    for gpu in made.gpus:
        for side in ("send", "recv"):
            ends = [(getattr(b, side), b.channel) for b in gpu.blocks if getattr(b, side) >= 0]
            assert len(ends) == len(set(ends))


def test_in_place_swaps_go_through_scratch() -> None:
    """Rank 0's chunks change places, which no order of two copies in one memory can do."""
    v = Values("alltoall", 2, 1)
    for rank in range(2):
        v.give(rank, rank, ~rank)
        v.give(rank, 1 - rank, v.make(rank, v.given(1 - rank, rank)))
    assert judge(export(v.flow(), name="swap", in_place=True))[0].proved


def test_an_output_may_be_a_value_of_another_rank() -> None:
    v = Values("broadcast", 2, 1, 0)
    v.give(1, 0, v.given(0, 0))
    made = export(v.flow(), name="one")
    assert judge(made)[0].proved
    assert types(made) == {"s", "r"}


def test_values_that_nobody_uses_are_left_out() -> None:
    flow = ring_allreduce(3)
    more = Flow(flow.goal, (*flow.nodes, Node(1, (0,)), Node(0, (~0, len(flow.nodes)))), flow.outputs)
    assert export(more, name="") == export(flow, name="")


@pytest.mark.parametrize("protocol", list(SLOTS))
def test_the_head_says_what_was_asked_for(protocol: str) -> None:
    made = export(ring_allreduce(2), name="r", protocol=protocol, min_bytes=5, max_bytes=7, in_place=True)
    assert (made.name, made.protocol, made.min_bytes, made.max_bytes) == ("r", protocol, 5, 7)
    assert (made.in_place, made.out_of_place, made.chunks, made.root) == (True, False, 2, -1)


def test_a_wrong_flow_is_not_exported() -> None:
    flow = ring_allreduce(2)
    wrong = replace(flow, outputs=((None, None), *flow.outputs[1:]))
    with pytest.raises(PlanError, match="rank 0: nothing writes chunk 0"):
        export(wrong, name="wrong")
    with pytest.raises(PlanError, match="scan: MSCCL has no such collective"):
        export(_scan(), name="scan")
    with pytest.raises(PlanError, match="protocol 'fast', 1 channels, 1 instances"):
        export(flow, name="", protocol="fast")
    with pytest.raises(PlanError, match="0 channels"):
        export(flow, name="", channels=0)


def _scan() -> Flow:
    v = Values("scan", 2, 1)
    v.give(0, 0, ~0)
    v.give(1, 0, v.make(1, v.given(0, 0), ~0))
    return v.flow()


def test_custom_collectives_go_round_too() -> None:
    flow = ring_allreduce(3)
    custom = Flow(replace(flow.goal, collective="custom"), flow.nodes, flow.outputs)
    again = flow_of(export(custom, name="mine"))
    assert again.goal == replace(custom.goal, chunks=again.goal.chunks)
    assert folds(again) == folds(custom)


@pytest.mark.parametrize(
    "given", [{"instances": 0}, {"instances": "2"}, {"instances": 10**9}, {"channels": 1.5}, {"channels": 10**9}]
)
def test_numbers_that_no_file_has_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"instances.*(at least one of each|take fewer)"):
        ring(4).to_xml(**given)
