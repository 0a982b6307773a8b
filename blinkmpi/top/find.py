"""The communicators of this user's jobs on this machine, by the shared memory that their processes have mapped.

The memory is a piece of a file in /dev/shm without a name, of which other pieces are those of communicators that were
made from the first one. Processes hold the file open, so /proc/PID/fd leads there; /proc/PID/maps has the pieces.
"""

import contextlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..transport.control_pages import CONTROL, INTRODUCTION, LEFT_WORD, RESTS, WORDS
from ..transport.counters import MAGIC, is_counters
from ..util.shared_memory import PREFIX, SHM, UNNAMED

MOST_RANKS = 1 << 16
Piece = tuple[int, int, int]  # of a file: its device, its number, and where the piece begins


@dataclass
class Window:
    """The shared memory of one communicator's ranks on this machine, read only."""

    memory: NDArray[np.uint8]
    n: int
    counters: dict[int, tuple[int, int]]  # of each rank here: where its counters lie, and how many bytes
    file: Piece = (0, 0, 0)
    pids: list[int] = field(default_factory=list)  # processes that map it

    @property
    def rests(self) -> bool:
        """Whether no rank here has the communicator any more: it is kept for the next one of these ranks."""
        return all(int(self.words(rank)[LEFT_WORD]) == RESTS for rank in self.here)

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks on this machine."""
        return tuple(self.counters)

    def words(self, rank: int) -> NDArray[np.uint64]:
        """The control pages of a rank, as words."""
        return self.memory[rank * CONTROL : (rank + 1) * CONTROL].view(np.uint64)


def windows(pid: int | None = None) -> list[Window]:
    """All communicators whose memory this user may read; those of one process, if it is named. Oldest process first."""
    found: dict[Piece, Window | None] = {}
    for process in sorted(_processes()):
        for path, key, length in _shared(process):
            if key not in found:
                found[key] = _read(path, key[2], length)
            window = found[key]
            if window is not None:
                window.file = key
            if window is not None and process not in window.pids:
                window.pids.append(process)
    whole = [window for window in found.values() if window is not None and not window.rests]
    return [window for window in whole if pid is None or pid in window.pids]


def _processes() -> Iterator[int]:
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and int(path.name) != os.getpid():
            yield int(path.name)


def _shared(pid: int) -> Iterator[tuple[str, Piece, int]]:
    """The pieces of files of ours that a process has mapped: a path that opens the file, which piece, and its bytes."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        pieces = _pieces(Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace"))
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith((UNNAMED, f"{SHM}/{PREFIX}")):
                    facts = os.stat(path)
                    for at, length in pieces.pop(facts.st_ino, ()):
                        yield path, (facts.st_dev, facts.st_ino, at), length


def _pieces(maps: str) -> dict[int, list[tuple[int, int]]]:
    """(place, bytes) of the pieces of each file in /dev/shm, by the file's number, as /proc/PID/maps has them."""
    found: dict[int, list[tuple[int, int]]] = {}
    for line in maps.splitlines():
        span, _, at, _, inode, *name = line.split(maxsplit=5)
        if name and name[0].startswith(f"{SHM}/"):
            begin, end = (int(word, 16) for word in span.split("-"))
            found.setdefault(int(inode), []).append((int(at, 16), end - begin))
    return found


def _read(path: str, at: int, size: int) -> Window | None:
    """The communicator in a piece of a file; None if there is none of this version in it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        size = min(size, os.fstat(file).st_size - at)  # what is mapped are whole pages
        memory = mmap.mmap(file, size, prot=mmap.PROT_READ, offset=at) if size >= CONTROL else None
    except OSError:  # longer than any memory: none of ours, whatever its name
        return None
    finally:
        os.close(file)
    return None if memory is None else window_in(np.frombuffer(memory, np.uint8))


def window_in(memory: NDArray[np.uint8]) -> Window | None:
    """The communicator in shared memory; None if there is none of this version."""
    n, counters = 0, {}
    for rank in range(min(len(memory) // CONTROL, n or MOST_RANKS)):
        if n and rank >= n:
            break
        at = rank * CONTROL + 8 * (3 * WORDS + INTRODUCTION)
        magic, size, where, length = memory[at : at + 32].view(np.uint64).tolist()
        if magic != MAGIC:
            continue
        if not 0 < size <= MOST_RANKS or where % 8 or where + length > len(memory) or size * CONTROL > len(memory):
            return None
        n = size
        if is_counters(memory[where : where + length]):
            counters[rank] = (where, length)
    return Window(memory, n, counters) if counters else None
