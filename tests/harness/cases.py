"""Small functions that pass, skip, fail, hang and crash, for ``test_harness.py``.

pytest collects this file only when it is named on the command line.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness import mpi


@mpi(ranks=(1, 2))
def test_pass(comm: Any) -> None:
    assert comm.allreduce(comm.rank) == comm.size * (comm.size - 1) // 2


@mpi(ranks=(2,))
@pytest.mark.parametrize("word", ["a", "b"])
def test_parameter(comm: Any, word: str) -> None:
    assert comm.allgather(word) == [word] * comm.size


@mpi(ranks=(2,))
def test_skip(comm: Any) -> None:
    pytest.skip("not today")


@mpi(ranks=(2,))
def test_fail(comm: Any) -> None:
    """One rank fails, the other waits for it in a collective of the same shape as the next test's."""
    if comm.rank == 1:
        raise ValueError("seven is not eight")
    comm.Barrier()


@mpi(ranks=(2,))
def test_after_it(comm: Any) -> None:
    """The ranks of the test before are gone, and what they have begun with them."""
    assert comm.allgather(comm.rank) == [0, 1]


def note(comm: Any, folder: Path) -> None:
    (folder / str(comm.rank)).write_text(f"{os.getpid()} {os.environ.get('BLINKMPI_ALGO', '')}")


def echo(comm: Any, number: int, *, text: str) -> None:
    print(f"rank {comm.rank} of {comm.size}: {number} {text}")


def everybody_fails(comm: Any) -> None:
    raise ValueError(f"this is rank {comm.rank}")


def one_skips(comm: Any) -> None:
    if comm.rank == 0:
        pytest.skip("only I")


def hang_in_mpi(comm: Any) -> None:
    if comm.rank == 0:
        comm.recv(source=1)


def hang_in_sleep(comm: Any) -> None:
    if comm.rank == 1:
        time.sleep(600)


def crash(comm: Any) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    comm.Barrier()


def killed(comm: Any) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.Barrier()


def stopped(comm: Any) -> None:
    """No watchdog within the process can end this one."""
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    comm.Barrier()


def exits_early(comm: Any) -> None:
    if comm.rank == 1:
        sys.exit(3)
    comm.Barrier()
