"""Trainings, decoding and the campaign, with the door and without: what is compared, and what counts as wrong."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.nccl_clients import ahead, campaign, training, ways
from tests.nccl_clients.campaign import FAULTS, HARMLESS, Ended, problems
from tests.nccl_clients.ways import DOOR, PLAIN, Ran

SECONDS = 200.0
NONE = {"ours": 0, "nccls": 0, "why": {"so": 1}}


def trained(
    monkeypatch: pytest.MonkeyPatch, door: Mapping[str, Any], ours: int = 5
) -> tuple[dict[str, Any], list[str]]:
    """Compare a program whose runs with the door print something else."""

    def run(by: str, argv: Sequence[str], seconds: float, variables: Mapping[str, str]) -> Ran:
        found = {"values": [1.5, 1.25], "step_ms": 2.0, "device": True, **(door if by == DOOR else {})}
        counts = {**NONE, "ours": ours if by == DOOR else 0}
        return Ran(found.get("wrong", ""), f"[rank0]: RESULT {json.dumps(found)}\n", 1.0, counts)

    monkeypatch.setattr(ways, "run", run)
    return training.compared("decode", 2, 10, SECONDS)


def test_a_program_that_is_the_same_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    row, failed = trained(monkeypatch, {"step_ms": 1.6})
    assert failed == []
    assert (row["equal"], row["ratio"], row["slower"], row["counts"]["ours"]) == (True, 1.25, False, 5)


def test_a_slower_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    row, failed = trained(monkeypatch, {"step_ms": 2.1})
    assert (failed, row["ratio"], row["slower"]) == ([], 0.952, True)
    assert "SLOWER" in training.line(row)


def test_other_values_no_calls_and_errors_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trained(monkeypatch, {"values": [1.5, 1.2500001]})[1] == ["decode: values differ"]
    assert trained(monkeypatch, {}, ours=0)[1] == ["decode: no call was ours: {'so': 1}"]
    assert trained(monkeypatch, {"wrong": "exit status 1"})[1] == ["decode, door: exit status 1"] * training.TURNS


def test_values_of_more_ranks_are_alike_up_to_rounding() -> None:
    assert training.alike([[1.0, 0.5], [1.0, 0.5000001]], 4)
    assert not training.alike([[1.0, 0.5], [1.0, 0.5000001]], 2)
    assert not training.alike([[1.0, 0.5], [1.0]], 4)
    assert not training.alike([[], []], 2)
    assert training.result("no line") is None


@pytest.mark.long
@pytest.mark.parametrize("name", training.NAMES)
def test_a_program_runs_without_gpus(name: str) -> None:
    """Over gloo, to the same values twice."""
    pytest.importorskip(training.NAMES[name])
    found = [training.once(name, by, 2, 4, SECONDS) for by in (PLAIN, DOOR)]
    assert [wrong for _, wrong in found] == [[], []]
    assert training.alike([one["values"] for one, _ in found], 2)
    assert not any(math.isnan(one["step_ms"]) for one, _ in found)


def ended(*statuses: int | None, wrong: Sequence[str] = (), done: bool = True) -> Ended:
    """A job whose ranks all wrote the same."""
    return Ended(list(statuses), [{"calls": 3, "wrong": wrong, "done": done}] * len(statuses), "its output", NONE)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_job_of_the_campaign_may_not_do(fault: str) -> None:
    """None may hang or compute wrongly; where the fault is harmless, all must come to their end."""
    assert problems(fault, ended(0, 0)) == []
    assert problems(fault, ended(0, None)) == ["rank 1 hung"]
    assert problems(fault, ended(0, 0, wrong=["so"])) == ["rank 0: so", "rank 1: so"]
    died = problems(fault, ended(-9, 0)), problems(fault, ended(0, 0, done=False))
    assert all(died) if fault in HARMLESS else not any(died)


def test_what_plain_nccl_does_as_well_is_not_the_doors(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {DOOR: ended(0, None), PLAIN: ended(0, None)}
    monkeypatch.setattr(campaign, "run", lambda by, *_: ends[by])
    monkeypatch.setattr(campaign, "FAULTS", ("kill",))
    monkeypatch.setattr(campaign.time, "monotonic", iter(range(1000)).__next__)
    row, failed = campaign.campaign(1, 2, 5.0, 1)
    assert row["jobs"] == len(row["bad"]) == row["by both"] > 0
    assert failed == []
    ends[PLAIN] = ended(0, 1)
    row, failed = campaign.campaign(1, 2, 5.0, 1)
    assert row["by both"] == 0
    assert failed
    assert all(text.startswith("kill, seed ") and text.endswith(": rank 1 hung") for text in failed)


@pytest.mark.long
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "absent"])
def test_a_job_of_the_campaign_runs_without_gpus(fault: str) -> None:
    """Over gloo, whatever seed it has."""
    pytest.importorskip("torch")
    job = campaign.run(PLAIN, fault, 7, 2, SECONDS)
    assert problems(fault, job) == [], job.output


def test_counts_of_processes_are_added_up(tmp_path: Path) -> None:
    kind = {"call": "AllReduce", "ours": 3, "nccls": 1, "whose": "ours", "why": ""}
    comm = {"ours": 3, "nccls": 4, "why": "", "kinds": [kind]}
    other = {"ours": 0, "nccls": 0, "why": "no table", "kinds": []}
    for pid, found in enumerate(({"why": "", "communicators": [comm, comm]}, {"why": "", "communicators": [other]})):
        (tmp_path / f"{pid}.json").write_text(json.dumps(found))
    assert ways.counts(ways.statuses(tmp_path)) == {
        "processes": 2, "ours": 6, "nccls": 8, "calls": {"AllReduce": {"ours": 6, "nccls": 2}}, "kinds": {"ours": 2},
        "why": {"no table": 1},
    }  # fmt: skip


@pytest.mark.slow
def test_the_doors_kernels_are_known_ahead() -> None:
    """Few kernels of many kinds: of packets alone."""
    assert {name for _, name in ahead.sources(2)} == {"packets"}
    assert len({kind[:3] for kind in ahead.kinds(2)}) > len(ahead.sources(2)) > 20
