"""Tests on several hosts run where namespaces are allowed, and are skipped, with the reason, where they are not."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.harness import mpirun
from tests.hosts.world import World, forbidden, missing


def lacking(reason: str) -> None:
    """Skip where a package is missing, but not where .ci/run must have installed it."""
    if os.environ.get("CI") and os.geteuid() == 0:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def _hosts_are_possible() -> None:
    if reason := missing():
        lacking(reason)
    if reason := forbidden():
        pytest.skip(reason)
    version = subprocess.run([mpirun(), "--version"], capture_output=True, text=True, check=True).stdout
    if "Open MPI" not in version:
        pytest.skip("these tests write hostfiles and read messages of Open MPI's mpirun")


@pytest.fixture
def world() -> Iterator[World]:
    """Three hosts with unlimited links."""
    with World(3) as world:
        yield world
