"""Warn of a wait that is long, and name who is waited for: early and again and again, long before the deadline."""

import time
from collections.abc import Iterable

from ..util.settings import Settings, log
from .announcement import SHOWN
from .processes import JobProcess, state
from .python_stacks import ASK_SECONDS, ask

AGAIN = 2  # a warning is repeated after so many times the time of the first


class SlowWaits:
    """When this process warns of its waits, and how. ``settings`` say after how many seconds; 0: never."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self._wait: object = None
        self._next_s = 0.0

    def due(self, wait: object, waited_s: float) -> bool:
        """Whether to warn of ``wait`` now, which has lasted ``waited_s`` without progress; once for each time."""
        after_s = self.settings.warn_after_s
        if wait != self._wait or waited_s < after_s:
            self._wait, self._next_s = wait, after_s
        if not after_s or waited_s < self._next_s:
            return False
        self._next_s = max(self._next_s, waited_s) + AGAIN * after_s
        return True

    def say(self, text: str, timeout_s: float) -> None:
        """Write the warning."""
        end = f"This is an error after {timeout_s:g} s (timeout=, BLINKMPI_TIMEOUT)"
        log(self.settings, "WARN", f"{text}\n  {end}; BLINKMPI_WARN_AFTER=0 turns these warnings off")


def stacks_of(ranks: Iterable[int], processes: dict[int, JobProcess]) -> str:
    """What the Python of some ranks does, a paragraph each, as far as they can be asked within a second in all."""
    until, found = time.monotonic() + ASK_SECONDS, []
    for rank in list(ranks)[:SHOWN]:
        process = processes.get(rank)
        seen = state(process)
        if process is None or seen in ("gone", "stopped", "blocked"):
            continue
        answer = ask(process, max(0.1, until - time.monotonic()))
        if isinstance(answer, str):
            found.append(f"\n  rank {rank} is {answer}" if answer.startswith("on ") else f"\n  rank {rank} {answer}")
        else:
            found.append(
                f"\n  Python stack of rank {rank}, innermost last:" + "".join(f"\n    {x}" for x in answer.stack)
            )
    return "".join(found)
