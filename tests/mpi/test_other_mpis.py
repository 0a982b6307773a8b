"""MPICH and Intel MPI, from their wheels, in the place of Open MPI: the tests of virtual nodes, and of requests."""

import os
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, other_mpi, run_command

SECONDS = 900
Installed = tuple[Path, dict[str, str]]  # its folder, and the variables with which mpi4py takes it
FILES = {"tests/mpi/test_nodes.py": 4, "tests/mpi/calls/test_pending_calls.py": 2}  # on so many ranks
pytestmark = [pytest.mark.long, pytest.mark.mpi_skip, pytest.mark.timeout(SECONDS + 60)]


@pytest.fixture(scope="module", params=["mpich", "impi-rt"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Another MPI, whose wheel is installed beside this environment."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, other_mpi(request.param, folder)


@pytest.mark.parametrize("file", FILES)
def test_they_do_what_open_mpi_does(other: Installed, file: str) -> None:
    folder, variables = other
    path = os.pathsep.join((str(folder / "bin"), os.environ["PATH"]))
    env = {**variables, "PATH": path, "PYTEST_XDIST_WORKER": None}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", "--with-mpi", file]
    launcher = str(folder / "bin" / "mpiexec")
    done = run_command(FILES[file], argv, timeout=SECONDS, env=env, launcher=launcher, cwd=ROOT)
    assert (done.rc, done.timed_out) == (0, False), done.output
    assert " passed" in done.output
