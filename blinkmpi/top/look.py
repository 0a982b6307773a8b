"""One look at a communicator: which call each of its ranks is in, who waits for whom, and what has been moved."""

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..transport.announcement import decode
from ..transport.control_pages import BODY, RECORD, RECORDS, WORDS, process_state, start_time
from ..transport.counters import counts_in, heading_of
from ..transport.stats import Stats, stats_of
from ..util.text import ranks_text
from .find import Piece, Window

STATES = {"T": "stopped", "t": "stopped", "D": "blocked", "Z": "gone", "X": "gone"}


@dataclass(frozen=True)
class RankLook:
    """A rank on this machine."""

    rank: int
    pid: int
    state: str  # of its process: running, stopped, blocked, left, gone
    entered: int  # the number of its last call
    finished: int
    call: str  # that call in words
    waits: str  # whom it waits for
    stats: Stats


@dataclass(frozen=True)
class Look:
    """A communicator at a moment."""

    n: int
    window: Piece  # its shared memory
    seconds: float  # of the monotonic clock
    pids: tuple[int, ...]
    aborted: str  # which rank has aborted, "" if none has
    ranks: tuple[RankLook, ...] = field(default=())


def look(window: Window) -> Look:
    """Read a communicator's memory now. What its ranks write meanwhile may be seen or not."""
    lines = {rank: window.words(rank) for rank in range(window.n)}
    entered = {rank: int(words[0]) for rank, words in lines.items()}
    abort = int(lines[0][3 * WORDS])
    ranks = []
    for rank in window.here:
        words, (at, length) = lines[rank], window.counters[rank]
        last, done = entered[rank], int(words[1])
        stats = stats_of(rank, window.n, counts_in(window.memory[at : at + length]), timed=_timed(window, rank))
        ranks.append(
            RankLook(rank, int(words[2 * WORDS]), _state(words), last, done, _call(words, last),
                     _waits(entered, last) if last > done else "", stats)
        )  # fmt: skip
    aborted = f"rank {abort - 1}" if abort else ""
    return Look(window.n, window.file, time.monotonic(), tuple(window.pids), aborted, tuple(ranks))


def _timed(window: Window, rank: int) -> bool:
    at, length = window.counters[rank]
    return heading_of(window.memory[at : at + length])[2]


def _state(words: NDArray[np.uint64]) -> str:
    """What the process of a rank does."""
    pid, start, left = (int(word) for word in words[2 * WORDS : 2 * WORDS + 3])
    if left:
        return "left"
    state = process_state(pid)
    if state is None or start_time(pid) != start:
        return "gone"
    return STATES.get(state, "running")


def _call(words: NDArray[np.uint64], seq: int) -> str:
    """What a rank announced of its last call."""
    if not seq:
        return "no call yet"
    at = RECORDS * WORDS + (seq % 2) * RECORD // 8
    record = words[at : at + RECORD // 8]
    said = decode(record.tobytes()[16 : 16 + min(int(record[1]), BODY)])
    return "a call" if said is None else str(said)


def _waits(entered: dict[int, int], seq: int) -> str:
    """Whom a rank in call ``seq`` waits for."""
    late = [rank for rank, number in entered.items() if number < seq]
    return f"{ranks_text(late)} to enter" if late else "its peers' chunks, or works"
