"""What the tests of calls in NCCL's place have in common: they leave nothing in /dev/shm."""

from collections.abc import Iterator

import pytest

from tests.unit.nccl.door.left import left_behind


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """Neither pages nor stores."""
    before = left_behind()
    yield
    assert left_behind() <= before
