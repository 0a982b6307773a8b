"""``blinkmpi doctor``: what it prints, and its exit code."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from blinkmpi.cli import doctor as cli_doctor
from blinkmpi.doctor.examination import packages
from tests import harness
from tests.unit.cli.test_cli import blink as blink


def test_the_command_prints_and_its_exit_code_says(blink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = blink("doctor --json --no-self-test")
    body = json.loads(out)
    assert (body["format"], body["version"], body["ranks"]) == ("blinkmpi.doctor", 1, 1)
    assert code == int(any(line["state"] == "fail" for line in body["lines"]))
    monkeypatch.setenv("BLINKMPI_TIMEOUT", "soon")
    code, out, _ = blink("doctor --no-self-test")
    assert code == 1
    assert "FAIL" in out
    assert "-> correct the variable" in out
    assert "a job would not run well here (1 failed" in out


def test_without_mpi_the_command_says_so(blink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_doctor, "mpi_module", lambda: (None, "cannot load MPI library"))
    code, out, _ = blink("doctor")
    assert code == 1
    assert "none found: cannot load MPI library" in out


@pytest.mark.mpi_skip
def test_under_mpirun_all_ranks_look_and_one_prints() -> None:
    done = harness.run_command(3, [sys.executable, "-m", "blinkmpi", "doctor", "--json"], timeout=60,
                               env={"BLINKMPI_NODE_ID": "here", "PYTHONUNBUFFERED": None})  # fmt: skip
    body = json.loads(done.output[done.output.index("{") : done.output.rindex("}") + 1])
    assert body["ranks"] == 3
    lines = {line["check"]: line for line in body["lines"]}
    assert "3 ranks, started by Open MPI's mpirun" in lines["start"]["evidence"]
    assert done.rc == int(any(line["state"] == "fail" for line in body["lines"]))
    assert packages()["blinkmpi"] in lines["versions"]["evidence"]
