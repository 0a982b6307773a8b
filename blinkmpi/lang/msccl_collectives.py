"""MSCCLang's buffers, chunks and collectives, as :mod:`.msccl` gives them to its programs. Pure data.

A place of a buffer holds a :class:`Chunk` or a :class:`ReduceChunk`, or None. Both know their reference in the flow
that the program makes, on the rank where they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from .flow import Flow, goal_of


class MscclBuffer(Enum):
    """The user's two buffers; any other key of a buffer is a scratch buffer of that name."""

    input = "i"
    output = "o"
    scratch = "s"


Buffer = MscclBuffer


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A chunk of a rank's input: where it comes from, and where it is to end (-1 for several places).

    ``value`` is its reference in the flow, on the rank where it is.
    """

    origin_rank: int
    origin_index: int
    dst_rank: int = -1
    dst_index: int = -1
    value: int | None = field(default=None, compare=False, repr=False)

    def reduce(self, dst: int, chunk: "Chunk | ReduceChunk") -> "ReduceChunk":
        """This chunk and others, as one."""
        return ReduceChunk(dst, [self]).reduce(dst, chunk)

    def __eq__(self, other: object) -> bool:
        """Chunks are equal that come from one place."""
        return isinstance(other, Chunk) and self._origin == other._origin

    def __hash__(self) -> int:
        return hash(self._origin)

    def __lt__(self, other: "Chunk") -> bool:
        return self._origin < other._origin

    @property
    def _origin(self) -> tuple[int, int]:
        return self.origin_rank, self.origin_index


class ReduceChunk:
    """Chunks that were reduced to one; equal to any other one of the same chunks."""

    def __init__(self, creation_rank: int, chunks: list[Chunk], value: int | None = None) -> None:
        self.creation_rank, self.chunks, self.value = creation_rank, chunks, value

    def reduce(self, dst: int, chunk: "Chunk | ReduceChunk") -> "ReduceChunk":
        """These chunks and others, as one."""
        more = chunk.chunks if isinstance(chunk, ReduceChunk) else [chunk]
        return ReduceChunk(self.creation_rank, [*self.chunks, *more])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReduceChunk) and sorted(self.chunks) == sorted(other.chunks)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.chunks)))

    def __repr__(self) -> str:
        return f"ReduceChunk({sorted(self.chunks)})"


Content = Chunk | ReduceChunk


def valued(content: Content, value: int) -> Content:
    """The same content as another value of the flow."""
    if isinstance(content, ReduceChunk):
        return ReduceChunk(content.creation_rank, content.chunks, value)
    return replace(content, value=value)


class Places(list[Any]):
    """A scratch buffer: it grows to what is written in it."""

    def __setitem__(self, index: Any, content: Any) -> None:
        self.extend([None] * (index + 1 - len(self)))
        super().__setitem__(index, content)


# ---------------------------------------------------------------- collectives


class MscclCollective:
    """Base of the collectives; a custom one has ``init_buffers`` and ``check``."""

    name = "custom"

    def __init__(self, num_ranks: int, chunk_factor: int, inplace: bool) -> None:
        self.num_ranks, self.chunk_factor, self.inplace = num_ranks, chunk_factor, inplace

    def init_buffers(self) -> list[dict[Any, list[Any]]]:
        """For each rank, its buffers with the chunks that are in them at the start."""
        goal = goal_of(self.name, self.num_ranks, self.chunk_factor)
        found = []
        for rank, (given, wanted) in enumerate(zip(goal.given, goal.wanted, strict=True)):
            inputs: list[Any] = [Chunk(rank, index, *self._end(rank, index)) for index in range(given)]
            buffers = {Buffer.input: inputs, Buffer.output: [None] * len(wanted)}
            if self.inplace:
                buffers = self._one_memory(rank, inputs, len(wanted))
            found.append(buffers)
        return found

    def check(self, prog: Any) -> bool:
        """Whether the program's buffers hold what they should in the end.

        Raises:
            PlanError: naming the place, and the line that made what is there.
        """
        flow: Flow = prog.flow()
        flow.prove()
        return True

    def get_buffer_index(self, rank: int, buffer: Any, index: int) -> tuple[Any, int]:
        """Where a place is in fact: in place, input and output are one memory."""
        return buffer, index

    def _end(self, rank: int, index: int) -> tuple[int, int]:
        """Where a chunk of the input is to end."""
        return -1, index

    def _one_memory(self, rank: int, inputs: list[Any], outputs: int) -> dict[Any, list[Any]]:
        return {Buffer.input: inputs, Buffer.output: inputs}


class MscclAllReduce(MscclCollective):
    """``chunk_factor`` chunks in all."""

    name = "allreduce"

    def get_buffer_index(self, rank: int, buffer: Any, index: int) -> tuple[Any, int]:
        """In place, the output is the input."""
        return (Buffer.input, index) if self.inplace and buffer == Buffer.output else (buffer, index)


class MscclAllGather(MscclCollective):
    """``chunk_factor`` chunks of each rank."""

    name = "allgather"

    def get_buffer_index(self, rank: int, buffer: Any, index: int) -> tuple[Any, int]:
        """In place, the input is the rank's block of the output."""
        if self.inplace and buffer == Buffer.input:
            return Buffer.output, index + rank * self.chunk_factor
        return buffer, index

    def _end(self, rank: int, index: int) -> tuple[int, int]:
        return -1, rank * self.chunk_factor + index

    def _one_memory(self, rank: int, inputs: list[Any], outputs: int) -> dict[Any, list[Any]]:
        whole: list[Any] = [None] * outputs
        whole[rank * self.chunk_factor : (rank + 1) * self.chunk_factor] = inputs
        return {Buffer.input: inputs, Buffer.output: whole}


class MscclReduceScatter(MscclCollective):
    """``chunk_factor`` chunks for each rank."""

    name = "reduce_scatter"

    def get_buffer_index(self, rank: int, buffer: Any, index: int) -> tuple[Any, int]:
        """In place, the output is the rank's block of the input."""
        if self.inplace and buffer == Buffer.output:
            return Buffer.input, index + rank * self.chunk_factor
        return buffer, index

    def _end(self, rank: int, index: int) -> tuple[int, int]:
        return divmod(index, self.chunk_factor)

    def _one_memory(self, rank: int, inputs: list[Any], outputs: int) -> dict[Any, list[Any]]:
        return {Buffer.input: inputs}


class MscclAllToAll(MscclCollective):
    """``chunk_factor`` chunks for each pair of ranks."""

    name = "alltoall"

    def _end(self, rank: int, index: int) -> tuple[int, int]:
        to, at = divmod(index, self.chunk_factor)
        return to, at + rank * self.chunk_factor


Collective = MscclCollective
AllReduce = MscclAllReduce
AllGather = MscclAllGather
ReduceScatter = MscclReduceScatter
AllToAll = MscclAllToAll
NAMED: Mapping[str, type] = {c.name: c for c in (AllReduce, AllGather, ReduceScatter, AllToAll)}
