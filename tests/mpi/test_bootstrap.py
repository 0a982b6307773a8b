"""Making a Communicator: what is wrong on one rank is an error on every rank, and nothing hangs."""

import errno
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import (
    ArgumentError,
    BlinkError,
    FormatError,
    MismatchError,
    PlanError,
    RemoteError,
    SettingsError,
    TopologyError,
)
from blinkmpi.planning.plan import Plan
from blinkmpi.planning.planner import make_plan
from blinkmpi.runtime.inspection import choice
from blinkmpi.topology import machine
from blinkmpi.util.settings import read
from tests.harness import ENVIRONMENT, mpi, mpirun, run_ranks
from tests.hosts.world import ROOTLESS

ODD = 1  # the rank that is different


def fails(comm: MPI.Intracomm, make: Callable[[], object], kind: type[BaseException], on: int, *words: str) -> None:
    """Making it fails on rank ``on`` by its own error and elsewhere by RemoteError; then a right one works."""
    with pytest.raises(kind if comm.rank == on else RemoteError) as caught:
        make()
    text = str(caught.value)
    if comm.rank != on:
        assert f"rank {on} failed" in text
        assert kind.__name__ in text
    assert all(word in text for word in words), text
    works(comm)


def disagree(comm: MPI.Intracomm, make: Callable[[], object], *words: str) -> None:
    """Making it is a MismatchError with one text on all ranks; then a right one works."""
    with pytest.raises(MismatchError) as caught:
        make()
    texts = comm.allgather(str(caught.value))
    assert len(set(texts)) == 1, texts
    assert all(word in texts[0] for word in words), texts
    works(comm)


def works(comm: MPI.Intracomm, **arguments: Any) -> None:
    with blinkmpi.Communicator(comm, timeout=20, **arguments) as ours:
        x = np.ones(1000)
        ours.Allreduce(MPI.IN_PLACE, x)
        assert (x == comm.size).all()


def made_with(comm: MPI.Intracomm, rank: int | None, **settings: str) -> blinkmpi.Communicator:
    """Make one with ``BLINKMPI_`` variables on one rank, or (None) on all."""
    variables = {f"BLINKMPI_{name}": value for name, value in settings.items()}
    with mock.patch.dict(os.environ, variables if rank in (None, comm.rank) else {}):
        return blinkmpi.Communicator(comm)


# ---------------------------------------------------------------- machine


@mpi(ranks=(3,), timeout=60)
def test_a_wrong_machine(comm: MPI.Intracomm, tmp_path: Path) -> None:
    fails(comm, lambda: blinkmpi.Communicator(comm, topology="dgx-9"), TopologyError, 0, "dgx-9")
    fails(comm, lambda: blinkmpi.Communicator(comm, topology="dgx-1v"), TopologyError, 0, "8 devices", "3 ranks")
    torn = tmp_path / "torn.json"
    body = json.loads(machine("cpu:3").to_json())
    body["links"][1]["src"] = "one"
    if comm.rank == 0:
        torn.write_text(json.dumps(body))
    fails(comm, lambda: blinkmpi.Communicator(comm, topology=str(torn)), FormatError, 0, "torn.json", "$.links[1].src")
    missing = str(tmp_path / "missing.json")
    fails(comm, lambda: blinkmpi.Communicator(comm, topology=missing), TopologyError, 0, "cannot read", "missing.json")


@mpi(ranks=(3,), timeout=60)
def test_a_wrong_plan(comm: MPI.Intracomm, tmp_path: Path) -> None:
    body = json.loads(make_plan(machine("cpu:3")).to_json())
    body["packings"][0]["trees"][0]["root"] = "zero"
    torn = tmp_path / "torn.json"
    if comm.rank == 0:
        torn.write_text(json.dumps(body))
    words = ("torn.json", "$.packings[0].trees[0].root")
    fails(comm, lambda: blinkmpi.Communicator(comm, plan=str(torn)), FormatError, 0, *words)
    fails(comm, lambda: made_with(comm, None, GRAPH_FILE=str(torn)), FormatError, 0, *words)
    missing = str(tmp_path / "missing.json")
    fails(comm, lambda: blinkmpi.Communicator(comm, plan=missing), PlanError, 0, "cannot read", "missing.json")
    other: Plan = comm.bcast(make_plan(machine("dgx-1v")) if comm.rank == 0 else None)  # a late one may differ
    with pytest.raises(BlinkError, match="does not fit"):
        blinkmpi.Communicator(comm, plan=other)
    works(comm)


# ---------------------------------------------------------------- arguments and settings


@mpi(ranks=(3,), timeout=60)
def test_wrong_arguments_on_one_rank(comm: MPI.Intracomm) -> None:
    odd = comm.rank == ODD

    def made(**arguments: Any) -> Callable[[], object]:
        return lambda: blinkmpi.Communicator(comm, **(arguments if odd else {}))

    fails(comm, made(executor="fortran"), ArgumentError, ODD, "fortran", "numpy")
    fails(comm, made(timeout=-1), ArgumentError, ODD, "timeout=-1")
    fails(comm, made(timeout=math.inf), ArgumentError, ODD, "timeout=inf", "at most")
    disagree(comm, made(executor="numpy"), "rank 1 made the communicator with executor=numpy", "no arguments")
    disagree(comm, made(topology="cpu:3"), "topology=cpu:3")
    disagree(comm, made(plan="nowhere.json"), "plan=nowhere.json")
    disagree(comm, made(deterministic=True), "deterministic=True")


@mpi(ranks=(3,), timeout=60)
def test_wrong_settings_on_one_rank(comm: MPI.Intracomm) -> None:
    for name, value in {"TIMEOUT": "soon", "EXECUTOR": "fortran", "DEBUG": "LOUD", "BUFFSIZE": "-1"}.items():
        fails(comm, lambda: made_with(comm, ODD, **{name: value}), SettingsError, ODD, f"{name}='{value}'")  # noqa: B023
    fails(comm, lambda: made_with(comm, 0, ALGO="allreduce:fastest"), SettingsError, 0, "fastest")
    disagree(comm, lambda: made_with(comm, ODD, EXECUTOR="numpy"), "rank 1", "EXECUTOR='numpy' against 'auto'")


@mpi(ranks=(3,), timeout=60)
def test_settings_of_rank_0_hold_for_ranks_that_have_none(comm: MPI.Intracomm) -> None:
    """A launcher may not pass the environment on to other machines."""
    ours = made_with(comm, 0, EXECUTOR="numpy", TIMEOUT="7")
    assert choice(ours.context, "allreduce", 1 << 20)["executor"] == "numpy"
    with ours:
        ours.Barrier()


@mpi(ranks=(3,), timeout=60)
def test_a_file_that_cannot_be_written(comm: MPI.Intracomm) -> None:
    path = "/nowhere/at/all.json"
    fails(comm, lambda: made_with(comm, 0, TOPO_DUMP_FILE=path), SettingsError, 0, f"BLINKMPI_TOPO_DUMP_FILE={path!r}")


def one_typo(comm: MPI.Intracomm) -> None:
    made_with(comm, None, TIMOUT="3").Free()


def test_an_unknown_setting_warns_once_with_the_nearest_name() -> None:
    report = run_ranks(3, one_typo, 30)
    assert report.problem is None, report.problem
    assert report.job.output.count("BLINKMPI_TIMOUT is unknown; did you mean BLINKMPI_TIMEOUT?") == 1


# ---------------------------------------------------------------- shared memory


@contextmanager
def room(nbytes: int, *, seen: int | None = None) -> Iterator[None]:
    """Let this rank reserve so much of /dev/shm at a time; it looks as if as much, or ``seen``, were free."""
    reserve = os.posix_fallocate

    def fallocate(file: int, at: int, length: int) -> None:
        if length > nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(file, at, length)

    free = SimpleNamespace(f_bavail=(nbytes if seen is None else seen) >> 12, f_frsize=4096)
    with mock.patch("os.statvfs", return_value=free), mock.patch("os.posix_fallocate", fallocate):
        yield


@mpi(ranks=(3,), timeout=60)
def test_too_little_shared_memory_on_one_rank_is_told_on_all(comm: MPI.Intracomm) -> None:
    words = r"/dev/shm on \S+ has 100 KiB free; a communicator of 3 ranks there needs at least .* KiB .*--shm-size"
    little = 100 << 10 if comm.rank == ODD else 1 << 30
    with room(little), pytest.raises(TopologyError, match=words):
        blinkmpi.Communicator(comm, strict=True)
    with room(little), blinkmpi.Communicator(comm, timeout=20) as ours:  # whose calls are MPI's
        assert re.match(words, ours.context.host.window.full)
        x = np.ones(1000)
        ours.Allreduce(MPI.IN_PLACE, x)
        assert (x == 3).all()
    works(comm)


@mpi(ranks=(3,), timeout=60)
def test_a_rank_without_dev_shm_is_told_on_all(comm: MPI.Intracomm) -> None:
    lacking = mock.patch("os.statvfs", side_effect=FileNotFoundError(2, "No such file or directory", "/dev/shm"))
    words = r"rank 1 failed: FileNotFoundError: .*/dev/shm"
    with lacking if comm.rank == ODD else nullcontext(), pytest.raises(TopologyError, match=words):
        blinkmpi.Communicator(comm)
    works(comm)


@mpi(ranks=(3,), timeout=60)
def test_shared_memory_that_others_take_meanwhile_makes_the_slots_smaller(comm: MPI.Intracomm) -> None:
    with room(1 << 20 if comm.rank == ODD else 1 << 30, seen=1 << 30), blinkmpi.Communicator(comm, timeout=20) as ours:
        assert ours.context.host.arena_bytes == 1 << 19  # and behind it what calls in one shot need
        x = np.ones(1_000_000)
        ours.Allreduce(MPI.IN_PLACE, x)
        assert x[-1] == 3


def little_room(comm: MPI.Intracomm) -> None:
    with room(8 << 20):
        works(comm)


def test_with_little_shared_memory_the_slots_are_smaller() -> None:
    report = run_ranks(3, little_room, 30)
    assert report.problem is None, report.problem
    assert report.job.output.count("/dev/shm is small") == 1


@pytest.mark.parametrize("mib", [46, 64])
def test_a_dev_shm_as_small_as_dockers(mib: int) -> None:
    """Groups that open their communicators at the same time each get what they reserve; none dies of SIGBUS."""
    mount = ["unshare", *ROOTLESS, "--mount", "bash", "-c"]
    small = f'mount -t tmpfs -o size={mib}m tmpfs /dev/shm && exec "$@"'
    if subprocess.run([*mount, small, "bash", "true"], capture_output=True, timeout=20).returncode:
        pytest.skip("namespaces are forbidden here")
    program = Path(__file__).with_name("shared_memory_full.py")
    command = [*mount, small, "bash", mpirun(), "-np", "4", sys.executable, str(program)]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=100)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    told = re.findall(r"^[0-9]+ communicators, .* needs at least [0-9.]+ [KM]iB of it", said, re.MULTILINE)
    assert len(told) == 2, said
    assert int(said.partition("communicators")[0].split()[-1]) >= 3, said


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("BUFFSIZE", "inf", "at least 262144"), ("BUFFSIZE", "1000", "at least 262144"), ("BUFFSIZE", "1e300", "at most"),
    ("TIMEOUT", "inf", "at most 1000000000"), ("TIMEOUT", "nan", "more than 0"),
])  # fmt: skip
def test_settings_out_of_range(name: str, value: str, expected: str) -> None:
    with pytest.raises(SettingsError, match=f"BLINKMPI_{name}='{value}'.*{expected}"):
        read({f"BLINKMPI_{name}": value})
