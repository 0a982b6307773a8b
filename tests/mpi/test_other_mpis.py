"""MPICH and Intel MPI, from their wheels, in the place of Open MPI: the tests of virtual nodes, and of requests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, run_command

SECONDS = 900
FILES = {"tests/mpi/test_nodes.py": 4, "tests/mpi/calls/test_pending_calls.py": 2}  # on so many ranks
pytestmark = [pytest.mark.long, pytest.mark.mpi_skip, pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="module", params=["mpich", "impi-rt"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of another MPI, whose wheel is installed beside this environment."""
    folder = tmp_path_factory.mktemp(request.param)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--retries", "1", "--ignore-installed"]
    done = subprocess.run([*pip, "--prefix", folder, request.param], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip does not get {request.param}: {done.stderr.strip()[-300:]}")
    return folder


@pytest.mark.parametrize("file", FILES)
def test_they_do_what_open_mpi_does(other: Path, file: str) -> None:
    env = {
        "PATH": os.pathsep.join((str(other / "bin"), os.environ["PATH"])),
        "MPI4PY_LIBMPI": str(other / "lib" / "libmpi.so.12"),
        "PYTEST_XDIST_WORKER": None,
    }
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", "--with-mpi", file]
    launcher = str(other / "bin" / "mpiexec")
    done = run_command(FILES[file], argv, timeout=SECONDS, env=env, launcher=launcher, cwd=ROOT)
    assert (done.rc, done.timed_out) == (0, False), done.output
    assert " passed" in done.output
