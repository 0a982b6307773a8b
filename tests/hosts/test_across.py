"""The conformance suite on ranks of two and three hosts, with TCP between them."""

from collections.abc import Iterator

import pytest
from mpi4py import MPI

import blinkmpi
from tests.conformance import COLLECTIVES, cases
from tests.harness import long_but
from tests.hosts.world import World, program
from tests.mpi.test_conformance import run_all

pytestmark = [pytest.mark.hosts, pytest.mark.mpi_skip]
TIMEOUT_S = 150.0


@pytest.fixture(scope="module")
def equal() -> Iterator[World]:
    """Two hosts with unlimited links."""
    with World(2) as world:
        yield world


def conform(world: World, layout: tuple[int, ...], which: str, *collectives: str) -> None:
    argv = program(layout, conformance, which, *collectives, timeout=TIMEOUT_S)
    outcome = world.run(layout, argv, timeout=TIMEOUT_S + 5)
    assert outcome.output.count("conforms") == sum(layout), outcome.output
    assert (outcome.rc, outcome.leftovers) == (0, ()), outcome.output


@pytest.mark.parametrize("collective", long_but((), COLLECTIVES))
def test_two_hosts(equal: World, collective: str) -> None:
    conform(equal, (2, 2), "full", collective)


def test_two_hosts_of_different_size(equal: World) -> None:
    conform(equal, (3, 1), "some", *COLLECTIVES)


@pytest.mark.long
def test_three_hosts_of_different_size_and_rate() -> None:
    with World(3) as world:
        for host, rate in zip(world.names, ("1gbit", "800mbit", "400mbit"), strict=True):
            world.shape(host, rate)
        conform(world, (2, 2, 1), "some", *COLLECTIVES)


def conformance(which: str, *collectives: str) -> None:
    with blinkmpi.Communicator(MPI.COMM_WORLD) as comm:
        for collective in collectives:
            run_all(comm, list(cases(collective, comm.size, full=which == "full")))
    print("conforms", flush=True)
