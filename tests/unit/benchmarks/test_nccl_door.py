"""The benchmark of unchanged programs: its cases know what is right, and a row of ours has NCCL's times beside it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.nccl_door import COLLECTIVES, DTYPES, alike, joined
from tests.harness import ENVIRONMENT, ROOT

HERE = Path(__file__).parent


@pytest.mark.slow
def test_each_case_expects_what_its_collective_gives() -> None:
    pytest.importorskip("torch")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, str(HERE / "nccl_door_program.py")], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"checked {3 * len(COLLECTIVES) * len(DTYPES)} wrong 0\n") == 2


def test_a_row_has_nccls_times_beside_it() -> None:
    key = {"collective": "reduce", "dtype": "float32", "bytes": 1024}
    times = {"host_us": 1.0, "device_us": 2.0, "graph_us": 3.0}
    other = {**key, "bytes": 4096, "host_us": 9.0, "device_us": 9.0, "graph_us": 9.0}
    plain, ours = {"rows": [other, {**key, **times}]}, {**key, "host_us": 0.5, "device_us": 1.5, "graph_us": 2.5}
    assert joined(plain, {"rows": [ours]}) == [{**ours, "nccl": times}]
    assert joined({}, {"rows": [ours]}) == [{**ours, "nccl": {}}]


def test_losses_of_two_ranks_have_the_same_bits_and_those_of_more_nearly() -> None:
    assert alike([1.0, 0.5], [1.0, 0.5], 2)
    assert not alike([1.0, 0.5], [1.0, 0.5000001], 2)
    assert alike([1.0, 0.5], [1.0, 0.5000001], 4)
    assert not alike([1.0, 0.5], [1.0, 0.6], 4)
    assert not alike([], [], 2)
    assert not alike([1.0], [1.0, 1.0], 2)
