"""One structure for calls of many counts: a program whose spans are filled in when the count is known.

Stages, channels and folds follow from the trees; of what :func:`.lower.lower` makes, only the spans depend on the
count. A template has every tree of every block, so for small counts some of its spans are empty, where ``lower`` makes
no stages. The slots of a template have room for every count of its :class:`Sizes`. Pure, and the same on every rank.
"""

import itertools
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

from msgspec.structs import replace

from ..errors import PlanError
from ..trees.tree import Packing
from .call import Call
from .check import check
from .ir import Program, Stage, Wire, chunk_of
from .lower import outline
from .spans import align_of

COLLECTIVES = ("broadcast", "reduce", "allreduce", "allgather", "gather", "scatter", "reduce_scatter")
SHORT = 4  # a block counts as short if the longest has more than so many times its elements


class Sizes(NamedTuple):
    """The counts that share a template: the longest block has more than ``most / 2`` and at most ``most`` elements.

    ``blocks`` is the number of blocks that may differ, ``longs`` a mask of those that are not short.
    """

    most: int
    blocks: int = 1
    longs: int = 1

    @classmethod
    def of(cls, call: Call) -> "Sizes":
        """Those of a call, which has elements."""
        counts = call.counts
        longest = max(counts)
        most = 1 << (longest - 1).bit_length()
        if len(counts) == 1:
            return cls(most)
        return cls(most, len(counts), sum([1 << i for i, count in enumerate(counts) if SHORT * count > longest]))

    def largest(self, call: Call) -> Call:
        """The call with about the most elements in every block."""
        counts = (self.most if self.longs >> i & 1 else -(-self.most // SHORT) for i in range(self.blocks))
        return replace(call, counts=tuple(counts))


class Span(NamedTuple):
    """What a tree carries: ``length`` elements from ``first`` of the block that begins at ``start``, in chunks."""

    start: int
    first: int
    length: int
    chunk: int


class _Block(NamedTuple):
    """A block's rank, or -1 for the whole vector, its trees, and the part of it up to the end of each tree's span."""

    rank: int
    trees: tuple[int, ...]
    ends: tuple[tuple[int, int], ...]


class Template:
    """The stages of all calls along a packing that differ from ``call`` in their counts alone.

    Raises:
        PlanError: if ``lower`` would not lower such calls, or some block has no tree.
    """

    def __init__(
        self, packing: Packing, call: Call, *, chunk_bytes: int, depth: int, wire: Wire = "accumulator"
    ) -> None:
        if call.collective not in COLLECTIVES:
            raise PlanError(f"{call.collective} has no template; lower every call of it")
        self.call = call
        self.program, jobs = outline(packing, call, chunk_bytes=chunk_bytes, depth=depth, wire=wire)
        self._align = align_of(call)
        self._shares: dict[int, Fraction] = {}
        self._blocks = []
        for rank, trees in jobs:
            if not trees:
                raise PlanError(f"{call.collective}: no tree carries the block of rank {rank}; pack again")
            total = sum((weight for _, weight in trees), Fraction(0))
            self._shares |= {tree: weight / total for tree, weight in trees}
            ends = itertools.accumulate(self._shares[tree] for tree, _ in trees)
            parts = tuple((end.numerator, end.denominator) for end in ends)
            self._blocks.append(_Block(max(rank, 0), tuple(tree for tree, _ in trees), parts))
        all_trees = 2 * self._align * int(1 / min(self._shares.values()) + 1)
        check(self.at(replace(call, counts=(all_trees,) * len(call.counts))))

    def spans(self, call: Call) -> dict[int, Span]:
        """Every tree's span in a call, as ``lower`` would cut it."""
        cut, chunks = self.cut(call)
        return {tree: Span(start, first, length, chunks[length]) for tree, start, first, length in cut}

    def lengths(self, call: Call) -> dict[int, int]:
        """The elements that each tree carries in a call, of those that carry any."""
        return {tree: length for tree, _, _, length in self._parts(call) if length}

    def carrying(self, lengths: Mapping[int, int]) -> Program:
        """Stages that move so many elements by tree, at no place in particular: what calls together have moved."""
        stages = [replace(s, count=lengths[s.tree]) for s in self.program.stages if s.tree in lengths]
        return replace(self.program, stages=tuple(stages))

    def cut(self, call: Call) -> tuple[list[tuple[int, int, int, int]], dict[int, int]]:
        """The same in plain tuples of tree, start, first and length, and the chunk by the length of a span."""
        cut, most = [*self._parts(call)], self.program.chunk
        lengths = {length for *_, length in cut}  # few: most spans are equally long
        steps = -(-max(lengths) // most) or 1
        return cut, {length: chunk_of(length, steps, most) for length in lengths}

    def _parts(self, call: Call) -> Iterator[tuple[int, int, int, int]]:
        align = self._align
        for rank, trees, ends in self._blocks:
            start, count = call.block(rank)
            unit = align if count >= align * len(trees) else 1
            first = 0
            for tree, (part, whole) in zip(trees, ends, strict=True):
                end = count if part == whole else part * count // whole // unit * unit
                yield tree, start, first, end - first
                first = end

    def at(self, call: Call) -> Program:
        """The program of a call, with stages for empty spans, too."""
        spans = self.spans(call)
        stages = tuple(_sized(stage, spans) for stage in self.program.stages)
        return replace(self.program, call=call, stages=stages)

    def slots(self, sizes: Sizes) -> dict[int, int]:
        """By tree: a chunk's most elements in calls of these sizes.

        A span differs from its share of the block by less than the alignment of borders, which counts most where the
        block is shortest. A chunk is to the largest one as its span to the longest, which is in one of the longest
        blocks: in any, where blocks may differ.
        """
        chunk, align = self.program.chunk, self._align
        least = sizes.most // 2 + 1
        largest = [max(self._shares[tree] for tree in block.trees) for block in self._blocks]
        longest = (min(largest) if sizes.blocks > 1 else max(largest)) * least - align
        if longest <= 0:
            return dict.fromkeys(self._shares, chunk)
        return {
            tree: chunk_of(int((share * least + align) * chunk / longest) + 1, 1, chunk)
            for tree, share in self._shares.items()
        }


def _sized(stage: Stage, spans: Mapping[int, Span]) -> Stage:
    """A stage of the outline, whose offsets are 0 if they count in their block, 1 if in the vector of all blocks."""
    span = spans[stage.tree]
    local, store = (None if x is None else span.first + span.start * x for x in (stage.local, stage.store))
    return replace(stage, count=span.length, local=local, store=store)
