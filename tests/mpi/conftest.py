"""Shared by tests on ranks: nothing may be left in shared memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

SHM = Path("/dev/shm")


def mapped() -> str:
    """The memory maps of all processes."""
    texts = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            texts.append(path.read_text())
        except OSError:  # it has ended, or is not ours
            continue
    return "".join(texts)


@pytest.fixture
def nothing_left_in_shared_memory() -> Iterator[None]:
    """Fail if a test leaves files in shared memory that no process maps."""
    before = set(os.listdir(SHM))
    yield
    new = set(os.listdir(SHM)) - before
    used = mapped() if new else ""  # other jobs on this machine may come and go
    assert not [name for name in new if name not in used and (SHM / name).exists()]
