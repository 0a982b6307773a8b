"""Open MPI's file of shared memory goes with a process that no launcher cleans up after, and no other file does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from blinkmpi.util.launcher import RANK_VARIABLES, library_name
from blinkmpi.util.singleton import mapped_segments
from tests.harness import ENVIRONMENT, ROOT, SharedMemoryWatch

SHM = Path("/dev/shm")

# A rank that some launcher seems to have started keeps its file: the launcher removes it.
PROGRAM = """
import atexit, os, sys
from mpi4py import MPI
if "-launched" in sys.argv:
    os.environ["PMI_RANK"] = "0"
import blinkmpi
maps = [line.split()[-1] for line in open("/proc/self/maps") if "/dev/shm/sm_segment." in line]
comm = blinkmpi.Communicator(MPI.COMM_WORLD)
assert comm.allreduce(1) == 1
if "-fork" in sys.argv:
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()  # sys.exit would go on to MPI_Finalize
        os._exit(0)
    os.waitpid(child, 0)
    assert all(map(os.path.exists, maps))
print(*maps)
"""


def singleton(*words: str) -> tuple[list[str], list[str]]:
    """Run a process without a launcher; the segments that it had, and what it has left in /dev/shm."""
    env = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
    with SharedMemoryWatch() as watch:
        env |= {**ENVIRONMENT, **watch.environment, "PYTHONPATH": str(ROOT)}
        argv = [sys.executable, "-c", PROGRAM, *words]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert not done.stderr
        return done.stdout.split(), watch.left()


@pytest.mark.mpi_skip
@pytest.mark.parametrize("words", [(), ("-fork",)])
def test_a_singleton_leaves_nothing(words: tuple[str, ...]) -> None:
    segments, left = singleton(*words)
    assert not [path for path in segments if Path(path).exists()]
    assert not left


@pytest.mark.mpi_skip
def test_a_launched_process_leaves_its_file_to_the_launcher() -> None:
    segments, _ = singleton("-launched")
    for path in segments:  # none with another MPI
        Path(path).unlink()


@pytest.fixture(params=["sm_segment.test.{}", "mpich_shm_test_{}"])
def segment(request: pytest.FixtureRequest) -> Path:
    return SHM / request.param.format(os.getpid())


def line(path: Path, facts: os.stat_result) -> str:
    device = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}"
    return f"7fde94b4f000-7fde95b4f000 rw-s 00000000 {device} {facts.st_ino}                      {path}"


def test_only_the_file_that_is_mapped_is_ours(segment: Path) -> None:
    try:
        segment.write_bytes(b"x")
        facts = segment.stat()
        assert mapped_segments([line(segment, facts)]) == [segment]
        other = SHM / "another"
        assert mapped_segments([line(other, facts), line(segment, facts) + " (deleted)", "", "7f-8f r-- 0"]) == []
        kept = segment.rename(segment.with_suffix(".old"))
        segment.write_bytes(b"y")  # another process's, by the same name
        assert mapped_segments([line(segment, facts)]) == []
        kept.unlink()
    finally:
        segment.unlink(missing_ok=True)
    assert mapped_segments([line(segment, facts)]) == [], "gone already"


@pytest.mark.parametrize(("text", "name"), [
    ("Open MPI v5.0.11, package: Open MPI runner@x Distribution, ident: 5.0.11\0", "Open MPI v5.0.11"),
    ("MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25\nMPICH ABI:          18:2:6\n", "MPICH 5.0.2"),
    ("MVAPICH Version      :\t4.0\nMVAPICH Release date : x", "MVAPICH 4.0"),
    ("Intel(R) MPI Library 2021.18 for Linux* OS\n\0", "Intel(R) MPI Library 2021.18 for Linux* OS"),
    ("MPI VERSION    : CRAY MPICH version 8.1\nMPI BUILD INFO", "MPI VERSION    : CRAY MPICH version 8.1"),
    ("", ""),
])  # fmt: skip
def test_a_library_is_named_in_one_line(text: str, name: str) -> None:
    assert library_name(text) == name
