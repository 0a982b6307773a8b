"""MSCCL++'s execution plans: right ones are proved, spoilt ones are refused with what is wrong, and a machine agrees.

``BLINKMPI_MSCCLPP_PLANS=mscclpp/test/execution-files`` judges real files, too, which are not part of this repository.
"""

import copy
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blinkmpi.cli.main import main
from blinkmpi.errors import FormatError
from blinkmpi.lang.flow import goal_of
from blinkmpi.lang.mscclpp.check import MscclppReport, judge_mscclpp
from blinkmpi.lang.mscclpp.file import load_mscclpp, read_mscclpp
from tests.unit.lang_mscclpp.machine import ELEMENTS, Stuck, run
from tests.unit.lang_mscclpp.plans import (
    NOP,
    Json,
    all_pairs,
    by_packets,
    by_ports,
    far,
    in_turns,
    local,
    made,
    op,
    plan_of,
    sync,
)

FOLDER = os.environ.get("BLINKMPI_MSCCLPP_PLANS", "")
FILES = sorted(Path(FOLDER).rglob("*.json")) if FOLDER else []
RIGHT = {
    "all_pairs-2": all_pairs(2), "all_pairs-4": all_pairs(4, 2), "packets-2": by_packets(2), "packets-4": by_packets(4),
    "ports": by_ports(4), "turns": in_turns(),
}  # fmt: skip


def judged(plan: Json) -> MscclppReport:
    return judge_mscclpp(made(plan))


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_plan_is_proved(name: str) -> None:
    report = judged(RIGHT[name])
    assert report.faults == ()
    assert (report.proved, report.unused, report.warnings) == (True, (), ())


def ops_of(plan: Json, gpu: int = 0, block: int = 0) -> list[Json]:
    found: list[Json] = plan["gpus"][gpu]["threadblocks"][block]["ops"]
    return found


def without(number: int, gpu: int = 0, block: int = 0) -> Callable[[Json], Any]:
    return lambda plan: ops_of(plan, gpu, block).pop(number)


def with_value(value: Any, *path: Any, gpu: int = 0, block: int = 0) -> Callable[[Json], Any]:
    def change(plan: Json) -> None:
        at: Any = ops_of(plan, gpu, block)
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value

    return change


SPOILT: list[tuple[str, Callable[[Json], Any], str, str]] = [
    ("all_pairs-2", without(5), "signal", "1 signals and 2 waits on memory channel 0 from gpu 0 to gpu 1: a wait"),
    ("all_pairs-2", without(5), "deadlock", "gpu 1 tb 0 op 6 (wait) waits for signal 2 on memory channel 0 from gpu 0"),
    ("all_pairs-2", without(6), "signal", "2 signals and 1 waits on memory channel 0 from gpu 1 to gpu 0: what is"),
    ("packets-2", with_value(local("i", 1), 1, "src_buff", 0), "result",
     "rank 0: chunk 0 of its output is rank 0's chunk 1 + rank 1's chunk 0; wanted rank 0's chunk 0"),
    ("all_pairs-2", with_value(far(0, 1), 3, "src_buff", 1), "race", "gpu 0 tb 0 op 3 (rres)"),
    ("all_pairs-2", with_value(far(0, 7), 3, "src_buff", 1), "structure", "i[7:8] of gpu 1; it has 2 chunks"),
    ("all_pairs-2", with_value([3], 0, "channel_ids"), "structure", "memory channel 3; the thread block has 1"),
    ("all_pairs-2", with_value("glre", 3, "name"), "structure", "and its executor does not read it"),
    ("all_pairs-2", with_value("rrx", 3, "name"), "structure", "expected one of barrier, copy, cpkt"),
    ("packets-2", without(0), "deadlock", "gpu 1 tb 0 op 1 (respkt) waits for a packet in scratch[0] of gpu 1"),
    ("packets-4", with_value(far(0, 3), 0, "dst_buff", 0), "race", "both put packets into packets of s[3] of gpu 1"),
    ("packets-2", with_value(local("i", 0), 2, "src_buff", 0), "structure", "packets in buffer 'i'; expected s"),
    ("ports", with_value([1, 0, 2], 3, "channel_ids"), "structure", "a channel to gpu 2, and a buffer of gpu 1"),
    ("ports", without(6), "signal", "2 signals and 1 waits on port channel 0 from gpu 1 to gpu 0"),
    ("ports", with_value("put", 3, "name"), "signal", "1 signals and 2 waits on port channel 0 from gpu 0 to gpu 1"),
    ("turns", without(1, block=1), "race", "gpu 1 tb 0 op 3 (put) and gpu 0 tb 1 op 1 (copy) both use s[0] of gpu 0"),
    ("turns", without(4), "race", "gpu 0 tb 0 op 3 (put) and gpu 1 tb 1 op 2 (copy) both use s[0] of gpu 1"),
    ("turns", with_value("rlxwait", 6, "name"), "race", "gpu 1 tb 0 op 3 (put) and gpu 0 tb 1 op 2 (copy)"),
    ("turns", without(10), "structure", "barrier 0 is for 2 thread blocks, and 1 come to it: [1]"),
    ("turns", without(8), "signal", "0 releases and 1 acquires of semaphore 0 of gpu 0: a wait never ends"),
    ("turns", with_value([1], 8, "semaphore_ids"), "structure", "semaphore 1; the GPU has 1"),
    ("turns", with_value(local("o", 0), 2, "dst_buff", 0, block=1), "race", "both use o[0] of gpu 0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spoil", "kind", "text"), SPOILT)
def test_what_is_wrong_is_named(name: str, spoil: Callable[[Json], Any], kind: str, text: str) -> None:
    plan = copy.deepcopy(RIGHT[name])
    spoil(plan)
    report = judged(plan)
    assert not report.proved
    assert any(text in fault.text for fault in report.faults if fault.kind == kind), [*report.faults]


def test_a_wait_orders_the_thread_that_waits_alone_until_all_meet() -> None:
    """Puts to a peer's output, which copies it on; without a nop between wait and copy, other threads read early."""

    def plan(*between: Json) -> Json:
        first = [sync("signal", [0]), sync("wait", [0]), NOP, op("put", [local("i", 0)], [far(0, 0)]), NOP]
        own = [*first, sync("signal", [0]), sync("wait", [0]), *between]
        own += [op("copy", [local("s", 0)], [local("o", 0)], "none")]
        return plan_of("exchange", [[own], [own]], (1, 1, 1), buffer="s", inplace=False)

    assert judged(plan(NOP)).proved
    assert judged(plan(NOP)).computes == (
        "rank 0: chunk 0 of its output is rank 1's chunk 0", "rank 1: chunk 0 of its output is rank 0's chunk 0",
    )  # fmt: skip
    report = judged(plan())
    assert [fault.kind for fault in report.faults] == ["race", "race"]


def test_signals_of_several_thread_blocks_are_seen_when_all_have_come() -> None:
    """Two thread blocks put and signal on one channel: the second wait has seen both, the first neither."""

    def plan(copies: list[int]) -> Json:
        begin = [sync("rlxsignal", [0]), sync("rlxwait", [0]), NOP]
        puts = [[*begin, op("put", [local("i", b)], [far(0, b)]), NOP, sync("signal", [1])] for b in range(2)]
        takes = [sync("wait", [1])]
        for turn, chunk in enumerate(copies):
            takes += [*([sync("wait", [1])] if turn == len(copies) - 1 else []), NOP]
            takes.append(op("copy", [local("s", chunk)], [local("o", chunk)], "none"))
        idle = [sync("rlxsignal", [0]), sync("rlxwait", [0])]
        made_plan = plan_of("send", [[puts[0], puts[1]], [idle, [*idle, *takes]]], (2, 2, 2), buffer="s", inplace=False)
        for gpu in made_plan["gpus"]:
            gpu["channels"][0]["connected_to"] = [1 - gpu["id"]] * 3
            for b, block in enumerate(gpu["threadblocks"]):
                block["channels"][0]["channel_ids"] = [b, 2]
        return made_plan

    both = plan([0, 1])
    del ops_of(both, 1, 1)[3:5]  # the first copy goes, so both waits are before what is left
    assert not judged(plan([0, 1])).proved
    assert {fault.kind for fault in judged(plan([0, 1])).faults} == {"race"}
    assert judged(both).proved


def test_a_share_of_an_operation_is_a_thread_blocks_own() -> None:
    """Two thread blocks copy a chunk in halves; each then reads its half only, or a whole that is half the other's."""

    def plan(second: Json) -> Json:
        ops = [[{**op("copy", [local("i", 0)], [local("s", 0)], "none"), "tbg_info": {"tb_id": b, "tbg_size": 2}}, NOP,
                {**op("copy", [local("s", 0)], [local("o", 0)], "none"), "tbg_info": {"tb_id": b, "tbg_size": 2}}]
               for b in range(2)]  # fmt: skip
        ops[1][2] |= second
        return plan_of("own", [ops], (1, 1, 1), inplace=False)

    assert judged(plan({})).proved
    assert judged(plan({})).pieces == 2
    spoilt = judged(plan({"tbg_info": {"tb_id": 0, "tbg_size": 2}}))
    assert {fault.kind for fault in spoilt.faults} == {"race"}


def test_buffers_of_a_gpu_that_may_not_have_begun_are_to_look_at() -> None:
    plan = all_pairs(2)
    for gpu in range(2):
        del ops_of(plan, gpu)[:3]
    report = judged(plan)
    assert report.proved
    assert report.warnings[0] == ("gpu 0 tb 0 op 0 (rres) uses i of gpu 1 before anything says that this GPU has begun")


def test_operations_that_reach_no_output_are_listed() -> None:
    plan = all_pairs(2)
    plan["gpus"][0]["scratch_chunks"] = 1
    ops_of(plan).insert(0, op("copy", [local("i", 0)], [local("s", 0)], "none"))
    ops_of(plan).insert(1, NOP)
    report = judged(plan)
    assert (report.proved, report.unused) == (True, ("gpu 0 tb 0 op 0 (copy)",))


def right_everywhere(plan: Json, rng: random.Random) -> bool:
    """Whether one run on the machine leaves what the collective wants in all outputs."""
    n, size = len(plan["gpus"]), plan["gpus"][0]["input_chunks"] * ELEMENTS
    collective = plan["collective"]
    goal = goal_of(collective, n, size if collective == "allreduce" else size // n)
    memory = run(plan, rng)
    buffer = "i" if plan["inplace"] else "o"
    return all(memory[g].get((buffer, e)) == Counter(want) for g in range(n) for e, want in enumerate(goal.wanted[g]))


@pytest.mark.parametrize("name", ["all_pairs-2", "packets-2", "packets-4", "turns"])
def test_what_is_proved_is_right_on_a_machine_in_any_order(name: str) -> None:
    """Plans spoilt by chance: those that are proved end, with the right result; of the others some do not."""
    rng, verdicts = random.Random(name), Counter[tuple[bool, bool]]()
    for turn in range(40):
        plan = copy.deepcopy(RIGHT[name])
        for _ in range(0 if turn == 0 else 1):
            ops = ops_of(plan, rng.randrange(len(plan["gpus"])), rng.randrange(len(plan["gpus"][0]["threadblocks"])))
            at = rng.randrange(len(ops))
            change = rng.randrange(3)
            if change == 0:
                ops.pop(at)
            elif change == 1:
                ops.insert(rng.randrange(len(ops) + 1), ops.pop(at))
            else:
                buffers = [b for one in ops for side in ("src_buff", "dst_buff") for b in one.get(side, ())]
                spoilt = rng.choice(buffers)
                spoilt["index"] = rng.randrange(spoilt["index"] + 2)
        report = judged(plan)
        if any(fault.kind == "structure" for fault in report.faults):
            continue
        try:
            right = all(right_everywhere(plan, rng) for _ in range(4))
        except Stuck:
            right = False
        verdicts[report.proved, right] += 1
        assert right or not report.proved, plan
    assert verdicts[True, True] >= 1
    assert verdicts[False, False] >= 10


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(all_pairs(2)))
    assert main(["lang", "check", str(path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        "collective allreduce of 2 ranks, in place", "size 2 chunks, 2 thread blocks, 14 operations, protocol Simple",
        "structure sound", "signals as many as waits", "order all end", "races none",
        "reads only what was written before", "results as allreduce wants them", "unused no operation", "proved",
    ]  # fmt: skip
    spoilt = all_pairs(2)
    ops_of(spoilt).pop(5)
    path.write_text(json.dumps(spoilt))
    assert main(["lang", "check", str(path)]) == 1
    assert "refused: 2 faults" in capsys.readouterr().out
    assert main(["lang", "check", str(path), "--json"]) == 1
    assert [fault["kind"] for fault in json.loads(capsys.readouterr().out)["faults"]] == ["signal", "deadlock"]
    assert main(["lang", "check", str(path), "--ranks", "3"]) == 2
    assert "is for 2 ranks; leave --ranks out" in capsys.readouterr().err
    path.write_text('{"gpus": [{"id": "x"}]}')
    assert main(["lang", "check", str(path)]) == 2
    assert "no execution plan of MSCCL++" in capsys.readouterr().err


def test_what_is_no_plan_is_a_format_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no execution plan of MSCCL"):
        read_mscclpp("[", source="x")
    with pytest.raises(FormatError, match="cannot read"):
        load_mscclpp(tmp_path / "none.json")


@pytest.mark.skipif(not FILES, reason="BLINKMPI_MSCCLPP_PLANS names no folder with MSCCL++'s execution plans")
@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(path.parts[-2:]))
def test_a_real_file_is_proved(path: Path) -> None:
    report = judge_mscclpp(load_mscclpp(path))
    assert [fault.text for fault in report.faults] == []
