"""Hosts and links that fail in the middle of a call: every remaining rank raises an error in time, and the job ends.

Seen of Open MPI 5.0's mpirun: when a connection is closed, because ranks or all processes of a host are killed, it ends
the job at once. When a link or a host is dead without closing its connections, mpirun waits until TCP gives up, long
after the ranks have raised their errors and ended, and its own time limit does not help. By the kernel's default that
takes a quarter of an hour, so the hosts here are set to about six seconds. Then mpirun names the host; its exit status
may be 0 all the same.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from tests.harness import PATIENCE_S, Outcome, long_but, wait_until
from tests.hosts.world import Job, World, command_line, program

pytestmark = [pytest.mark.hosts, pytest.mark.mpi_skip]
DEADLINE_S = 2.0
LATE_DEADLINE_S, LATE_COUNTS = 0.3, (1, 1, 1, 8, 8, 1000, 100_000, 100_000, 300_000)  # 100,000: MPI's own on 3 hosts
TCP_RETRIES = 4  # 6.2 s: later than the ranks' deadline


@pytest.fixture
def world() -> Iterator[World]:
    """Three hosts whose TCP gives up after a few seconds."""
    with World(3) as world:
        for host in world.names:
            world.do(host, "bash", "-c", f"echo {TCP_RETRIES} >/proc/sys/net/ipv4/tcp_retries2")
        yield world


def start(world: World, layout: tuple[int, ...], folder: Path, *options: str, left: int = 0) -> Job:
    """Start ranks that call Allreduce until it fails, and wait for their first call; ``left`` ranks will survive."""
    argv = program(layout, allreduces, folder, left, timeout=80)
    job = world.start(layout, argv, timeout=90, options=options)
    try:
        job.wait_for("ready", count=sum(layout), timeout=60)
    except BaseException:
        job.close()
        raise
    return job


def allreduces(folder: str, left: str) -> None:
    comm = blinkmpi.Communicator(MPI.COMM_WORLD, timeout=DEADLINE_S)
    vector = np.zeros(4 << 20, np.float32)
    comm.Allreduce(MPI.IN_PLACE, vector)
    print("ready", flush=True)
    since = time.monotonic()
    try:
        while True:
            since = time.monotonic()
            comm.Allreduce(MPI.IN_PLACE, vector)
    except blinkmpi.BlinkError as error:
        said = (type(error).__name__, str(error), time.monotonic() - since)
        Path(folder, f"{comm.rank}.draft").write_text(json.dumps(said))  # a file: a dead link takes no output
        Path(folder, f"{comm.rank}.draft").rename(Path(folder, str(comm.rank)))
    # the first rank that leaves ends the job: let the others write their error
    wait_until(lambda: len([p for p in Path(folder).iterdir() if not p.suffix]) >= int(left), "all have an error")


def errors_of(folder: Path) -> dict[int, str]:
    """Give the kind of error of each rank that raised one; each was raised in time and names the call."""
    errors = {}
    for path in sorted(folder.iterdir()):
        kind, text, seconds = json.loads(path.read_text())
        assert seconds < DEADLINE_S + PATIENCE_S, text
        assert "allreduce" in text or kind != "CollectiveTimeout"
        errors[int(path.name)] = kind
    return errors


def ended(job: Job) -> Outcome:
    """Wait for the end of a job, which must come by itself before the job's time is over; no rank outlives it.

    A daemon may, on a host without a link.
    """
    with job:
        outcome = job.wait()
    assert not outcome.timed_out, outcome.output
    assert not [line for line in outcome.leftovers if "tests.hosts.rank" in line], outcome.output
    return outcome


def kill_ranks(world: World, host: str) -> None:
    """Kill the ranks of a host, and not the daemon that started them."""
    for pid in world.processes(host):
        if "-m tests.hosts.rank" in command_line(pid) and "prted" not in command_line(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_a_dead_link_is_reported_on_both_sides(world: World, tmp_path: Path) -> None:
    job = start(world, (2, 2), tmp_path, left=4)
    world.link("host1", "down")
    outcome = ended(job)
    assert errors_of(tmp_path) == dict.fromkeys(range(4), "CollectiveTimeout"), outcome.output
    assert "host1" in outcome.output


def test_a_host_without_power_is_reported_on_all_others(world: World, tmp_path: Path) -> None:
    job = start(world, (2, 2, 1), tmp_path, left=3)
    world.kill("host1")
    outcome = ended(job)
    assert errors_of(tmp_path) == dict.fromkeys((0, 1, 4), "CollectiveTimeout"), outcome.output
    assert "host1" in outcome.output


def test_killed_ranks_end_the_job(world: World, tmp_path: Path) -> None:
    job = start(world, (2, 2), tmp_path)
    kill_ranks(world, "host1")
    outcome = ended(job)
    assert outcome.rc != 0, outcome.output


def test_under_fault_tolerance_the_others_raise_peer_lost(world: World, tmp_path: Path) -> None:
    job = start(world, (2, 2), tmp_path, "--with-ft", "ulfm", left=2)
    kill_ranks(world, "host1")
    outcome = ended(job)
    found = errors_of(tmp_path)  # one of host1 may have heard of the other's end before its own
    assert {rank: found.get(rank) for rank in range(2)} == dict.fromkeys(range(2), "PeerLost"), outcome.output
    assert set(found.values()) == {"PeerLost"}, outcome.output


def test_a_host_whose_processes_are_killed_ends_the_job(world: World, tmp_path: Path) -> None:
    job = start(world, (2, 2), tmp_path)
    world.end_processes("host1")
    outcome = ended(job)
    assert "host1" in outcome.output


def too_late(late: str, folder: str) -> None:
    """Calls to which one rank comes when the others have given up: all raise, that rank too."""
    world = MPI.COMM_WORLD
    with blinkmpi.Communicator(world) as comm:
        for turn, count in enumerate(LATE_COUNTS):
            child = comm.Dup()
            vector = np.zeros(count)
            child.Allreduce(MPI.IN_PLACE, vector)  # connects, and finds the way of a call of this length
            if world.rank == int(late):
                while len(list(Path(folder).glob(f"{turn}.*"))) < world.size - 1:  # files: MPI reads nothing meanwhile
                    time.sleep(0.01)
                time.sleep(LATE_DEADLINE_S)
            with pytest.raises(blinkmpi.CollectiveTimeout):
                child.Allreduce(MPI.IN_PLACE, vector, timeout=LATE_DEADLINE_S)
            Path(folder, f"{turn}.{world.rank}").touch()
            child.Free()
            world.Barrier()
    print("all raised", flush=True)


LATE = [((1, 1), 1), ((2, 1), 2), ((2, 1), 0), ((1, 1, 1), 1), ((1, 2), 2)]


@pytest.mark.parametrize(("layout", "late"), long_but(LATE[:1], LATE))
def test_a_rank_that_comes_too_late_raises_although_all_data_is_there(
    world: World, tmp_path: Path, layout: tuple[int, ...], late: int
) -> None:
    """MPI reads from TCP in steps: what the others have sent comes before their word that they have given up."""
    outcome = world.run(layout, program(layout, too_late, late, tmp_path, timeout=40), timeout=50)
    assert outcome.output.count("all raised") == sum(layout), outcome.output
    assert outcome.rc == 0, outcome.output


def test_an_unknown_host_is_named(world: World) -> None:
    argv = program((2, 2), print, timeout=20)
    outcome = world.run((2, 2), argv, timeout=30, hosts=("host0", "nohost"))
    assert not outcome.timed_out, outcome.output
    assert outcome.rc != 0
    assert "nohost" in outcome.output
