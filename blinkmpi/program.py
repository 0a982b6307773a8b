"""A collective call lowered to lanes: what every rank does with every chunk (Blink section 4, CodeGen).

A **channel** is a ring of ``depth`` slots with one writer and one or more
readers. A **lane** belongs to one rank and one tree and walks its span chunk by
chunk. Its step for chunk k is always the same: wait until every channel in
``ins`` holds chunk k and every channel in ``outs`` has a free slot; fold the
local operand and the incoming chunks in ``fold`` order; write the value to the
local receive buffer (``store``) and to ``outs``; release the slots that were
read. So a program's length does not depend on the length of the vector.

Kinds of lanes: ``up`` (leaf and inner ranks of a reduction), ``turn`` (the
root: completes the reduction and, in an allreduce, starts the way down),
``down`` (the root of a broadcast, and everybody who forwards or receives).

Deadlock freedom: if the lanes form no cycle through their channels, ordering
the steps by (chunk, position of the lane in topological order) puts every step
behind all that it waits for, because a slot of chunk k is freed by a step of
chunk k - depth. Hence an executor that polls its lanes and runs what is ready
always progresses, and so does one that blocks on that order.

Offsets and counts are in elements. Pure data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import Literal

from .codec import Value, dumps, loads
from .errors import PlanError
from .trees.tree import Collective

FORMAT_VERSION = 1
REDUCTIONS: frozenset[str] = frozenset({"reduce", "allreduce", "reduce_scatter"})
BLOCKED: frozenset[str] = frozenset({"allgather", "gather", "scatter", "reduce_scatter"})


class Call(Value, frozen=True):
    """What was called, as all ranks must agree on it.

    ``counts`` holds one number, the elements of the vector (broadcast, reduce, allreduce) or of one rank's block
    (allgather, gather, scatter); for reduce_scatter it holds every rank's block.
    """

    collective: Collective
    n: int
    counts: tuple[int, ...]
    dtype: str
    op: str = ""
    root: int = -1

    def block(self, rank: int) -> tuple[int, int]:
        """(start, length) of ``rank``'s block in the vector of all blocks; the whole vector if not blocked."""
        if self.collective == "reduce_scatter":
            return sum(self.counts[:rank]), self.counts[rank]
        if self.collective in BLOCKED:
            return rank * self.counts[0], self.counts[0]
        return 0, self.counts[0]

    @property
    def total(self) -> int:
        """Elements of the call's largest buffer: what algorithm bandwidth is counted in."""
        if self.collective == "barrier":
            return 0
        if self.collective == "reduce_scatter":
            return sum(self.counts)
        return self.counts[0] * (self.n if self.collective in BLOCKED else 1)

    @property
    def send_count(self) -> int:
        """Elements that a rank that sends everything it can has in its send buffer."""
        return self.counts[0] if self.collective in ("allgather", "gather") else self.total

    def recv_count(self, rank: int) -> int:
        """Elements of ``rank``'s receive buffer."""
        if self.collective in ("scatter", "reduce_scatter"):
            return self.block(rank)[1]
        return self.total


class Channel(Value, frozen=True):
    """A ring of slots. ``partial`` values travel in the accumulator type, others in the call's type."""

    tree: int
    writer: int
    readers: tuple[int, ...]
    partial: bool = False


class Lane(Value, frozen=True):
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


class Program(Value, frozen=True, dict=True):
    """All lanes of all ranks for one call; or those of one node, with the elements of the job's ``longest`` lane."""

    call: Call
    scheme: str
    chunk: int
    depth: int
    channels: tuple[Channel, ...]
    lanes: tuple[Lane, ...]
    longest: int = 0

    def of(self, rank: int) -> tuple[Lane, ...]:
        """The lanes of ``rank``."""
        return tuple(lane for lane in self.lanes if lane.rank == rank)

    @cached_property
    def steps(self) -> int:
        """Chunks of the longest lane."""
        longest = self.longest or max((lane.count for lane in self.lanes), default=0)
        return -(-longest // self.chunk)

    def chunk_of(self, lane: Lane) -> int:
        """Elements that ``lane`` moves in one step, at most ``chunk``.

        In proportion to its span, so that all lanes need about the same number of steps: trees that share a link get it
        chunk by chunk in turn, and with equal chunks a light tree would take a heavy one's part of it.
        """
        share = -(-lane.count // self.steps)
        return min(self.chunk, -(-share // 64) * 64)

    def to_json(self) -> str:
        """The portable file."""
        return dumps(self, kind="program", version=FORMAT_VERSION)

    @staticmethod
    def from_json(text: str | bytes, source: str = "program") -> Program:
        """Read and check what :meth:`to_json` wrote."""
        return loads(text, Program, kind="program", version=FORMAT_VERSION, source=source).check()

    def check(self) -> Program:
        """Prove the program and return it.

        Proved: lanes and channels fit together, no cyclic wait (module docstring), every contribution is folded
        exactly once, every element of every receive buffer is written exactly once, with the right value.

        Raises:
            PlanError: naming lane, channel, got and wanted.
        """
        if self.chunk < 1 or self.depth < 1:
            raise PlanError(f"chunk {self.chunk} and depth {self.depth} must be at least 1; lower the call again")
        writers, readers = self._wiring()
        values: dict[int, tuple[tuple[int, int], ...]] = {}
        stores: dict[int, list[tuple[int, int, tuple[tuple[int, int], ...]]]] = defaultdict(list)
        for i in self._order(writers):
            lane = self.lanes[i]
            parts = [values[writers[c]] for c in lane.ins]
            own = ((lane.rank, lane.local),) if lane.local is not None else ()
            value = tuple(sorted([*own, *(p for part in parts for p in part)]))
            values[i] = value
            self._check_lane(i, lane, readers)
            if lane.store is not None:
                stores[lane.rank].append((lane.store, lane.count, value))
        for rank in range(self.call.n):
            self._check_stores(rank, sorted(stores[rank]))
        return self

    def _wiring(self) -> tuple[dict[int, int], dict[int, set[int]]]:
        """Lane that writes each channel, and ranks that read it."""
        writers: dict[int, int] = {}
        readers: dict[int, set[int]] = defaultdict(set)
        for i, lane in enumerate(self.lanes):
            for c in (*lane.ins, *lane.outs):
                if not 0 <= c < len(self.channels):
                    raise PlanError(f"lane {i}: channel {c} does not exist; channels are 0..{len(self.channels) - 1}")
            for c in lane.outs:
                if c in writers or self.channels[c].writer != lane.rank:
                    raise PlanError(
                        f"lane {i} of rank {lane.rank}: channel {c} is written by rank {self.channels[c].writer} once"
                    )
                writers[c] = i
            for c in lane.ins:
                if lane.rank in readers[c] or lane.rank not in self.channels[c].readers:
                    raise PlanError(
                        f"lane {i} of rank {lane.rank}: channel {c} is read once by each of {self.channels[c].readers}"
                    )
                readers[c].add(lane.rank)
        for c, channel in enumerate(self.channels):
            if c not in writers or readers[c] != set(channel.readers) or not channel.readers:
                raise PlanError(
                    f"channel {c} of tree {channel.tree}: wants writer {channel.writer} and readers {channel.readers}, "
                    f"has {'a' if c in writers else 'no'} writer and readers {sorted(readers[c])}"
                )
        return writers, readers

    def _order(self, writers: dict[int, int]) -> Iterator[int]:
        """Lane indices so that every lane comes after those it reads from."""
        waits = [{writers[c] for c in lane.ins} for lane in self.lanes]
        for i, before in enumerate(waits):
            for j in before:
                if self.lanes[j].count != self.lanes[i].count:
                    raise PlanError(f"lanes {j} and {i} share a channel but walk {self.lanes[j].count} and "
                                    f"{self.lanes[i].count} elements; both must walk the same span")  # fmt: skip
        after: dict[int, list[int]] = defaultdict(list)
        for i, before in enumerate(waits):
            for j in before:
                after[j].append(i)
        left = [len(before) for before in waits]
        ready = [i for i, k in enumerate(left) if k == 0]
        done = 0
        while ready:
            i = ready.pop()
            done += 1
            yield i
            for j in after[i]:
                left[j] -= 1
                if left[j] == 0:
                    ready.append(j)
        if done != len(self.lanes):
            stuck = [i for i, k in enumerate(left) if k > 0]
            raise PlanError(f"lanes {stuck} wait for one another in a cycle; the trees of this plan are not trees")

    def _check_lane(self, i: int, lane: Lane, readers: dict[int, set[int]]) -> None:
        operands = sorted([*range(len(lane.ins)), *([-1] if lane.local is not None else [])])
        if sorted(lane.fold) != operands or not operands or lane.count < 1:
            raise PlanError(f"lane {i}: fold {lane.fold} over {lane.count} elements must name operands {operands} once")
        if len(operands) > 1 and self.call.collective not in REDUCTIONS:
            raise PlanError(
                f"lane {i}: folds {len(operands)} operands in a {self.call.collective}, which reduces nothing"
            )
        if not lane.outs and lane.store is None:
            raise PlanError(f"lane {i} of rank {lane.rank}: its value goes nowhere")
        partial = self.call.collective in REDUCTIONS and lane.way == "up"
        if any(self.channels[c].partial != partial for c in lane.outs):
            raise PlanError(
                f"lane {i}: way {lane.way} writes {'partial' if partial else 'final'} values; its channels disagree"
            )
        if lane.final != (lane.way == "turn"):
            raise PlanError(f"lane {i}: a fold is final at the turn and nowhere else, got way {lane.way}")

    def _check_stores(self, rank: int, stores: list[tuple[int, int, tuple[tuple[int, int], ...]]]) -> None:
        at = 0
        wanted = expected(self.call, rank)
        for start, length, sources in wanted:
            stop = start + length
            while at < stop:
                if not stores or stores[0][0] != at:
                    raise PlanError(f"rank {rank}: element {at} of its result is written by no lane, or twice")
                first, count, got = stores.pop(0)
                want = tuple(sorted((r, off + first - start) for r, off in sources))
                if first + count > stop or got != want:
                    raise PlanError(
                        f"rank {rank}: elements {first}..{first + count - 1} hold contributions {got}, wanted {want}"
                    )
                at = first + count
        if stores:
            raise PlanError(f"rank {rank}: writes elements {stores[0][0]}.. of its result, which is nobody's")


def expected(call: Call, rank: int) -> list[tuple[int, int, tuple[tuple[int, int], ...]]]:
    """What ``rank`` must receive: (start, length, contributions as (rank, offset in its send buffer)), by start."""
    everyone = tuple(range(call.n))
    kind = call.collective
    pieces: list[tuple[int, int, tuple[tuple[int, int], ...]]] = []
    if kind == "allreduce" or (kind == "reduce" and rank == call.root):
        pieces = [(0, call.counts[0], tuple((r, 0) for r in everyone))]
    elif kind == "broadcast" and rank != call.root:
        pieces = [(0, call.counts[0], ((call.root, 0),))]
    elif kind == "allgather" or (kind == "gather" and rank == call.root):
        pieces = [(*call.block(r), ((r, 0),)) for r in everyone]
    elif kind == "scatter":
        start, length = call.block(rank)
        pieces = [(0, length, ((call.root, start),))]
    elif kind == "reduce_scatter":
        start, length = call.block(rank)
        pieces = [(0, length, tuple((r, start) for r in everyone))]
    return [piece for piece in pieces if piece[1] > 0]
