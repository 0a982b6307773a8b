"""The examples with PyTorch, started both ways: the weights are equal and the network has learnt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, run_command
from tests.torch.test_backend import needs

pytest.importorskip("torch")
FSDP2 = needs("torch.distributed.fsdp", "fully_shard")
SETTINGS = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("example", ["train_torch.py", pytest.param("train_fsdp.py", marks=(FSDP2, pytest.mark.long))])
def test_under_mpirun(example: str) -> None:
    outcome = run_command(2, [sys.executable, f"examples/{example}"], timeout=120, env=SETTINGS, cwd=ROOT)
    assert outcome.rc == 0, outcome.output
    assert "passed" in outcome.output


@pytest.mark.parametrize("example", [
    pytest.param("train_torch.py", marks=pytest.mark.long),
    pytest.param("train_fsdp.py", marks=(FSDP2, pytest.mark.long)),
])  # fmt: skip
def test_under_torchrun(example: str) -> None:
    command = [str(Path(sys.prefix, "bin", "torchrun")), "--nproc-per-node", "2", f"examples/{example}"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **SETTINGS}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("when", ["early", "late"])
def test_torchrun_starts_a_job_again(when: str) -> None:
    """With the store of the first start, and what that has left there."""
    run = [str(Path(sys.prefix, "bin", "torchrun")), "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [*run, "tests/torch/restarted.py", "blink", when], cwd=ROOT, env={**os.environ, **SETTINGS},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("came back") == 2
