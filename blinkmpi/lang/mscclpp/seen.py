"""What a point of an execution plan's run has behind it: how far it has seen every thread block and proxy.

Three orders are kept apart, because a plan may rest on each for one thing alone:

- **memory**: what was done before is visible. A signal and its wait, a barrier, a semaphore and a flush give it. It is
  needed to read what was written, and to write where was written.
- **cause**: what was done before is over, because a packet could not have come otherwise. It is enough to write where
  something was read.
- **begun**: a GPU runs this plan, so its buffers hold what its rank gave. Relaxed signals are enough for that.
"""

from __future__ import annotations

Process = tuple[int, int]  # (GPU, thread block), or (GPU, -1 - port channel) for a channel's proxy


class Seen:
    """What lies behind a point: phases of processes that are over, single moves, and GPUs that have begun.

    A thread block's phase ends where its threads meet, a proxy's with each of its moves.
    """

    __slots__ = ("begun", "cause", "memory", "moves")

    def __init__(self) -> None:
        self.memory: dict[Process, int] = {}
        self.cause: dict[Process, int] = {}
        self.moves: frozenset[int] = frozenset()  # by cause, of phases that are not over
        self.begun: frozenset[int] = frozenset()

    def copy(self) -> Seen:
        """Another one that is the same."""
        made = Seen()
        made.memory, made.cause, made.moves, made.begun = dict(self.memory), dict(self.cause), self.moves, self.begun
        return made

    def join(self, other: Seen, *, relaxed: bool = False) -> None:
        """Have what is behind another point behind this one, too; by a relaxed signal, only that GPUs have begun."""
        self.begun |= other.begun
        if relaxed:
            return
        _later(self.memory, other.memory)
        _later(self.cause, other.cause)
        self.moves |= other.moves

    def take_packet(self, other: Seen, move: int) -> None:
        """Have a packet's making behind this point: what it was made after is over, but its memory may not be seen."""
        self.begun |= other.begun
        _later(self.cause, other.cause)
        self.moves |= other.moves | {move}

    def passed(self, process: Process, phase: int) -> None:
        """Have a process's phase behind this point."""
        _later(self.memory, {process: phase})
        _later(self.cause, {process: phase})


def _later(mine: dict[Process, int], others: dict[Process, int]) -> None:
    for process, phase in others.items():
        if mine.get(process, -1) < phase:
            mine[process] = phase
