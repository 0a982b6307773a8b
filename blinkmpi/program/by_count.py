"""A program as a function of its count: stages whose numbers are sums of symbols.

Of the programs of one row of the table, only the count ``c`` differs, and what follows from it: where trees cut the
vector or each block (:func:`.lower.cuts`), the elements of their chunks, and in one shot the bytes of a slot. Here
these are **symbols**: powers of a number so large that any sum of a few of each can be read again, digit by digit. Code
that adds and multiplies then works out how its results depend on the count, and needs not know of it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import NamedTuple

from msgspec.structs import replace

from .ir import Program, Stage
from .spans import Cut

DIGIT = 96  # bits: what is no symbol, such as an address, is the last digit
BASE = 1 << DIGIT
COUNT, SLOT = 0, 1  # the first symbols: the count; the bytes of a slot in one shot
WHOLE = Cut(1, Fraction(0), Fraction(1))


def symbol(number: int) -> int:
    """A symbol as code sees it."""
    return 1 << DIGIT * (number + 1)


def read(value: int) -> tuple[int, dict[int, int]]:
    """What a sum is made of: the rest, and how often each symbol."""
    digits = []
    while value:
        digit = (value + BASE // 2) % BASE - BASE // 2
        digits.append(digit)
        value = (value - digit) // BASE
    rest, *times = digits or [0]
    return rest, {number: n for number, n in enumerate(times) if n}


class Border(NamedTuple):
    """A symbol: where a tree's part of ``trees`` that share a block ends, this part of the block from its beginning."""

    trees: int
    part: Fraction


class Length(NamedTuple):
    """A symbol: the elements of a chunk, of a span between two values; each is a symbol's number, or -1 for 0."""

    first: int
    end: int


class ByCount(Program, frozen=True, dict=True):
    """A program with symbols in place of what depends on the count; made by :func:`by_count`."""

    whole: bool = False  # whether a chunk has all elements of a call, whatever their number
    chunks: Mapping[int, int] = {}  # by the length of a span
    borders: tuple[Border, ...] = ()  # the symbols behind the first two
    lengths: tuple[Length, ...] = ()  # and those behind these

    def chunk_of(self, stage: Stage) -> int:
        """Elements of a step."""
        return self.chunks[stage.count]


def by_count(program: Program, cuts: Mapping[int, Cut], value: Callable[[Border], int]) -> ByCount | None:
    """A program of a count of at least one as a function of it; None where its stages are not as the cuts say.

    Args:
        cuts: each tree's part of its block; a tree that is not there has all of it.
        value: what a border is for the program's count.
    """
    count = program.call.counts[0]
    spans = {stage.tree: cuts.get(stage.tree, WHOLE) for stage in program.stages}
    inner = (Border(cut.trees, part) for cut in spans.values() for part in (cut.first, cut.end) if 0 < part < 1)
    borders = tuple(dict.fromkeys(inner))
    numbers = {border: SLOT + 1 + i for i, border in enumerate(borders)}

    def number(trees: int, part: Fraction) -> int:
        return -1 if part == 0 else COUNT if part == 1 else numbers[Border(trees, part)]

    def real(trees: int, part: Fraction) -> int:
        return int(part) * count if part in (0, 1) else value(Border(trees, part))

    ends = {tree: Length(number(cut.trees, cut.first), number(cut.trees, cut.end)) for tree, cut in spans.items()}
    whole = program.one_shot and program.chunk == count  # whose chunks are all that a slot holds
    lengths = () if whole else tuple(dict.fromkeys(ends.values()))

    def at(which: int) -> int:
        return 0 if which < 0 else symbol(which)

    chunks = {at(each.end) - at(each.first): symbol(SLOT + 1 + len(borders) + i) for i, each in enumerate(lengths)}
    if whole:
        chunks = {symbol(COUNT): symbol(COUNT)}
    stages = []
    for stage in program.stages:
        cut, (first, end) = spans[stage.tree], ends[stage.tree]
        begins, length = real(cut.trees, cut.first), real(cut.trees, cut.end) - real(cut.trees, cut.first)
        places = []
        for place in (stage.local, stage.store):
            blocks, rest = divmod((place or 0) - begins, count)
            if place is not None and rest:
                return None
            places.append(None if place is None else blocks * symbol(COUNT) + at(first))
        if stage.count != length:
            return None
        stages.append(replace(stage, count=at(end) - at(first), local=places[0], store=places[1]))
    call = replace(program.call, counts=(symbol(COUNT),) * len(program.call.counts))
    return ByCount(
        call, program.scheme, program.chunk, program.depth, program.channels, tuple(stages), 0,
        whole=whole, chunks=chunks, borders=borders, lengths=lengths,
    )  # fmt: skip
