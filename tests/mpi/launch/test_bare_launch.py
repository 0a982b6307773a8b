"""What a launch alone takes, by a driver that launches nothing."""

from types import SimpleNamespace

import pytest
from mpi4py import MPI

import blinkmpi
from benchmarks.fake.gpu import fake_gpus
from benchmarks.launch.bare import LAUNCHES, REPEATS, WORDS, bare_launch_us
from blinkmpi.errors import DeviceError
from tests.harness import mpi

STREAM = SimpleNamespace(ptr=5, synchronize=lambda: None)
INVALID_HANDLE = 400  # of CUDA's errors


@mpi(ranks=(2,), timeout=60)
def test_a_launch_alone(comm: MPI.Intracomm) -> None:
    with fake_gpus() as driver, blinkmpi.Communicator(comm) as ours:
        driver["words"], before = WORDS, driver["launches"]
        found = bare_launch_us(ours, STREAM)
        assert len({*comm.allgather(found)}) == 1
        assert 0 < found < 1e4
        assert driver["launches"] == before + (1 + REPEATS) * LAUNCHES
        _, grid, _, stream, words = driver.last()
        assert (grid, stream, words) == (1, STREAM.ptr, [0] * WORDS)


@mpi(ranks=(2,), timeout=60)
def test_a_launch_that_is_refused(comm: MPI.Intracomm) -> None:
    with fake_gpus() as driver, blinkmpi.Communicator(comm) as ours:
        driver["error"] = INVALID_HANDLE
        with pytest.raises(DeviceError, match=f"CUDA error {INVALID_HANDLE}"):
            bare_launch_us(ours, STREAM)
        driver["error"] = 0
