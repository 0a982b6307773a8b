"""Files that ranks share: nothing named is left, whenever a rank dies, and what cannot be shared is said."""

import errno
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blinkmpi.errors import TopologyError
from blinkmpi.util import shared_memory
from blinkmpi.util.shared_memory import PAGE, PREFIX, SHM, NotShared, SharedFile
from tests.unit.topology.test_gather import on_ranks


def named() -> set[str]:
    return {name for name in os.listdir(SHM) if name.startswith(PREFIX)}


def results(work: Callable[[Any], Any], n: int = 3) -> list[Any]:
    return on_ranks([0] * n, lambda comm, _: work(comm))


def test_ranks_share_a_file_without_a_name() -> None:
    before, seen = named(), []

    def work(comm: Any) -> bytes:
        file = shared_memory.shared_file(comm, 30)
        assert isinstance(file, int)
        os.pwrite(file, bytes([65 + comm.rank]) * 10, 10 * comm.rank)
        seen.append(os.readlink(f"/proc/self/fd/{file}"))
        comm.Barrier()
        found = os.pread(file, 40, 0)
        os.close(file)
        return found

    assert results(work) == [b"A" * 10 + b"B" * 10 + b"C" * 10] * 3
    assert all(path.startswith(shared_memory.UNNAMED) for path in seen), seen
    assert named() == before


def test_where_processes_have_other_numbers_a_name_stands_in_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that share /dev/shm, but not the numbers of their processes."""
    own, before, seen = shared_memory._opened, named(), []

    def opened(path: str, place: Any) -> int | NotShared:
        if path.startswith("/proc"):
            return NotShared(2, "no such process", path)
        seen.append(path)
        return own(path, place)

    monkeypatch.setattr(shared_memory, "_opened", opened)

    def work(comm: Any) -> int:
        memory = shared_memory.shared_memory(comm, 4096, [(0, 4096)])
        assert memory is not None
        memory[comm.rank] = comm.rank + 1
        comm.Barrier()
        return sum(memory[:3])

    assert results(work) == [6, 6, 6]
    assert len(set(seen)) == 1
    assert seen[0].startswith(f"{SHM}/{PREFIX}")
    assert named() == before


def test_another_file_in_its_place_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x" * 4096)
    own = shared_memory._opened
    monkeypatch.setattr(shared_memory, "_opened", lambda _, place: own(str(other), place))
    found = results(lambda comm: shared_memory.shared_memory(comm, 4096, [(0, 4096)]))
    assert {type(error) for error in found} == {TopologyError}
    assert "another file" in str(found[0])
    assert other.read_bytes() == b"x" * 4096


def test_a_file_that_cannot_be_made_is_a_typed_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SHM", "/proc/sys")  # which is read-only in its way
    found = results(lambda comm: shared_memory.shared_memory(comm, 4096, [(0, 4096)]))
    assert {type(error) for error in found} == {TopologyError}
    assert all("where no file can be made" in str(error) for error in found)


def test_a_file_has_many_places_none_of_them_twice() -> None:
    def work(comm: Any) -> list[int]:
        number = shared_memory.shared_file(comm, shared_memory.longest())
        assert isinstance(number, int)
        file = SharedFile(number, comm.rank, comm.size)
        places = [file.place(nbytes) for nbytes in (1, PAGE, PAGE + 1, 10 * PAGE)]
        assert [b - a for a, b in itertools.pairwise(places)] == [2 * PAGE, 2 * PAGE, 3 * PAGE]
        file.skip(places[-1] + 100 * PAGE)
        assert file.place(1) > places[-1] + 100 * PAGE
        with pytest.raises(OSError, match="given out"):
            file.place(shared_memory.longest())
        return places

    found = results(work)
    assert len(set(itertools.chain(*found))) == 12
    assert found[0][0] == 0


def test_memory_of_a_file_goes_with_its_last_view_and_its_pages_when_they_are_given_back() -> None:
    def maps() -> int:
        return sum("/dev/shm/" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before, descriptors = maps(), len(os.listdir("/proc/self/fd"))
    number = os.open(SHM, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.ftruncate(number, 1 << 40)
    file = SharedFile(number, 0, 1)
    places = [file.place(PAGE) for _ in range(3)]
    views = [np.asarray(file.mapped(at, PAGE)) for at in places]
    assert maps() == before + 3
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1
    assert all(file.reserve(at, PAGE) for at in places)
    for i, view in enumerate(views):
        view[:] = i + 1
    file.give_back(places[1], PAGE)
    assert os.fstat(number).st_blocks * 512 == 2 * PAGE
    assert [int(view[-1]) for view in views] == [1, 0, 3]
    part = views.pop()[:7]
    assert maps() == before + 3
    del part, view, views[:]
    assert maps() == before
    del file
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_memory_that_no_file_system_limits_is_this_users_alone() -> None:
    def work(comm: Any) -> tuple[int, int]:
        file = shared_memory.shared_file(comm, PAGE, limited=False)
        assert isinstance(file, int)
        facts = os.fstat(file)
        assert not os.readlink(f"/proc/self/fd/{file}").startswith(SHM)
        os.close(file)
        return facts.st_mode & 0o777, facts.st_ino

    assert len(set(results(work))) == 1
    assert results(work)[0][0] == 0o600


def test_a_file_has_no_room_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, at: int, length: int) -> None:
        raise OSError(errno.ENOSPC if at else errno.EIO, "full")

    number = os.memfd_create("test")
    os.ftruncate(number, 1 << 20)
    file = SharedFile(number, 0, 1)
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert file.reserve(0, 0)
    assert not file.reserve(PAGE, 1)
    with pytest.raises(OSError, match="full"):
        file.reserve(0, 1)
    with pytest.raises(OSError):
        file.mapped(1, PAGE)  # which no page begins at


DIES = """
import os, signal, sys
from blinkmpi.util import shared_memory
from tests.unit.topology.test_gather import on_ranks
steps = int(sys.argv[1])
class Stepped:
    def __getattr__(self, name):
        global steps
        steps -= 1
        if steps == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return getattr(os, name)
shared_memory.os = Stepped()
on_ranks([0, 0], lambda comm, _: shared_memory.shared_memory(comm, 4096, [(0, 4096)]))
print("ended")
"""


def test_a_death_at_any_step_leaves_nothing() -> None:
    before = named()
    for step in range(1, 60):
        argv = [sys.executable, "-c", DIES, str(step)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
        assert named() == before
        if "ended" in done.stdout:
            break
        assert done.returncode == -9, done.stderr
    assert step > 5, "it died at several steps"
