"""Shared by tests on ranks: nothing may be left in shared memory."""

from collections.abc import Iterator

import pytest

from tests.harness import SharedMemoryWatch


@pytest.fixture
def nothing_left_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if the processes of a test leave files in shared memory; those of other jobs on the machine do not count."""
    with SharedMemoryWatch() as watch:
        for name, value in watch.environment.items():
            monkeypatch.setenv(name, value)
        yield
        assert not watch.left()
