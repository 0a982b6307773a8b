"""The checker on small files written by hand: what each kind of mistake is called, and where it is."""

from collections.abc import Sequence

import pytest

from blinkmpi.errors import PlanError
from blinkmpi.lang.flow import Flow
from blinkmpi.lang.xml.check import XmlReport, flow_of, judge
from blinkmpi.lang.xml.export import export
from blinkmpi.lang.xml.file import XmlAlgorithm, XmlBlock, XmlGpu, XmlStep, parse_xml, write_xml
from tests.unit.lang_xml.flows import ring_allreduce
from tests.unit.lang_xml.machine import Machine, by_chunk

Blocks = Sequence[tuple[int, int, int, Sequence[str]]]  # send, recv, channel, steps


def step(text: str) -> XmlStep:
    """``rrc i0 o0 x2 <1.3 !``: type, src, dst, cnt, what it waits for, hasdep."""
    kind, *words = text.split()
    places = [(w[0], int(w[1:])) for w in words if w[0] in "ios"]
    count = next((int(w[1:]) for w in words if w[0] == "x"), 1)
    depid, deps = next((map(int, w[1:].split(".")) for w in words if w[0] == "<"), (-1, -1))
    src = places.pop(0) if kind in ("s", "rrc", "rrs", "rrcs", "cpy", "re") else None
    dst = places.pop(0) if kind in ("r", "rcs", "rrc", "rrcs", "cpy", "re") else None
    assert not places, text
    return XmlStep(kind, src, dst, count, depid, deps, "!" in words)


def file(
    collective: str, *gpus: Blocks, chunks: int = 1, scratch: int = 1, in_place: bool = False, both: bool = False,
    sizes: tuple[int, int] | None = None, copies: Sequence[tuple[int, int]] = (), protocol: str = "Simple",
    channels: int = 2, root: int = -1,
) -> XmlAlgorithm:  # fmt: skip
    """A file; ``sizes`` are the chunks of inputs and outputs, by default ``chunks``."""
    inputs, outputs = sizes or (chunks, chunks)
    made = tuple(
        XmlGpu(inputs, outputs, scratch, tuple(
            XmlBlock(send, recv, channel, tuple(map(step, steps))) for send, recv, channel, steps in blocks
        ), tuple(copies))
        for blocks in gpus
    )  # fmt: skip
    out_of_place = both or not in_place
    return XmlAlgorithm("", collective, protocol, chunks, channels, root, in_place, out_of_place, 0, 0, made)


def texts(algorithm: XmlAlgorithm, **options: int) -> list[str]:
    """The faults of a file, as ``kind: text``."""
    return [f"{fault.kind}: {fault.text}" for fault in judged(algorithm, **options)[0].faults]


def judged(algorithm: XmlAlgorithm, **options: int) -> tuple[XmlReport, Flow | None]:
    """The verdict, and that report and flow agree."""
    report, flow = judge(algorithm, **options)
    assert (flow is not None) == report.proved == (not report.faults)
    assert XmlReport.from_json(report.to_json()) == report
    return report, flow


# Two GPUs exchange their chunk and fold it.
EXCHANGE: Blocks = [(-1, 1, 0, ["rrc i0 o0"]), (1, -1, 0, ["s i0"])]
OTHER: Blocks = [(-1, 0, 0, ["rrc i0 o0"]), (0, -1, 0, ["s i0"])]


def test_a_right_file_is_proved_and_gives_its_flow() -> None:
    report, flow = judged(file("allreduce", EXCHANGE, OTHER))
    assert flow is not None
    assert report.proved
    assert (report.slots, report.slots_needed, report.blocks, report.steps, report.unused) == (2, 1, 4, 4, ())
    assert {node.where for node in flow.nodes} == {"gpu 0 tb 1 step 0", "gpu 1 tb 0 step 0", "gpu 1 tb 1 step 0",
                                                   "gpu 0 tb 0 step 0"}  # fmt: skip
    assert flow.prove() is flow


def test_in_place_the_same_file_has_a_race() -> None:
    found = texts(file("allreduce", EXCHANGE, OTHER, in_place=True))
    assert sorted(found) == [
        f"race: gpu {g} tb 1 step 0 (s) and gpu {g} tb 0 step 0 (rrc) both use i[0] of gpu {g}, one of them writes, "
        "and nothing orders them"
        for g in (0, 1)
    ]
    found = texts(file("allreduce", EXCHANGE, OTHER, both=True, in_place=True))
    assert len(found) == 2
    assert all(text.startswith("race: called in place: ") for text in found)


def test_a_dependency_orders_what_would_be_a_race() -> None:
    ordered = [[(-1, p, 0, ["rrc i0 o0 <1.0"]), (p, -1, 0, ["s i0 !"])] for p in (1, 0)]
    assert judged(file("allreduce", *ordered, both=True, in_place=True))[0].proved


def test_a_message_orders_what_would_be_a_race() -> None:
    """GPU 1 sends its chunk, gets the sum back, and writes it where the chunk was."""
    first: Blocks = [(1, 1, 0, ["rrcs i0 o0"])]
    second: Blocks = [(0, -1, 0, ["s i0"]), (-1, 0, 0, ["r o0"])]
    assert judged(file("allreduce", first, second, in_place=True))[0].proved


def test_a_nop_is_one_more_dependency() -> None:
    local: Blocks = [(-1, -1, 0, ["cpy i0 s0 !"]), (-1, -1, 0, ["cpy i1 s1 !"]),
                     (-1, -1, 0, ["nop <0.0", "cpy s0 o0 x2 <1.0"])]  # fmt: skip
    assert judged(file("allreduce", local, chunks=2, scratch=2))[0].proved
    local = [*local[:2], (-1, -1, 0, ["cpy s0 o0 x2 <1.0"])]
    (text,) = texts(file("allreduce", local, chunks=2, scratch=2))
    assert text.startswith("race: gpu 0 tb 0 step 0 (cpy) and gpu 0 tb 2 step 0 (cpy) both use s[0]")


def test_what_was_never_written_is_not_read() -> None:
    """The wrong program of the language's documents: local scratch is read for remote scratch."""
    zero: Blocks = [(1, 1, 0, ["rrcs s0 o0"])]
    one: Blocks = [(0, 0, 0, ["s i0", "r o0"])]
    assert texts(file("allreduce", zero, one)) == [
        "read: gpu 0 tb 0 step 0 (rrcs) reads s[0] of gpu 0, where nothing was written",
        "result: rank 0: chunk 0 of its output holds what was never written, read by gpu 0 tb 0 step 0; "
        "wanted rank 0's chunk 0 + rank 1's chunk 0",
        "result: rank 1: chunk 0 of its output holds what was never written, read by gpu 0 tb 0 step 0; "
        "wanted rank 0's chunk 0 + rank 1's chunk 0",
    ]


def test_wrong_results_are_named() -> None:
    assert texts(file("allreduce", [(1, -1, 0, ["s i0"])], [(-1, 0, 0, ["r o0"])])) == [
        "result: rank 0: chunk 0 of its output is never written; wanted rank 0's chunk 0 + rank 1's chunk 0",
        "result: rank 1: chunk 0 of its output is rank 0's chunk 0; wanted rank 0's chunk 0 + rank 1's chunk 0",
    ]
    twice: Blocks = [(-1, 1, 0, ["rrc i0 o0", "rrc o0 o0"]), (1, -1, 0, ["s i0"])]
    (text,) = texts(file("allreduce", twice, [(-1, 0, 0, ["rrc i0 o0"]), (0, -1, 0, ["s i0", "s i0"])]))
    assert text == (
        "result: rank 0: chunk 0 of its output holds rank 1's chunk 0 twice, folded by gpu 0 tb 0 step 1; "
        "wanted rank 0's chunk 0 + rank 1's chunk 0"
    )


def test_unused_steps_are_listed_and_not_wrong() -> None:
    more: Blocks = [*EXCHANGE, (-1, -1, 0, ["cpy i0 s0", "cpy i0 s0"])]
    assert judged(file("allreduce", more, OTHER))[0].unused == ("gpu 0 tb 2 step 0", "gpu 0 tb 2 step 1")


def test_a_copy_before_the_steps_is_out_of_place_alone() -> None:
    blocks = [[(-1, p, 0, [f"r o{p}"]), (p, -1, 0, ["s i0"])] for p in (1, 0)]
    made = file("allgather", *blocks, chunks=2, sizes=(1, 2))
    assert [text.partition(" is ")[0] for text in texts(made)] == [
        f"result: rank {r}: chunk {r} of its output" for r in (0, 1)
    ]
    gpus = [XmlGpu(1, 2, 0, gpu.blocks, ((0, r),)) for r, gpu in enumerate(made.gpus)]
    made = XmlAlgorithm("", "allgather", "LL", 2, 1, -1, True, True, 0, 0, tuple(gpus))
    assert judged(made)[0].proved


# ---------------------------------------------------------------- deadlocks


def test_a_circle_of_dependencies_is_printed() -> None:
    circle: Blocks = [(-1, -1, 0, ["cpy i0 o0 <1.0 !"]), (-1, -1, 0, ["cpy i0 s0 <0.0 !"])]
    report, _ = judged(file("allreduce", circle))
    assert report.slots_needed is None
    assert [fault.text for fault in report.faults] == [
        "steps wait for each other, whatever a connection holds: "
        "gpu 0 tb 0 step 0 (cpy) waits for gpu 0 tb 1 step 0, named in depid and deps; "
        "gpu 0 tb 1 step 0 (cpy) waits for gpu 0 tb 0 step 0, named in depid and deps"
    ]


def test_receives_before_sends_wait_for_ever() -> None:
    (text,) = texts(file("allreduce", [(1, 1, 0, ["rrc i0 o0", "s i0"])], [(0, 0, 0, ["rrc i0 o0", "s i0"])]))
    assert "whatever a connection holds" in text
    assert "gpu 0 tb 0 step 0 (rrc) waits for gpu 1 tb 0 step 1, which sends its message" in text
    assert "gpu 1 tb 0 step 1 (s) waits for gpu 1 tb 0 step 0, the step before it" in text


@pytest.mark.parametrize("depth", [2, 3, 5, 9])
def test_the_slots_that_are_enough_are_found(depth: int) -> None:
    """Both send a number of chunks before they receive any."""
    steps = [*(f"s i{c}" for c in range(depth)), *(f"rrc i{c} o{c}" for c in range(depth))]
    made = file("allreduce", [(1, 1, 0, steps)], [(0, 0, 0, steps)], chunks=depth)
    for slots in range(1, depth + 2):
        report, _ = judged(made, slots=slots)
        assert (report.slots, report.slots_needed) == (slots, depth)
        assert report.proved == (slots >= depth)
    text = judged(made, slots=1)[0].faults[0].text
    assert text.startswith(f"steps wait for each other where a connection holds 1 message; with {depth} they do not: ")
    assert "whose receipt frees a slot" in text


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_long_messages_may_need_a_slot_for_each_chunk(count: int) -> None:
    """Both send all of a message before they receive: enough slots for its chunks, or a wait for ever."""
    steps = [f"s i0 x{count}", f"rrc i0 o0 x{count}"]
    made = file("allreduce", [(1, 1, 0, steps)], [(0, 0, 0, steps)], chunks=count)
    report, flow = judged(made)
    assert flow is not None
    assert (report.slots_needed, report.slots_by_chunk) == (1, count)
    for slots in range(1, count + 1):
        assert Machine(made, flow.goal, in_place=False, slots=slots).run()
        assert Machine(by_chunk(made), flow.goal, in_place=False, slots=slots).run() == (slots == count)


def test_protocols_hold_different_numbers_of_messages() -> None:
    steps = [*(f"s i{c}" for c in range(3)), *(f"rrc i{c} o{c}" for c in range(3))]
    gpus = [(1, 1, 0, steps)], [(0, 0, 0, steps)]
    proved = {p: judged(file("allreduce", *gpus, chunks=3, protocol=p))[0].proved for p in ("Simple", "LL", "LL128")}
    assert proved == {"Simple": False, "LL": True, "LL128": True}


# ---------------------------------------------------------------- structure

STRUCTURE: list[tuple[XmlAlgorithm, str]] = [
    (file("allreduce", [*EXCHANGE, (1, -1, 0, ["s i0"])], OTHER),
     "gpu 0 tb 2: send=1 on channel 0 is also that of tb 1"),
    (file("allreduce", EXCHANGE, OTHER[:1]),
     "gpu 1 to gpu 0 on channel 0: 0 messages are sent and 1 received; the first one without the other side is "
     "gpu 0 tb 0 step 0"),
    (file("allreduce", [(1, -1, 0, ["s i0 x2"])], [(-1, 0, 0, ["r o0"])], chunks=2),
     "gpu 0 to gpu 1 on channel 0: message 0 has cnt 2 where it is sent (gpu 0 tb 0 step 0) and 1 where it is "
     "received"),
    (file("allreduce", [(2, -1, 0, ["s i0"])], []), "gpu 0 tb 0: send=2; expected another one of 2 GPUs, or -1"),
    (file("allreduce", [(0, -1, 0, ["s i0"])], []), "gpu 0 tb 0: send=0; expected another one of 2 GPUs, or -1"),
    (file("allreduce", [(-1, -1, 0, ["s i0"])], []), "gpu 0 tb 0 step 0: s in a thread block that sends to nobody"),
    (file("allreduce", [(-1, -1, 0, ["r o0"])], []),
     "gpu 0 tb 0 step 0: r in a thread block that receives from nobody"),
    (file("allreduce", [(-1, -1, 2, [])], []), "gpu 0 tb 0: channel 2; there are 2, see nchannels"),
    (file("allreduce", [(-1, -1, 0, ["cpy i0 s0 x2"])], [], chunks=2),
     "cpy dst s[0..1]; there are 1 chunks (s_chunks)"),
    (file("allreduce", [(-1, -1, 0, ["cpy i2 s0"])], [], sizes=(3, 3)),
     "cpy src i[2..2]; there are 1 chunks (in the buffer of the user, allreduce)"),
    (file("allreduce", [(-1, -1, 0, ["cpy i0 o0"])], [], sizes=(1, 0)),
     "cpy dst o[0..0]; there are 0 chunks (o_chunks)"),
    (file("allreduce", [(-1, -1, 0, ["cpy i0 s0 <1.0"])], []), "step 0: waits for tb 1 step 0, which is not there"),
    (file("allreduce", [(-1, -1, 0, ["cpy i0 s0 <0.1"])], []), "step 0: waits for tb 0 step 1, which is not there"),
    (file("allreduce", [(-1, -1, 0, ["cpy i0 s0", "cpy i0 o0 <0.0"])], []),
     "gpu 0 tb 0 step 1: waits for tb 0 step 0, which has hasdep=0"),
    (file("allreduce", [(-1, -1, 0, ["cpy i0 s0 !", "nop <0.0 !", "cpy i0 o0 <0.1"])], []),
     "gpu 0 tb 0 step 2: waits for tb 0 step 1, a nop"),
    (file("allreduce", [(-1, -1, 0, ["cpy i0 s0 !", "nop <0.0", "cpy i0 o0"])], []),
     "step 1: a nop must wait for a step"),
    (file("allreduce", [(-1, -1, 0, ["cpy i0 s0 !", "nop <0.0"])], []), "step 1: a nop must wait for a step"),
    (file("allreduce", [(-1, -1, 0, ["re i0 s0 x2", "re i0 s0"])], [], chunks=2, scratch=2),
     "gpu 0 tb 0 step 0: re into the place of the next step, of another cnt"),
    (file("allgather", [], [], chunks=3), "nchunksperloop=3 is no multiple of 2 GPUs"),
    (file("allreduce", [], [], copies=[(0, 1)]), "gpu 0: <copy i_off=0 o_off=1> with 1 and 1 chunks"),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "message"), STRUCTURE, ids=[message for _, message in STRUCTURE])
def test_structure_is_checked_first(algorithm: XmlAlgorithm, message: str) -> None:
    report, _ = judged(algorithm)
    assert {fault.kind for fault in report.faults} == {"structure"}
    assert message in report.faults[0].text
    assert report.slots_needed is None
    with pytest.raises(PlanError, match="see blinkmpi lang check"):
        flow_of(algorithm, source="x.xml")


def test_a_step_that_overlaps_itself_is_a_race() -> None:
    (text, *_) = texts(file("allreduce", [(-1, -1, 0, ["cpy i0 i1 x2"])], chunks=3))
    assert text == "race: gpu 0 tb 0 step 0 (cpy) reads and writes places that overlap, from i[1] on"


# ---------------------------------------------------------------- collectives


@pytest.mark.parametrize("root", [0, 1, 2])
def test_the_root_is_found_where_the_file_does_not_name_it(root: int) -> None:
    others = [r for r in range(3) if r != root]
    gpus: list[Blocks] = [[(root, -1, 0, ["s i0"])] if r != root else [
        (-1, others[0], 0, ["rrc i0 o0 !"]), (-1, others[1], 0, ["rrc o0 o0 <0.0"])] for r in range(3)]  # fmt: skip
    report, _ = judged(file("reduce", *gpus))
    assert (report.proved, report.root) == (True, root)
    assert judged(file("reduce", *gpus, root=root))[0].proved
    assert not judged(file("reduce", *gpus, root=(root + 1) % 3))[0].proved


def test_a_custom_collective_is_described() -> None:
    report, flow = judged(file("custom", [(1, -1, 0, ["s i0"])], [(-1, 0, 0, ["rrc i0 o0"])]))
    assert report.computes == ("rank 1: chunk 0 of its output is rank 0's chunk 0 + rank 1's chunk 0",)
    assert flow is not None
    assert flow.goal.collective == "custom"
    assert not judged(file("custom", [(1, -1, 0, ["s s0"])], [(-1, 0, 0, ["rrc i0 o0"])]))[0].proved


def test_a_flow_or_the_first_fault() -> None:
    made = export(ring_allreduce(3), name="ring")
    assert flow_of(made).goal == ring_allreduce(3).goal
    with pytest.raises(PlanError, match=r"y\.xml: rank 0: chunk 0 .* \(and 1 more fault\); see blinkmpi lang check"):
        flow_of(file("allreduce", [], []), source="y.xml")


@pytest.mark.slow
def test_a_file_of_twelve_thousand_steps_is_proved() -> None:
    made = export(ring_allreduce(16, 8), name="ring", channels=8, instances=3)
    report, flow = judged(parse_xml(write_xml(made)))
    assert (report.steps, report.proved, report.unused) == (11904, True, ())
    assert flow is not None
    assert len(flow.nodes) == 11904
