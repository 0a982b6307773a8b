"""The machine of a job on real GPUs: those that the process may see, in their order, and what doctor says of them."""

import json
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.planning.plan import Plan
from blinkmpi.topology.probe import probe_all
from tests.gpu.helpers import DEVICES, GPUS, at_least, sizes
from tests.harness import Job, run_ranks

pytestmark = [pytest.mark.gpu, at_least(1)]

VISIBLE = {
    1: ("0",),
    2: ("1", "1,0"),
    3: ("2,0,1",),
    4: ("3", "3,1", "2,0,3", "1,3,0,2"),
    8: ("5", "7,2", "4,6,1", "7,5,3,1,0"),
}


def devices(comm: MPI.Intracomm, uuids: list[str]) -> None:
    """Every rank has the GPU that the variable names at its place."""
    with blinkmpi.Communicator(comm) as ours:
        assert ours.gpu is not None, ours.context.why_no_gpus
        assert [device.uuid for device in ours.machine.devices] == uuids


@pytest.mark.parametrize("visible", [v for n, some in VISIBLE.items() if n <= DEVICES for v in some] or ["0"])
def test_visible_devices_are_joined_by_uuid(visible: str) -> None:
    numbers = [int(text) for text in visible.split(",")]
    every = [facts.uuid for facts in probe_all()]
    args = ([every[i] for i in numbers],)
    report = run_ranks(len(numbers), devices, 60, env={"CUDA_VISIBLE_DEVICES": visible}, args=args)
    assert report.problem is None, report.problem


def doctor(n: int, env: dict[str, str]) -> tuple[int, dict[str, dict[str, str]]]:
    """What ``mpirun -np n blinkmpi doctor`` says, by check, and its exit status."""
    argv = [sys.executable, "-m", "blinkmpi", "doctor", "--json", "--no-self-test"]
    with Job(n, argv, timeout=90, env=env) as job:
        outcome = job.wait()
    found = json.loads(outcome.output[outcome.output.index("{") : outcome.output.rindex("}") + 1])
    return outcome.rc, {line["check"]: line for line in found["lines"]}


@pytest.mark.skipif(GPUS > DEVICES, reason="BLINKMPI_RANKS_PER_GPU lets ranks share GPUs")
@at_least(2)
def test_doctor_finds_a_healthy_job_and_wrong_ones() -> None:
    n = sizes(2, 3, 4, 8)[-1]
    code, lines = doctor(n, {})
    assert code == 0
    assert lines["GPUs"]["evidence"].startswith(f"{n} x ")
    assert {lines[check]["state"] for check in ("GPUs", "binding", "peers", "CUDA", "MPI")} == {"ok"}
    code, lines = doctor(n, {"CUDA_VISIBLE_DEVICES": "0"})
    assert code != 0
    assert lines["binding"]["state"] == "fail"
    assert lines["binding"]["remedy"]
    code, lines = doctor(n, {"BLINKMPI_DEBG": "INFO"})
    assert "did you mean BLINKMPI_DEBUG" in lines["settings"]["evidence"]


@at_least(2)
def test_explain_and_plan_say_what_a_job_takes(tmp_path: Path) -> None:
    n = sizes(2, 4)[-1]

    def said(*words: str, algo: str = "") -> str:
        argv = [sys.executable, "-m", "blinkmpi", *words]
        with Job(n, argv, timeout=90, env={"BLINKMPI_ALGO": algo}) as job:
            outcome = job.wait()
        assert outcome.rc == 0, outcome.output
        return outcome.output

    for protocol in ("ll16_one_shot", "direct"):
        text = said("explain", "--bytes", "64K", algo=f"allreduce:onehop/{protocol}")
        assert f"protocol    {protocol}" in text
        assert "this job    CUDA kernels on" in text
    assert "buffers that are not registered: " in said("explain", "--bytes", "16M")
    said("plan", "-o", str(tmp_path / "plan.json"))
    protocols = {rule.protocol for rule in Plan.from_json((tmp_path / "plan.json").read_text(), source="plan").rules}
    assert {"slots", "direct", "ll16_one_shot"} <= protocols
