"""The example in the README is run as users run it."""

import re
import sys

import pytest

from tests.harness import ROOT, Job, run_command
from tests.mpi.faults import fault_tolerance, finish


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


def elastic(*lose: str, n: int = 4) -> tuple[str, float]:
    """The output of the example that loses ranks, and its accuracy in percent."""
    argv = [sys.executable, "examples/train_elastic.py", "--epochs", "6", "--lose", *lose]
    with Job(n, argv, timeout=90, env={"PYTHONPATH": str(ROOT)}, cwd=ROOT, options=fault_tolerance()) as job:
        outcome = finish(job)
    assert outcome.rc == 0, outcome.output
    found = re.search(r"accuracy +([\d.]+)%", outcome.output)
    assert found, outcome.output
    return outcome.output, float(found[1])


@pytest.mark.mpi_skip
def test_training_that_loses_ranks_is_as_good_as_one_that_does_not() -> None:
    _, whole = elastic()
    output, left = elastic("0:20", "2:35")
    assert "rank 0 of 4 is lost at step 20: 3 go on" in output
    assert "rank 1 of 3 is lost at step 35: 2 go on" in output  # by its number among those that were left
    assert "bit-identical on 2 ranks" in output
    assert abs(whole - left) < 1, (whole, left)  # sums of other ranks are rounded otherwise


@pytest.mark.mpi_skip
def test_training_that_replaces_a_lost_rank_ends_with_all() -> None:
    output, accuracy = elastic("1:20", "--replace", n=3)
    assert "rank 1 of 3 is lost at step 20: 2 go on" in output
    assert "3 ranks are there again at step 20" in output
    assert "bit-identical on 3 ranks" in output
    assert accuracy > 95
