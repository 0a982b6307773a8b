"""``Program``: a collective call as chunked, pipelined stages of every rank (Blink section 4, CodeGen).

A **channel** is a ring of ``depth`` slots with one writer and one or more
readers. A **stage** belongs to one rank and one tree and walks its span chunk by
chunk. Its step for chunk k is always the same: wait until every channel in
``ins`` holds chunk k and every channel in ``outs`` has a free slot; fold the
local operand and the incoming chunks in ``fold`` order; write the value to the
local receive buffer (``store``) and to ``outs``; release the slots that were
read. So a program's length does not depend on the length of the vector.

Kinds of stages: ``up`` (leaf and inner ranks of a reduction), ``turn`` (the
root: completes the reduction and, in an allreduce, starts the way down),
``down`` (the root of a broadcast, and everybody who forwards or receives).

Deadlock freedom: if the stages form no cycle through their channels, ordering
the steps by (chunk, position of the stage in topological order) puts every step
behind all that it waits for, because a slot of chunk k is freed by a step of
chunk k - depth. Hence an executor that polls its stages and runs what is ready
always progresses, and so does one that blocks on that order.

Offsets and counts are in elements. Pure data.
"""

from functools import cached_property
from typing import ClassVar, Literal

from ..util.codec import Document, Value
from .call import Call

FORMAT_VERSION = 2
Wire = Literal[
    "accumulator", "operand"
]  # the type in which partial results travel: float32 for 16-bit types, or theirs
ONE_SHOT = "one_shot"  # the scheme of programs whose slots may be filled before the call is announced (one_shot.py)


class Channel(Value, frozen=True):
    """A ring of slots.

    ``partial`` values are on their way to where the fold is complete. They travel in the accumulator type, unless they
    are ``operands``: elements of a send buffer as they are, or are ``rounded`` on every hop (:data:`Wire`). All others
    travel in the call's type.
    """

    tree: int
    writer: int
    readers: tuple[int, ...]
    partial: bool = False
    operands: bool = False
    rounded: bool = False

    @property
    def wide(self) -> bool:
        """Whether values travel in the accumulator type."""
        return self.partial and not (self.operands or self.rounded)


class Stage(Value, frozen=True):
    """What one rank does for one tree, one way.

    ``local`` and ``store`` are offsets in the send and the receive buffer, or None. ``fold`` lists the operands in
    order: -1 is the local one, i is ``ins[i]``. ``final`` says that the fold is complete here.
    """

    rank: int
    tree: int
    way: Literal["up", "turn", "down"]
    count: int
    local: int | None
    ins: tuple[int, ...]
    fold: tuple[int, ...]
    store: int | None
    outs: tuple[int, ...]
    final: bool


class Program(Document, frozen=True, dict=True):
    """All stages of all ranks for one call; or those of one node, with the elements of the job's ``longest`` stage."""

    KIND: ClassVar = "program"
    VERSION: ClassVar = FORMAT_VERSION
    call: Call
    scheme: str
    chunk: int
    depth: int
    channels: tuple[Channel, ...]
    stages: tuple[Stage, ...]
    longest: int = 0

    @property
    def one_shot(self) -> bool:
        """Whether its channels have a slot for calls of even and one for calls of odd number, and stages one chunk."""
        return self.scheme == ONE_SHOT

    def of(self, rank: int) -> tuple[Stage, ...]:
        """The stages of ``rank``."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    @cached_property
    def steps(self) -> int:
        """Chunks of the longest stage."""
        longest = self.longest or max((stage.count for stage in self.stages), default=0)
        return -(-longest // self.chunk)

    def chunk_of(self, stage: Stage) -> int:
        """Elements that ``stage`` moves in one step, at most ``chunk``.

        In proportion to its span, so that all stages need about the same number of steps: trees that share a link get
        it chunk by chunk in turn, and with equal chunks a light tree would take a heavy one's part of it.
        """
        return chunk_of(stage.count, self.steps, self.chunk)


def chunk_of(count: int, steps: int, most: int) -> int:
    """Elements of a chunk, at least one and at most ``most``, for a span of ``count`` to take about ``steps`` steps."""
    share = max(-(-count // steps), 1)
    return min(most, -(-share // 64) * 64)
