"""Where there is no MPI library, mpi4py's error gets the remedy."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from blinkmpi.errors import NO_MPI

PROGRAMS = {
    "a communicator": "import blinkmpi; blinkmpi.Communicator",
    "a store's": "import blinkmpi; blinkmpi.StoreCommunicator",
    "torch's variables": "import blinkmpi.torch; blinkmpi.torch.setenv()",
    "torch's group": "import torch.distributed as dist, blinkmpi.torch; "
    "dist.init_process_group('blink', store=dist.HashStore(), rank=0, world_size=1)",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", PROGRAMS)
def test_the_error_ends_with_the_remedy(what: str) -> None:
    if "torch" in PROGRAMS[what] and find_spec("torch") is None:
        pytest.skip("torch is not installed")
    env = {**os.environ, "MPI4PY_LIBMPI": "/no/libmpi.so"}
    done = subprocess.run([sys.executable, "-c", PROGRAMS[what]], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "RuntimeError: cannot load MPI library" in done.stderr
    assert done.stderr.splitlines()[-1] == f"There is no MPI here: {NO_MPI}."
