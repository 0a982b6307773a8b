"""The language: a Python function of the number of ranks, run once, says which chunk goes where.

``chunk(rank, buffer, index, size)`` names places; ``copy``, ``reduce``, ``split`` and ``group`` work on them, in the
order of the lines, and have MSCCLang's names and meaning. What is collected are values (:class:`.flow.Flow`): writing
to ``input`` never touches a user's send buffer, and any buffer besides ``input`` and ``output`` is a name of scratch
places that cost nothing.

It is stricter than MSCCLang. Each of these is an error that names the line of the user's program: a reference whose
place was overwritten since, a chunk that was never written, a contribution that is folded twice, a result that is
missing or wrong. Nothing here knows counts, types or machines.
"""

import operator
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from pathlib import PurePath
from typing import NamedTuple

from ..errors import PlanError
from ..program.call import REDUCTIONS
from ..util.text import plural, quoted, ranks_text
from .flow import Contribution, Flow, Goal, Node, named, several, wrong_result

MOST_VALUES = 1 << 23  # of a program, which may have lost its way
MOST_PLACES = 1 << 24  # of a scratch buffer on one rank
INPUT = "the call's input"  # who wrote what is there before the first line


class BufferName(StrEnum):
    """The buffers of a call; any other name is one of scratch places."""

    input = "input"
    output = "output"


Buffer = BufferName  # for users; inside the package a buffer is one of a call's (program/memory.py)


class _Content(NamedTuple):
    """What a place holds: a reference to a value on the place's rank, what is folded in it, and who wrote it."""

    reference: int
    parts: frozenset[Contribution]
    where: str


class _Place(NamedTuple):
    rank: int
    buffer: str
    chunk: int

    def __str__(self) -> str:
        return f"rank {self.rank}'s {self.buffer}[{self.chunk}]"


class Tracer:
    """Collects the flow of one program.

    Args:
        name: of the algorithm, for messages of what no line does.
        inplace: whether ``output`` is another name of ``input``, as the collective's buffers are one in MPI. Results
            are taken from there.
    """

    def __init__(self, name: str, goal: Goal, *, inplace: bool) -> None:
        self.name, self.goal, self.inplace = name, goal, inplace
        self._nodes: list[Node] = []
        self._sent: dict[Contribution, int] = {}  # the values that are inputs, to be used on other ranks
        self._contents: dict[_Place, _Content] = {}
        self._scratch: dict[tuple[int, str], int] = {}  # places that a scratch buffer has by now
        self._read: set[str] = set()  # buffers that something was taken from
        self._sizes = {"input": max(goal.given), "output": max(map(len, goal.wanted))}
        self._reduces = goal.collective in REDUCTIONS or goal.collective == "custom"
        for rank, count in enumerate(goal.given):
            for i in range(count):
                part = frozenset({(rank, i)})
                self._contents[self._place(rank, "input", i)] = _Content(~i, part, INPUT)

    def flow(self) -> Flow:
        """What was collected; it is not proved yet.

        Raises:
            PlanError: naming the line that wrote a wrong result, or where a missing one stopped.
        """
        outputs: list[tuple[int | None, ...]] = []
        lacking: list[tuple[int, int]] = []  # (rank, chunk) that nothing has written
        for rank, wanted in enumerate(self.goal.wanted):
            found: list[int | None] = []
            for i, want in enumerate(wanted):
                content = self._contents.get(self._place(rank, "output", i)) if want else None
                right = content is not None and len(content.parts) == len(want) and content.parts.issuperset(want)
                if content is not None and content.where != INPUT and not right:
                    raise wrong_result(content.where, rank, i, content.parts, want, self._complete(rank, want))
                if want and not right:
                    lacking.append((rank, i))
                found.append(content.reference if content is not None else None)
            outputs.append(tuple(found))
        if lacking:
            raise self._missing(lacking)
        return Flow(self.goal, tuple(self._nodes), tuple(outputs))

    def _missing(self, lacking: list[tuple[int, int]]) -> PlanError:
        """What to raise for results that no line has written: who lacks which, and how far it came."""
        rank, index = lacking[0]
        want = self.goal.wanted[rank][index]
        others = sorted({r for r, _ in lacking[1:]})
        more = f" (also missing: {plural(len(lacking) - 1, 'more result')} of {ranks_text(others)})" if others else ""
        remedy = self._unread() or self._complete(rank, want) or self._begun(want)
        return PlanError(f"{self.name}: rank {rank}: nothing writes chunk {index} of its output; wanted "
                         f"{several(want)}{more}{remedy}")  # fmt: skip

    def _complete(self, rank: int, want: tuple[Contribution, ...]) -> str:
        """The place that a line has given what a rank wants, if there is one."""
        for place, content in self._contents.items():
            if content.where != INPUT and content.parts == {*want}:
                return f"; {place} has it ({content.where}): copy it from there to rank {rank}"
        return ""

    def _begun(self, want: tuple[Contribution, ...]) -> str:
        """The place that a line has given the most of what is wanted."""
        begun = [(place, content) for place, content in self._contents.items()
                 if content.where != INPUT and content.parts.issubset(want)]  # fmt: skip
        if not begun:
            return '; copy that to "output", or with inplace=True to "input"'
        place, content = max(begun, key=lambda pair: len(pair[1].parts))
        return (f"; {place} has {len(content.parts)} of these {len(want)} ({content.where}): fold the others into it, "
                "and copy that")  # fmt: skip

    def _unread(self) -> str:
        """The scratch buffer from which nothing is taken, if there is one."""
        for place, content in self._contents.items():
            if place.buffer not in self._sizes and place.buffer not in self._read:
                typo = get_close_matches(place.buffer.lower(), self._sizes)
                what = f"probably a typo of {typo[0]!r}" if typo else 'copy what it has to "output"'
                return f"; nothing reads the buffer {quoted(place.buffer)}, which {content.where} writes: {what}"
        return ""

    # ---- places

    def _place(self, rank: int, buffer: str, index: int) -> _Place:
        """Where a buffer's chunk lies; in place, the two names of one chunk give the same."""
        if self.inplace:
            chunks = self.goal.chunks
            match self.goal.collective:
                case "allgather" | "gather" if buffer == "input":
                    return _Place(rank, "output", rank * chunks + index)
                case "scatter" | "reduce_scatter" if buffer == "output":
                    return _Place(rank, "input", rank * chunks + index)
                case "allgather" | "gather" | "scatter" | "reduce_scatter":
                    pass
                case _ if buffer == "output":
                    return _Place(rank, "input", index)
        return _Place(rank, str(buffer), index)

    def places(self, rank: object, buffer: object, index: object, size: object, where: str) -> list[_Place]:
        """The places that a user names.

        Raises:
            PlanError: for a rank, a buffer or chunks that there are not.
        """
        at, first, count = whole(rank), whole(index), whole(size)
        if at is None or not 0 <= at < self.goal.n:
            raise PlanError(f"{where}: rank {quoted(rank)}; expected one of 0..{self.goal.n - 1}")
        if not isinstance(buffer, str) or not buffer:
            raise PlanError(f'{where}: buffer {quoted(buffer)}; expected "input", "output" or a name for scratch')
        if first is None or count is None or first < 0 or count < 1:
            raise PlanError(f"{where}: chunk {quoted(index)}, size {quoted(size)}; expected numbers, from 0 and 1 on")
        most = self._sizes.get(buffer, MOST_PLACES)
        if first + count > most:
            what = "more chunks, or a name of scratch for other places" if buffer in self._sizes else "smaller numbers"
            raise PlanError(f"{where}: {_range(first, count)} of rank {at}'s {buffer}, which has {most}; use {what}")
        return [self._place(at, buffer, i) for i in range(first, first + count)]

    def target(self, of: "Ref", rank: object, buffer: str | None, index: int | None, where: str) -> list[_Place]:
        """Where a copy goes: without buffer and index to the same place, in scratch without index to its end."""
        there = self.places(rank, of.buffer, 0, 1, where)[0].rank
        index = None if index == -1 else index
        if buffer is None and index is None:
            return [place._replace(rank=there) for place in of._places]
        name = of.buffer if buffer is None else buffer
        if index is None and name in ("input", "output"):
            raise PlanError(f"{where}: a copy to {name} without an index; say which chunk")
        first = self._scratch.get((there, name), 0) if index is None else index
        return self.places(there, name, first, of.size, where)

    def read(self, places: Sequence[_Place], where: str) -> "Ref":
        """A reference to what places hold.

        Raises:
            PlanError: for a chunk that was never written.
        """
        for place in places:
            if place not in self._contents:
                raise PlanError(f"{where}: {place} was never written; copy a chunk there first")
        return Ref(self, places, [self._contents[place] for place in places], where)

    def write(self, places: Sequence[_Place], contents: Sequence[_Content], where: str) -> "Ref":
        """Write, and refer to it."""
        for place, content in zip(places, contents, strict=True):
            self._contents[place] = content
            if place.buffer not in self._sizes:
                key = place.rank, place.buffer
                self._scratch[key] = max(self._scratch.get(key, 0), place.chunk + 1)
        return Ref(self, places, contents, where)

    def check(self, ref: "Ref", where: str) -> None:
        """Raise PlanError for a reference of another program, or to what is no longer there."""
        if ref._tracer is not self:
            raise PlanError(f"{where}: this reference is of another program; take it with chunk() in this one")
        for place, content in zip(ref._places, ref._contents, strict=True):
            now = self._contents[place]
            if now is not content:
                raise PlanError(
                    f"{where}: stale reference: {place} was overwritten at {now.where}, after the reference was taken "
                    f"at {ref._where}; take it again with chunk({place.rank}, {place.buffer!r}, {place.chunk})"
                )

    def taken_from(self, ref: "Ref") -> None:
        """Note that something is read from a buffer."""
        self._read.add(ref.buffer)

    # ---- values

    def copied(self, content: _Content, rank: int, to: int, where: str) -> _Content:
        """A value of ``rank`` on another rank, or on the same, where it stays the value that it is."""
        if rank == to:
            return content._replace(where=where)
        return _Content(self._add(to, (self._anywhere(content, rank),), where), content.parts, where)

    def folded(self, one: _Content, rank: int, other: _Content, from_rank: int, where: str) -> _Content:
        """``one op other`` on ``rank``.

        Raises:
            PlanError: for what is folded twice, chunks that need not have the same length, and a collective that
                reduces nothing.
        """
        if not self._reduces:
            raise PlanError(f"{where}: a reduction in {self.goal.collective}, which reduces nothing; copy instead")
        if not one.parts.isdisjoint(other.parts):
            twice = named(min(one.parts & other.parts))
            raise PlanError(f"{where}: {twice} is folded twice on rank {rank}; fold every contribution once")
        (_, a), (_, b) = min(one.parts), min(other.parts)
        if a != b and self.goal.collective != "custom":
            raise PlanError(
                f"{where}: folds {named(min(other.parts))} into chunk {a}: they may differ in length, and no "
                f"{self.goal.collective} wants it; fold chunks of one number"
            )
        operand = other.reference if from_rank == rank else self._anywhere(other, from_rank)
        return _Content(self._add(rank, (one.reference, operand), where), one.parts | other.parts, where)

    def _anywhere(self, content: _Content, rank: int) -> int:
        """The number of a value, by which other ranks can use it."""
        if content.reference >= 0:
            return content.reference
        key = rank, ~content.reference
        if key not in self._sent:
            self._sent[key] = self._add(rank, (content.reference,), content.where)
        return self._sent[key]

    def _add(self, rank: int, operands: tuple[int, ...], where: str) -> int:
        if len(self._nodes) == MOST_VALUES:
            raise PlanError(f"{where}: more than {MOST_VALUES} values; look for a loop without end, or take fewer "
                            "chunks, which may be long")  # fmt: skip
        self._nodes.append(Node(rank, operands, where))
        return len(self._nodes) - 1


class Ref:
    """Chunks in consecutive places of a rank, as they were when the reference was taken."""

    def __init__(self, tracer: Tracer, places: Sequence[_Place], contents: Sequence[_Content], where: str) -> None:
        self._tracer, self._places, self._contents, self._where = tracer, tuple(places), tuple(contents), where

    @property
    def rank(self) -> int:
        """The rank."""
        return self._places[0].rank

    @property
    def buffer(self) -> str:
        """The buffer; in place, the larger one of the call's."""
        return self._places[0].buffer

    @property
    def index(self) -> int:
        """The first chunk in the buffer."""
        return self._places[0].chunk

    @property
    def size(self) -> int:
        """How many chunks."""
        return len(self._places)

    def __repr__(self) -> str:
        return f"chunk({self.rank}, {self.buffer!r}, {self.index}, {self.size})"

    def copy(
        self, dst: int, buffer: str | None = None, index: int | None = None, sendtb: int = -1, recvtb: int = -1,
        ch: int = -1,
    ) -> "Ref":  # fmt: skip
        """Copy to ``dst``, and return the reference there.

        Args:
            buffer, index: the first place; both left out: the same places. Scratch without an index: at its end.
            sendtb, recvtb, ch: MSCCLang's hints, of which nothing is made: stages are not bound to thread blocks.
        """
        where, tracer = _entered()
        tracer.check(self, where)
        places = tracer.target(self, dst, buffer, index, where)
        if tuple(places) == self._places:
            return self
        tracer.taken_from(self)
        contents = [tracer.copied(content, self.rank, places[0].rank, where) for content in self._contents]
        return tracer.write(places, contents, where)

    def reduce(self, other: "Ref", sendtb: int = -1, recvtb: int = -1, ch: int = -1) -> "Ref":
        """Fold ``other``, on any rank, into these places: ``self = self op other``. Returns self, which stays valid."""
        where, tracer = _entered()
        if not isinstance(other, Ref) or other.size != self.size:
            raise PlanError(f"{where}: {self!r}.reduce({other!r}): expected a reference of {self.size} chunks")
        tracer.check(self, where)
        tracer.check(other, where)
        tracer.taken_from(other)
        contents = [
            tracer.folded(one, self.rank, two, other.rank, where)
            for one, two in zip(self._contents, other._contents, strict=True)
        ]
        tracer.write(self._places, contents, where)
        self._contents, self._where = tuple(contents), where
        return self

    def split(self, num: int) -> list["Ref"]:
        """``num`` references to equal parts."""
        where, tracer = _entered()
        tracer.check(self, where)
        parts = whole(num)
        if parts is None or parts < 1 or self.size % parts:
            raise PlanError(f"{where}: {self!r}.split({num!r}): expected a divisor of {self.size}")
        step = self.size // parts
        return [
            Ref(tracer, self._places[i : i + step], self._contents[i : i + step], where)
            for i in range(0, self.size, step)
        ]

    def group(self, other: "Ref") -> "Ref":
        """The span of both, which lie in one buffer of one rank."""
        where, tracer = _entered()
        if not isinstance(other, Ref) or (self.rank, self.buffer) != (other.rank, other.buffer):
            raise PlanError(f"{where}: {self!r}.group({other!r}): expected two references to one buffer of one rank")
        tracer.check(self, where)
        tracer.check(other, where)
        first = min(self.index, other.index)
        end = max(self.index + self.size, other.index + other.size)
        return tracer.read([self._places[0]._replace(chunk=i) for i in range(first, end)], where)

    def get_origin_rank(self) -> int:
        """The rank whose input the first chunk is."""
        return self._origin()[0]

    def get_origin_index(self) -> int:
        """Which chunk of that rank's input it is."""
        return self._origin()[1]

    def get_dst_rank(self) -> int:
        """The rank that wants the first chunk, if it is one rank."""
        return self._destination()[0]

    def get_dst_index(self) -> int:
        """Which chunk of that rank's output it is to be."""
        return self._destination()[1]

    def _origin(self) -> Contribution:
        parts = self._contents[0].parts
        if len(parts) > 1:
            raise PlanError(f"{_where()}: {self!r} is a fold of {len(parts)} contributions; it has no one origin")
        return min(parts)

    def _destination(self) -> tuple[int, int]:
        parts, wanted = self._contents[0].parts, self._tracer.goal.wanted
        found = [(rank, i) for rank, outs in enumerate(wanted) for i, want in enumerate(outs) if parts <= {*want}]
        if len(found) != 1:
            raise PlanError(f"{_where()}: {self!r} belongs in {len(found)} places of the results; expected one")
        return found[0]


_current: ContextVar[Tracer | None] = ContextVar("blinkmpi.lang", default=None)
collecting = _current.set
collected = _current.reset


def chunk(rank: int, buffer: str, index: int, size: int = 1) -> Ref:
    """Refer to ``size`` chunks from ``index`` on of a rank's buffer.

    Raises:
        PlanError: outside of an algorithm, for places that there are not, and for chunks that were never written.
    """
    where, tracer = _entered()
    return tracer.read(tracer.places(rank, buffer, index, size, where), where)


def _entered() -> tuple[str, Tracer]:
    """The line of the user's program, and what collects that program; PlanError outside of one."""
    where, tracer = _where(), _current.get()
    if tracer is None:
        raise PlanError(f"{where}: outside of an algorithm; do this in a function with @lang.algorithm(...)")
    return where, tracer


def _where() -> str:
    """The line of the user's program that is being run, as ``ring.py:7``."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") == __name__ and frame.f_back is not None:
        frame = frame.f_back
    return f"{_name(frame.f_code.co_filename)}:{frame.f_lineno}"


@lru_cache
def _name(path: str) -> str:
    return PurePath(path).name


def whole(number: object) -> int | None:
    """A whole number of any type, such as NumPy's; None for anything else."""
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        return None


def _range(index: int, size: int) -> str:
    return f"chunk {index}" if size == 1 else f"chunks {index}..{index + size - 1}"
