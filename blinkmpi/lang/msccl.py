"""MSCCLang's names: programs of msccl-tools run here once their import lines say ``from blinkmpi.lang.msccl import *``.

A program means here what it means there: line by line, references are places, a stale one reads the new content, a
place that was never written is None, threadblocks and channels are hints. But it is executed **by value**: each copy
and each reduction makes a value of a :class:`~blinkmpi.lang.flow.Flow`, so what a line says cannot be lost between
lines in a compiler. And a wrong program is refused: :func:`XML` and :func:`Check` raise a
:class:`~blinkmpi.errors.PlanError` that names the place and the line, where MSCCLang prints a message and goes on.

Written against msccl-tools 030a750 (``msccl/language``), its examples among the tests.
"""

import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from ..errors import PlanError
from .algorithms import Algorithm
from .flow import Flow, Goal, Node, goal_of
from .msccl_collectives import (
    NAMED,
    AllGather,
    AllReduce,
    AllToAll,
    Buffer,
    Chunk,
    Collective,
    Content,
    MscclBuffer,
    MscclCollective,
    Places,
    ReduceChunk,
    ReduceScatter,
    valued,
)
from .xml.file import SLOTS

__all__ = [
    "XML", "AllGather", "AllReduce", "AllToAll", "Buffer", "Check", "Chunk", "Collective", "MSCCLProgram",
    "ReduceChunk", "ReduceScatter", "ThreadblockPolicy", "chunk", "fully_connected",
]  # fmt: skip


class ThreadblockPolicy(Enum):
    """Who places thread blocks in MSCCLang; here always the exporter."""

    auto = "auto"
    manual = "manual"


class Network(Protocol):
    """What is asked of a topology."""

    def num_nodes(self) -> int:
        """How many ranks there are."""

    def link(self, src: int, dst: int) -> float:
        """More than 0 if ``src`` can send to ``dst``."""


@dataclass(frozen=True, slots=True)
class FullyConnected:
    """Every rank can send to every other one."""

    ranks: int

    def num_nodes(self) -> int:
        """How many ranks there are."""
        return self.ranks

    def link(self, src: int, dst: int) -> int:
        """1 between two ranks."""
        return int(src != dst)


def fully_connected(num_nodes: int) -> FullyConnected:
    """A topology in which every rank can send to every other one."""
    return FullyConnected(num_nodes)


# ---------------------------------------------------------------- programs


class MSCCLProgram:
    """A program, as ``with MSCCLProgram(...):``.

    Args:
        instances: pieces into which :func:`XML` cuts each chunk.
        threadblock_policy, interleaved_replication, instr_fusion, check_xml, dependence_nop: of MSCCLang's compiler;
            they change nothing here, the exporter always fuses, and what it writes is always checked.
    """

    def __init__(
        self, name: str, topo: Network, collective: MscclCollective, instances: int, protocol: str = "Simple",
        threadblock_policy: ThreadblockPolicy = ThreadblockPolicy.auto, interleaved_replication: bool = True,
        instr_fusion: bool = True, check_xml: bool = True, dependence_nop: bool = False,
    ) -> None:  # fmt: skip
        if protocol not in SLOTS:
            raise PlanError(f"{_line()}: protocol {protocol!r}; expected one of {', '.join(SLOTS)}")
        self.name, self.topo, self.collective, self.instances = name, topo, collective, instances
        self.protocol, self.num_ranks = protocol, topo.num_nodes()
        if collective.num_ranks != self.num_ranks:
            counts = f"{collective.num_ranks} ranks on a topology of {self.num_ranks}"
            raise PlanError(f"{_line()}: a collective of {counts}; give both the same number")
        self.channels = 1  # as many as the program's hints name
        self.buffers: list[dict[Any, Any]] = collective.init_buffers()
        self.given = [len(buffers[Buffer.input]) for buffers in self.buffers]
        self._nodes: list[Node] = []
        self._sent: dict[tuple[int, int], int] = {}  # an input chunk that left its rank: its node
        for rank, buffers in enumerate(self.buffers):
            for index, content in enumerate(list(buffers[Buffer.input])):
                if content is not None:
                    started = valued(content, ~index)
                    buffers[Buffer.input][index] = started
                    where, at = collective.get_buffer_index(rank, Buffer.input, index)
                    buffers[where][at] = started
            for buffer, places in buffers.items():
                for index, content in enumerate(places):
                    if content is not None and content.value is None:
                        what = f"{type(collective).__name__} has a chunk in {_name(buffer)}[{index}] of rank {rank}"
                        raise PlanError(f"{_line()}: {what} at the start; put chunks into the input alone")

    def __enter__(self) -> "MSCCLProgram":
        if _programs:
            raise PlanError(f"{_line()}: a program inside of another one; end {_programs[0].name!r} first")
        _programs.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _programs.clear()

    def flow(self) -> Flow:
        """What the program computes, as far as it has come; not proved."""
        goal = self._goal()
        outputs = []
        for rank, want in enumerate(goal.wanted):
            contents = [self.content(rank, Buffer.output, chunk) for chunk in range(len(want))]
            outputs.append([None if c is None else c.value for c in contents])
        live: set[int] = set()
        todo = [value for row in outputs for value in row if value is not None and value >= 0]
        while todo:
            value = todo.pop()
            if value not in live:
                live.add(value)
                todo += [operand for operand in self._nodes[value].operands if operand >= 0]
        number = {old: new for new, old in enumerate(sorted(live))}

        def named(value: int | None) -> int | None:
            return value if value is None else number.get(value, value)

        nodes = [self._nodes[old] for old in sorted(live)]
        kept = tuple(Node(n.rank, tuple(number.get(o, o) for o in n.operands), n.where) for n in nodes)
        return Flow(goal, kept, tuple(tuple(map(named, row)) for row in outputs))

    def algorithm(self) -> Algorithm:
        """The program as a value that runs on ranks: ``Communicator(comm, algorithms=[program.algorithm()])``.

        Raises:
            PlanError: if the program is wrong, as :func:`Check`.
        """
        self.check()
        same = self.buffers[0].get(Buffer.output) is self.buffers[0][Buffer.input]
        in_place = same or (self.collective.inplace and type(self.collective) in NAMED.values())
        return Algorithm.of(self.name, self.flow(), inplace=in_place)

    def check(self) -> None:
        """Prove the program, a custom one by its collective's own ``check``."""
        if self.collective.check(self) is False:
            raise PlanError(
                f"{_line()}: {self.name}: the check of {type(self.collective).__name__} says that it is wrong"
            )

    def content(self, rank: int, buffer: Any, index: int) -> Any:
        """What is in a place; None where nothing was written."""
        buffer, index = self.collective.get_buffer_index(rank, buffer, index)
        places = self.buffers[rank].get(buffer, ())
        return places[index] if 0 <= index < len(places) else None

    def put(self, rank: int, buffer: Any, index: int, content: Content | None) -> None:
        """Write a place."""
        places = self.buffers[rank][buffer]
        if not isinstance(places, Places) and not 0 <= index < len(places):
            raise PlanError(
                f"{_line()}: rank {rank} has no {_name(buffer)}[{index}]; its chunks are 0..{len(places) - 1}"
            )
        places[index] = content

    def send(self, src: int, content: Content, dst: int) -> Content:
        """The same content on another rank; on its own it stays the same value."""
        return content if src == dst else valued(content, self._make(dst, self._anywhere(src, content)))

    def fold(self, dst: int, old: Content, src: int, content: Content) -> Content:
        """What is there, and what comes, as one."""
        value = content.value if src == dst else self._anywhere(src, content)
        assert old.value is not None
        assert value is not None
        return valued(old.reduce(dst, content), self._make(dst, old.value, value))

    def _anywhere(self, rank: int, content: Content) -> int:
        """A reference to a content that is good on other ranks."""
        value = content.value
        assert value is not None
        if value >= 0:
            return value
        if (rank, value) not in self._sent:
            self._sent[rank, value] = self._make(rank, value)
        return self._sent[rank, value]

    def _make(self, rank: int, *operands: int) -> int:
        self._nodes.append(Node(rank, operands, _line()))
        return len(self._nodes) - 1

    def _goal(self) -> Goal:
        """What the collective wants; of a custom one, what is there."""
        if type(self.collective) in NAMED.values():
            return goal_of(self.collective.name, self.num_ranks, self.collective.chunk_factor)
        wanted = []
        for rank, buffers in enumerate(self.buffers):
            held = [self.content(rank, Buffer.output, c) for c in range(len(buffers[Buffer.output]))]
            wanted.append(tuple(() if h is None else tuple(sorted(_origins(h))) for h in held))
        return Goal("custom", self.num_ranks, max(1, *self.given), -1, tuple(self.given), tuple(wanted))


def _origins(content: Content) -> list[tuple[int, int]]:
    chunks = content.chunks if isinstance(content, ReduceChunk) else [content]
    return [(chunk.origin_rank, chunk.origin_index) for chunk in chunks]


_programs: list[MSCCLProgram] = []  # the one whose block is being run


def current() -> MSCCLProgram:
    """The program that is being written; PlanError outside of one."""
    if not _programs:
        raise PlanError(f"{_line()}: outside of a program; write it in a block of with MSCCLProgram(...)")
    return _programs[0]


def _line() -> str:
    """The line of the user's program that is being run."""
    frame = sys._getframe()
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _name(buffer: Any) -> str:
    return buffer.name if isinstance(buffer, MscclBuffer) else str(buffer)


@dataclass(frozen=True, slots=True)
class PlaceReference:
    """``size`` chunks of a buffer from ``index`` on: a place, whatever is in it when it is read."""

    rank: int
    buffer: Any
    index: int
    size: int
    prog: MSCCLProgram = field(compare=False, repr=False)

    def copy(
        self, dst: int, buffer: Any = None, index: int = -1, sendtb: int = -1, recvtb: int = -1, ch: int = -1
    ) -> "PlaceReference | None":
        """Copy to a place on rank ``dst``: the same one, or that of a buffer; at the end of scratch without index.

        Returns:
            The copy; None where it would be a copy onto itself.
        """
        prog, buffers = self.prog, self._buffers(dst)
        self._reach(self.rank, dst, ch)
        if buffer is None:
            buffer, index = self.buffer, self.index if index == -1 else index
        if not isinstance(buffer, MscclBuffer):
            scratch = buffers.setdefault(buffer, Places())
            index = len(scratch) if index == -1 else index
        elif index == -1:
            raise PlanError(f"{_line()}: copy to {_name(buffer)} without index; say which chunk")
        # As MSCCLang: the sender's block where buffers in place are one memory.
        buffer, index = prog.collective.get_buffer_index(self.rank, buffer, index)
        made = _reference(prog, dst, buffer, index, self.size)
        if made == self:
            return None
        contents = self._contents()
        for i, content in enumerate(contents):
            prog.put(dst, made.buffer, made.index + i, None if content is None else prog.send(self.rank, content, dst))
        return made

    def reduce(self, other: "PlaceReference", sendtb: int = -1, recvtb: int = -1, ch: int = -1) -> "PlaceReference":
        """Fold what is at ``other`` into this place."""
        if not isinstance(other, PlaceReference) or other.size != self.size:
            size = other.size if isinstance(other, PlaceReference) else None
            what = f"{size} chunks into {self.size}" if size is not None else f"a {type(other).__name__}"
            raise PlanError(f"{_line()}: reduce of {what}; expected what chunk() returns, of the same size")
        self._reach(other.rank, self.rank, ch)
        for i, (old, content) in enumerate(zip(self._contents(), other._contents(), strict=True)):
            for ref, there in ((self, old), (other, content)):
                if there is None:
                    raise PlanError(f"{_line()}: reduce reads {_name(ref.buffer)}[{ref.index + i}] of rank {ref.rank}, "
                                    "where nothing was written; write it first")  # fmt: skip
            self.prog.put(self.rank, self.buffer, self.index + i, self.prog.fold(self.rank, old, other.rank, content))
        return self

    def split(self, num: int) -> "list[PlaceReference]":
        """``num`` parts of the same size."""
        if num < 1 or self.size % num:
            raise PlanError(f"{_line()}: split of {self.size} chunks into {num} parts; expected a divisor")
        size = self.size // num
        return [_reference(self.prog, self.rank, self.buffer, self.index + i * size, size) for i in range(num)]

    def group(self, other: "PlaceReference") -> "PlaceReference":
        """All chunks from the first of both to the last."""
        if (self.rank, self.buffer) != (other.rank, other.buffer):
            places = f"{_name(self.buffer)} of rank {self.rank} and {_name(other.buffer)} of rank {other.rank}"
            raise PlanError(f"{_line()}: group of {places}; expected one buffer of one rank")
        first, end = min(self.index, other.index), max(self.index + self.size, other.index + other.size)
        return PlaceReference(self.rank, self.buffer, first, end - first, self.prog)

    def get_origin_index(self, index: int = 0) -> int:
        """Of which chunk of an input it is."""
        return self._chunk(index).origin_index

    def get_origin_rank(self, index: int = 0) -> int:
        """Of which rank's input it is."""
        return self._chunk(index).origin_rank

    def get_dst_index(self, index: int = 0) -> int:
        """As which chunk it is to end."""
        return self._chunk(index).dst_index

    def get_dst_rank(self, index: int = 0) -> int:
        """On which rank it is to end."""
        return self._chunk(index).dst_rank

    def _chunk(self, index: int) -> Chunk:
        content = self.prog.content(self.rank, self.buffer, self.index + index)
        if not isinstance(content, Chunk):
            what = "nothing was written" if content is None else "several chunks are folded"
            raise PlanError(f"{_line()}: {_name(self.buffer)}[{self.index + index}] of rank {self.rank}, where {what}; "
                            "expected one chunk of an input")  # fmt: skip
        return content

    def _contents(self) -> list[Any]:
        return [self.prog.content(self.rank, self.buffer, self.index + i) for i in range(self.size)]

    def _buffers(self, rank: int) -> dict[Any, Any]:
        if rank not in range(self.prog.num_ranks):
            raise PlanError(f"{_line()}: rank {rank}; the program has ranks 0..{self.prog.num_ranks - 1}")
        return self.prog.buffers[rank]

    def _reach(self, src: int, dst: int, ch: int) -> None:
        self.prog.channels = max(self.prog.channels, ch + 1)
        if src != dst and not self.prog.topo.link(src, dst):
            raise PlanError(f"{_line()}: the topology has no link from rank {src} to rank {dst}")


def _reference(prog: MSCCLProgram, rank: int, buffer: Any, index: int, size: int) -> PlaceReference:
    buffer, index = prog.collective.get_buffer_index(rank, buffer, index)
    return PlaceReference(rank, buffer, index, size, prog)


def chunk(rank: int, buffer: Any, index: int, size: int = 1) -> PlaceReference | None:
    """A reference to ``size`` chunks of a buffer; None if nothing was written there."""
    prog = current()
    if rank not in range(prog.num_ranks):
        raise PlanError(f"{_line()}: rank {rank}; the program has ranks 0..{prog.num_ranks - 1}")
    made = _reference(prog, rank, buffer, index, size)
    return None if prog.content(rank, made.buffer, made.index) is None else made


def Check() -> bool:
    """Prove the program, a custom one by its own ``check``.

    Raises:
        PlanError: if it is wrong, naming the place and the line that made what is there.
    """
    current().check()
    return True


def XML() -> None:
    """Print MSCCL's XML of the program.

    Raises:
        PlanError: if the program is wrong, as :func:`Check`.
    """
    prog = current()
    algorithm = prog.algorithm()
    print(algorithm.to_xml(protocol=prog.protocol, channels=prog.channels, instances=prog.instances), end="")
