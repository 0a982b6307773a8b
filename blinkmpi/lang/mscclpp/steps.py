"""What an operation of an execution plan does, resolved: places of GPUs' memory, and counts between thread blocks."""

from fractions import Fraction
from typing import NamedTuple

PACKETS = "p"  # the scratch buffer, as packets

Count = tuple[str, int, int, int]  # what is counted: memory or port, from GPU, to GPU, number; or sem, GPU, number, 0


class Range(NamedTuple):
    """A part of a buffer of a GPU: of ``i``, ``o``, ``s``, or :data:`PACKETS`; in chunks, and then in pieces."""

    gpu: int
    buffer: str
    start: Fraction
    length: Fraction

    def pieces(self) -> range:
        """The pieces, once it is in pieces."""
        return range(int(self.start), int(self.start + self.length))


class PlanMove(NamedTuple):
    """``targets`` = the sum of the ``operands``, piece by piece.

    Args:
        waits: whether packets among the operands are waited for, and not taken as they are.
        port: the number of the port channel whose proxy does it, or -1 for all threads of the block.
        thread: which thread starts it, if a proxy does it.
    """

    operands: tuple[Range, ...]
    targets: tuple[Range, ...]
    waits: bool = True
    port: int = -1
    thread: int = -1


class Signal(NamedTuple):
    """One more on a count, by a thread; ``port`` is the channel whose proxy does it after what it has to move."""

    counter: Count
    thread: int
    relaxed: bool = False
    port: int = -1


class Await(NamedTuple):
    """Wait, in a thread, until there is one more on a count than this thread block has taken."""

    counter: Count
    thread: int
    relaxed: bool = False


class PlanStep(NamedTuple):
    """An operation where it runs; all that it does, in this order: moves, signals, waits."""

    gpu: int
    block: int
    place: str
    name: str
    moves: tuple[PlanMove, ...] = ()
    signals: tuple[Signal, ...] = ()
    waits: tuple[Await, ...] = ()
    flushes: tuple[tuple[int, int], ...] = ()  # (thread, port channel)
    barrier: int = -1
