"""The example in the README is run as users run it."""

import sys

import pytest

from tests.harness import ROOT, run_command


@pytest.mark.mpi_skip
@pytest.mark.parametrize("n", [1, 3])
def test_train(n: int) -> None:
    argv = [sys.executable, "examples/train.py", "--epochs", "12", "--hidden", "256", "64"]
    outcome = run_command(n, argv, timeout=60, env={"PYTHONPATH": str(ROOT)}, cwd=ROOT)
    assert outcome.rc == 0, outcome.output
    assert f"bit-identical on {n} ranks" in outcome.output
    assert "epoch 12 of 12" in outcome.output
    assert outcome.output.count("machine  ") == 1, "rank 0 alone reports"


@pytest.mark.mpi_skip
def test_an_untrained_network_is_a_failure() -> None:
    argv = [sys.executable, "examples/train.py", "--epochs", "0", "--hidden", "16"]
    outcome = run_command(2, argv, timeout=60, env={"PYTHONPATH": str(ROOT)}, cwd=ROOT)
    assert outcome.rc != 0
    assert "FAILED" in outcome.output
    assert not outcome.timed_out
