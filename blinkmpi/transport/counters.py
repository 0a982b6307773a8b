"""Counters: what a rank has moved, in memory that the ranks of its node share, so that ``blinkmpi top`` can read it.

``lines`` lines a rank, of 128 bytes: bytes, calls and nanoseconds as words, then the line's name, a JSON list such as
``["link", 0, 3]``. The first line is a heading. Names come as calls need them; a line has one writer and only grows.
What finds no free line is counted in its kind's last one, ``["link", "others"]``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

LINE_BYTES = 128
WORDS = LINE_BYTES // 8  # of a line
BYTES, CALLS, NS, LENGTH = 0, 1, 2, 3  # words of a line; LENGTH is its name's
NAME = 32  # where the name begins
MAGIC = 0x626C696E6B310001  # of the heading, and of the control pages that lead to it; its last digits are a version
HEAD_MAGIC, USED, TIMED, RANK, SIZE = range(5)  # words of the heading
KINDS = ("collective", "protocol", "tree", "link", "wait")
OTHERS = "others"
SPARE = 256  # lines besides those of links and waits

Name = tuple[Any, ...]


def lines_for(n: int) -> int:
    """Lines of a rank of a job of ``n``: its links each way, its waits, and some for the rest."""
    return 3 * n + SPARE


class Count(NamedTuple):
    """A line's counts."""

    bytes: int
    calls: int
    ns: int


class Counters:
    """A rank's own lines.

    Args:
        memory: the lines, zeros.
        timed: whether times are measured, too.
        reserve: makes sure that the memory has so many bytes that may be written; whether it has.
    """

    def __init__(
        self, memory: NDArray[np.uint8], *, n: int, rank: int, timed: bool,
        reserve: Callable[[int], bool] = lambda _: True,
    ) -> None:  # fmt: skip
        self._reserve = reserve
        self._bytes, self.words = memory, memory.view(np.int64).reshape(-1, WORDS)
        self.flat = memoryview(memory).cast("q")  # type: ignore[arg-type]
        self._lines: dict[Name, int] = {}
        self.words[0, [USED, TIMED, RANK, SIZE]] = 1, timed, rank, n
        for kind in KINDS:
            self._add((kind, OTHERS))
        self.words[0, HEAD_MAGIC] = MAGIC

    def line(self, name: Name) -> int:
        """The line of that name."""
        found = self._lines.get(name)
        return self._add(name) if found is None else found

    def address(self, name: Name) -> int:
        """Where its words lie."""
        return int(self.words.ctypes.data) + LINE_BYTES * self.line(name)

    def clock(self, name: Name) -> int:
        """Where its nanoseconds lie."""
        return self.address(name) + 8 * NS

    def add(self, name: Name, count: Count) -> None:
        """Add to a line."""
        self.words[self.line(name), : len(count)] += count

    def clear(self) -> None:
        """Count from nothing again."""
        self.words[1 : int(self.words[0, USED]), : NS + 1] = 0  # no other line: there may be no memory for it

    def _add(self, name: Name) -> int:
        text, at = msgspec.json.encode(name), int(self.words[0, USED])
        if at == len(self.words) or len(text) > LINE_BYTES - NAME or not self._reserve((at + 1) * LINE_BYTES):
            at = self._lines[name[0], OTHERS]
        else:
            self._bytes[at * LINE_BYTES + NAME :][: len(text)] = np.frombuffer(text, np.uint8)
            self.words[at, LENGTH] = len(text)
            self.words[0, USED] = at + 1  # at last: then a reader may look at it
        self._lines[name] = at
        return at


def is_counters(memory: NDArray[np.uint8]) -> bool:
    """Whether a rank's counters lie there, as this version writes them."""
    return len(memory) >= LINE_BYTES and int(memory[:8].view(np.uint64)[0]) == MAGIC


def counts_in(memory: NDArray[np.uint8]) -> dict[Name, Count]:
    """All lines of a rank in use, by name, in order of name; of this process's rank or another's."""
    words = memory.view(np.int64).reshape(-1, WORDS)
    found: dict[Name, Count] = {}
    for at in range(1, min(int(words[0, USED]), len(words))):
        length = min(int(words[at, LENGTH]), LINE_BYTES - NAME)
        count = Count(*words[at, : len(Count._fields)].tolist())
        if any(count):
            found[tuple(msgspec.json.decode(bytes(memory[at * LINE_BYTES + NAME :][:length])))] = count
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(name: Name) -> tuple[Any, ...]:
    return name[0], *((isinstance(part, str), part) for part in name[1:])


def heading_of(memory: NDArray[np.uint8]) -> tuple[int, int, bool]:
    """(rank, ranks of the job, whether times are measured)."""
    words = memory[:LINE_BYTES].view(np.int64)
    return int(words[RANK]), int(words[SIZE]), bool(words[TIMED])
