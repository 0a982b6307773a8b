"""What a job leaves in /dev/shm is found, and what other jobs do there at the same time is not held against it."""

import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import Job, SharedMemoryWatch
from tests.harness.shared_memory import SHM

pytestmark = pytest.mark.mpi_skip  # starts an mpirun of its own

# Keeps a file open; makes and removes others meanwhile; the last one stays behind.
FOREIGN = """
import os, sys, time
base, held = sys.argv[1], open(sys.argv[1], "w")
while not os.path.exists(base + ".end"):
    short = open(base + ".short", "w")
    time.sleep(0.03)
    os.remove(base + ".short")
    time.sleep(0.03)
open(base + ".left", "w")
"""
MAPS = """
import mmap, os, sys, time
with open(f"{sys.argv[1]}.{os.getpid()}", "wb+") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
time.sleep(0.3)
"""


@pytest.fixture
def base() -> Iterator[Path]:
    """A name as Open MPI gives to its files; all that begin with it are removed in the end."""
    path = SHM / f"sm_segment.host.0.{secrets.token_hex(4)}"
    yield path
    for file in SHM.glob(f"{path.name}*"):
        file.unlink(missing_ok=True)


def test_only_what_the_processes_of_a_test_leave_is_found(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        SharedMemoryWatch() as watch,
        subprocess.Popen([sys.executable, "-c", FOREIGN, str(base)]) as foreign,
    ):
        for name, value in watch.environment.items():
            monkeypatch.setenv(name, value)
        with Job(2, [sys.executable, "-c", MAPS, f"{base}.ours"], timeout=20) as job:
            assert job.wait().rc == 0
        assert base.exists()
        Path(f"{base}.end").touch()
        assert foreign.wait(10) == 0
        assert Path(f"{base}.left").exists()
        left = watch.left()
        assert len(left) == 2
        assert all(name.startswith(f"{base.name}.ours.") for name in left)


def test_what_is_removed_in_time_is_not_left(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SharedMemoryWatch() as watch:
        for name, value in watch.environment.items():
            monkeypatch.setenv(name, value)
        program = f"{MAPS}os.remove(file.name)"
        with Job(2, [sys.executable, "-c", program, f"{base}.ours"], timeout=20) as job:
            assert job.wait().rc == 0
        assert watch.left() == []
