"""A packing's trees as a program over chunks: to look at, to change by hand, and to run as one's own.

Each tree carries as many chunks as its weight is of the vector, or of its block. Pure.
"""

from collections import defaultdict
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from ..errors import ArgumentError
from ..trees.tree import PER_RANK, Packing, Tree
from .algorithms import Algorithm
from .trace import chunk
from .written import algorithm

MOST_CHUNKS = 1024
COLLECTIVES = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "gather", "scatter", "alltoall")

Arcs = tuple[tuple[int, int], ...]


class TreeRow(NamedTuple):
    """The chunks of a tree and the arcs along which they are folded, then copied."""

    first: int
    size: int
    folds: Arcs
    copies: Arcs


def algorithm_of(packing: Packing, name: str = "") -> Algorithm:
    """The trees of a packing as an algorithm.

    Raises:
        ArgumentError: for a collective without trees of its own, or weights that no moderate number of chunks fits.
    """
    rows, chunks = rows_of(packing)
    buffer, n = _buffer(packing), packing.n

    def trees(_n: int) -> None:
        for first, size, folds, copies in rows:
            for src, dst in folds:
                chunk(dst, buffer, first, size).reduce(chunk(src, buffer, first, size))
            for src, dst in copies:
                chunk(src, buffer, first, size).copy(dst)

    def paths(_n: int) -> None:
        for first, size, _folds, copies in rows:
            at, source = chunk(copies[0][0], "input", first, size), copies[0][0]
            for _src, dst in copies[:-1]:
                at = at.copy(dst, "on the way")
            at.copy(copies[-1][1], "output", source * chunks + first % chunks)

    written = algorithm(
        packing.collective, chunks=chunks, inplace=packing.collective != "alltoall", ranks=(n,),
        name=name or packing.scheme, root=max(packing.root, 0),
    )  # fmt: skip
    return written(paths if packing.collective == "alltoall" else trees)(n)


def python_of(packing: Packing, name: str = "trees") -> str:
    """The same as the text of a Python file; ``name`` is its function."""
    rows, chunks = rows_of(packing)
    root = f", root={packing.root}" if packing.root >= 0 else ""
    inplace = ", inplace=True" if packing.collective != "alltoall" else ""
    lines = [
        f'"""{packing.collective} of {packing.n} ranks along {len(packing.trees)} trees ({packing.scheme})."""',
        "",
        "from blinkmpi import lang",
        "from blinkmpi.lang import chunk",
        "",
        "# Each tree: its first chunk, how many it carries, the arcs on which they are folded, and those of copies.",
        "TREES = [",
        *(f"    ({row.first}, {row.size}, {list(row.folds)}, {list(row.copies)})," for row in rows),
        "]",
        "",
        "",
        f'@lang.algorithm("{packing.collective}", chunks={chunks}{inplace}, ranks=[{packing.n}]{root})',
        f"def {name}(n):",
        "    for first, size, folds, copies in TREES:",
    ]
    if packing.collective == "alltoall":
        return "\n".join([
            *lines,
            "        source = copies[0][0]",
            '        at = chunk(source, "input", first, size)',
            "        for _, dst in copies[:-1]:",
            '            at = at.copy(dst, "on the way")',
            f'        at.copy(copies[-1][1], "output", source * {chunks} + first % {chunks})',
            "",
        ])  # fmt: skip
    buffer = _buffer(packing)
    return "\n".join([
        *lines,
        "        for src, dst in folds:",
        f'            chunk(dst, "{buffer}", first, size).reduce(chunk(src, "{buffer}", first, size))',
        "        for src, dst in copies:",
        f'            chunk(src, "{buffer}", first, size).copy(dst)',
        "",
    ])  # fmt: skip


def _buffer(packing: Packing) -> str:
    return "output" if packing.collective in ("allgather", "gather") else "input"


def rows_of(packing: Packing) -> tuple[list[TreeRow], int]:
    """The chunks and arcs of every tree, and the chunks of the vector or of each block; raises as `algorithm_of`."""
    kind = packing.collective
    if kind not in COLLECTIVES:
        raise ArgumentError(f"a {kind} has no trees of its own; choose one of {', '.join(COLLECTIVES)}")
    jobs: dict[tuple[int, int], list[Tree]] = defaultdict(list)  # by the block that the trees carry
    for tree in packing.trees:
        end = tree.edges[-1].dst if tree.edges else tree.root
        if kind in ("gather", "scatter", "alltoall"):
            jobs[tree.root if kind == "alltoall" else 0, end].append(tree)
        else:
            jobs[0, tree.root if kind in PER_RANK else 0].append(tree)
    if kind == "alltoall":
        for rank in range(packing.n):
            jobs.setdefault((rank, rank), [Tree(rank, (), Fraction(1))])
    shares = {job: _shares(trees) for job, trees in jobs.items()}
    chunks = lcm(*(share.denominator for of_job in shares.values() for share in of_job))
    if chunks > MOST_CHUNKS:
        raise ArgumentError(f"the trees' weights need {chunks} chunks; at most {MOST_CHUNKS} can be written, pack with "
                            "fewer trees")  # fmt: skip
    rows = []
    for job, trees in jobs.items():
        first = job[1] * chunks
        for tree, share in zip(trees, shares[job], strict=True):
            size = int(share * chunks)
            rows.append(TreeRow(first, size, *_arcs(kind, tree)))
            first += size
    return rows, chunks


def _shares(trees: list[Tree]) -> list[Fraction]:
    total = sum((tree.weight for tree in trees), Fraction(0))
    return [tree.weight / total for tree in trees]


def _arcs(kind: str, tree: Tree) -> tuple[Arcs, Arcs]:
    """Where a tree's chunks are folded, and where they are copied."""
    down = tuple((e.src, e.dst) for e in tree.edges)
    up = tuple((e.src, e.dst) for e in tree.upward)
    if kind == "gather":
        ranks = [tree.root, *(e.dst for e in tree.edges)][::-1]
        return (), tuple(pairwise(ranks))
    if kind == "alltoall":
        return (), down or ((tree.root, tree.root),)
    return up if kind in ("allreduce", "reduce", "reduce_scatter") else (), down if kind not in (
        "reduce", "reduce_scatter"
    ) else ()  # fmt: skip
