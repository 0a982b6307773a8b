"""The hosts of the other tests are isolated, their links have the wanted rates, and nothing is left over."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from tests.harness import PATIENCE_S, ROOT
from tests.hosts.world import World, program, wait_for_end

pytestmark = [pytest.mark.hosts, pytest.mark.mpi_skip]
MIB = 1 << 20


def of_the_machine() -> tuple[set[str], list[str]]:
    """The machine's own interfaces and mounts, which no world may touch."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return set(os.listdir("/sys/class/net")), mounts


def test_hosts_are_isolated() -> None:
    before = of_the_machine()
    with World(2, links=2) as world:
        assert of_the_machine() == before
        world.do("host0", "touch", "/dev/shm/mine")
        for host in world.names:
            assert world.do(host, "hostname").split() == [host]
            assert world.do(host, "ls", "/sys/class/net").split() == ["eth0", "eth1", "lo"]
            assert world.do(host, "ls", "/dev/shm").split() == (["mine"] if host == "host0" else [])
        assert world.processes() == []
    assert of_the_machine() == before
    assert not Path("/dev/shm/mine").exists()


def test_links_differ(world: World) -> None:
    """8 MiB from host0 take 8 MiB less two bursts at the rate of the other host's link: 100 Mbit/s or ten times it."""
    for host, rate in (("host0", "1gbit"), ("host1", "100mbit"), ("host2", "1gbit")):
        world.shape(host, rate)
        assert f"rate {rate}" in world.do(host, "tc", "qdisc", "show", "dev", "eth0").lower()
    outcome = world.run((1, 1, 1), program((1, 1, 1), send_from_the_first, timeout=20), timeout=30)
    assert outcome.rc == 0, outcome.output
    slow, fast = (float(text) for text in re.findall(r"(\S+) seconds", outcome.output))
    bits = (8 * MIB - 2 * 256 * 1024) * 8
    assert slow > bits / 100e6
    assert fast > bits / 1e9


def send_from_the_first() -> None:
    comm, vector, answer = MPI.COMM_WORLD, np.zeros(8 * MIB, np.uint8), np.empty(1)
    for peer in range(1, comm.size):
        since = 0.0
        for part in (vector[:1], vector):  # the first makes the connection
            since = time.monotonic()
            if comm.rank == 0:
                comm.Send(part, peer)
                comm.Recv(answer, peer)  # to have sent is not to have arrived
            elif comm.rank == peer:
                comm.Recv(part, 0)
                comm.Send(answer, 0)
        if comm.rank == 0:
            print(time.monotonic() - since, "seconds")


REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=0.5)
except ConnectionRefusedError:  # by the host itself
    print("there")
except OSError as error:
    print(error)
"""


def test_a_link_goes_down_and_up() -> None:
    with World(2, links=2) as world:

        def there(link: int) -> bool:
            return world.do("host0", sys.executable, "-c", REACH, f"10.77.{link}.2").split() == ["there"]

        assert (there(0), there(1)) == (True, True)
        world.link("host1", "down", link=1)
        assert (there(0), there(1)) == (True, False)
        world.link("host1", "up", link=1)
        assert (there(0), there(1)) == (True, True)


def test_ranks_elsewhere_than_the_test_wants_end_the_job(world: World) -> None:
    outcome = world.run((2, 2), program((3, 1), print, timeout=20), timeout=30)
    assert outcome.rc != 0
    assert "HostsError: each rank's host and the ranks of its node are [('host0', 2)" in outcome.output


def test_a_job_out_of_time_is_ended(world: World) -> None:
    outcome = world.run((1, 1, 1), ["sleep", "60"], timeout=1)
    assert outcome.timed_out
    assert outcome.seconds < 1 + PATIENCE_S
    assert world.processes() == []


OWNER = """
import sys
from tests.hosts.world import World
world = World(2)
job = world.start((1, 1), ["sh", "-c", "echo up; exec sleep 60"], timeout=60)
job.wait_for("up", count=2)
print(*world.processes(), world._init.pid, flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_when_the_tests_are_killed() -> None:
    before = of_the_machine()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    with owner.stdin, owner.stdout:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) > 4  # mpirun, its daemon, two ranks, the world
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert wait_for_end(pids, 5.0) == []
    assert of_the_machine() == before
