"""Another MPI's wheel beside this environment, whose own MPI stays."""

import subprocess
import sys
from pathlib import Path

import pytest


def other_mpi(package: str, folder: Path) -> dict[str, str]:
    """Install a wheel of PyPI's into a folder; gives the variables with which mpi4py takes the MPI in it.

    The test is skipped where pip does not get it.
    """
    pip = [sys.executable, "-m", "pip", "install", "-q", "--retries", "1", "--ignore-installed"]
    done = subprocess.run([*pip, "--prefix", folder, package], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip does not get {package}: {done.stderr.strip()[-300:]}")
    return {"MPI4PY_LIBMPI": str(folder / "lib" / "libmpi.so.12")}
