"""One conformance suite for every executor: the cases, their inputs, and what must come out.

An executor is anything that takes a case and the inputs of all ranks and gives
back what a rank received. Inputs depend on the case alone, so every rank can
compute everybody's, and the reference is worked out apart from the package, in
float64 or exact integers.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blinkmpi.errors import BufferTypeError
from blinkmpi.program.reduction import (
    COMPLEX,
    DTYPES,
    FLOATS,
    INTEGERS,
    NARROW,
    OPS,
    accumulator_of,
    check_op,
    dtype_of,
)

Array = NDArray[Any]
REDUCING = ("allreduce", "reduce", "reduce_scatter", "reduce_scatter_block", "scan", "exscan")
VARIANTS = ("allgatherv", "gatherv", "scatterv", "alltoallv")  # of blocks that differ, in any order, with gaps
BLOCKED = ("gather", "scatter", "allgather", "reduce_scatter_block", "reduce_scatter", "alltoall", *VARIANTS)
COLLECTIVES = ("broadcast", "reduce", "allreduce", *BLOCKED, "scan", "exscan")
PLANNED = {"reduce_scatter_block": "reduce_scatter", **{name: name.removesuffix("v") for name in VARIANTS}}
GAP = 3  # elements between two blocks of a variant
LARGE = (("float32", "sum"), ("bfloat16", "sum"), ("int8", "max"))
SHIFT = 1009  # elements from where one rank's vector begins in the numbers drawn to where the next one's does
ARITHMETIC = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


@dataclass(frozen=True)
class Case:
    """One call on ``n`` ranks; ``count`` elements per rank's block (or of the vector where there are no blocks).

    Cases that differ in ``salt`` alone are the same call with other numbers.
    """

    collective: str
    n: int
    dtype: str
    op: str
    count: int
    in_place: bool
    root: int
    salt: int = 0

    def counts(self) -> tuple[int, ...]:
        """Every rank's block: uneven, with an empty one, for reduce_scatter and the variants."""
        if self.collective == "reduce_scatter" or self.collective in VARIANTS:
            return tuple(0 if r == self.n - 1 and self.n > 1 else self.count + r for r in range(self.n))
        return (self.count,) * self.n

    def row(self, rank: int) -> tuple[int, ...]:
        """The blocks that ``rank`` sends in an alltoallv, the same both ways in place; some are empty."""
        return tuple(0 if (rank + r) % 3 == 2 else self.count + rank * r for r in range(self.n))

    @property
    def planned(self) -> str:
        """The collective as plans and BLINKMPI_ALGO have it."""
        return PLANNED.get(self.collective, self.collective)

    def __str__(self) -> str:
        where = "in place" if self.in_place else "out of place"
        return f"{self.collective} np={self.n} {self.count} x {self.dtype} {self.op} root {self.root} {where}"


def cases(collective: str, n: int, *, full: bool = True) -> Iterator[Case]:
    """All cases of a collective: every type and operation on odd small counts, some on a large one."""
    ops = {d: [op for op in allowed(d) if op != "avg" or "scan" not in collective] for d in DTYPES}
    pairs = [(d, op) for d in DTYPES for op in (ops[d] if collective in REDUCING else ("",))]
    if not full:
        types, some = ("float32", "bfloat16", "int16", "bool"), ("", "sum", "lor", "avg", "min")
        pairs = [(d, o) for d, o in pairs if d in types and o in some]
    rooted = collective in ("broadcast", "reduce", "gather", "scatter", "gatherv", "scatterv")
    for dtype, op in pairs:
        large = (dtype, op or "sum") in LARGE or (not op and dtype in ("float32", "complex64"))
        # every rank works out everybody's blocks: long ones are for the full list
        elements = (1 << 20) // dtype_of(dtype).itemsize // (1 if full or collective not in BLOCKED else n)
        for count in (0, 1, 7, *([elements + 3] if large else [])):
            for root in sorted({0, n - 1}) if rooted else (0,):
                for in_place in (False,) if collective == "broadcast" else (False, True):
                    yield Case(collective, n, dtype, op, count, in_place, root)


def allowed(dtype: str) -> list[str]:
    """The operations defined for ``dtype``."""
    found = []
    for op in OPS:
        with contextlib.suppress(BufferTypeError):
            check_op(op, dtype)
            found.append(op)
    return found


def inputs(case: Case) -> list[Array]:
    """Every rank's send vector. Random, of both signs, with a sum that no missing or doubled part can fake.

    Cases that differ in root and place alone, which follow one another, have the same, and nobody may write to them.
    """
    what = f"{case.collective} {case.dtype} {case.op} {case.count}" + (f" {case.salt}" if case.salt else "")
    if case.collective == "alltoallv":
        size = max(sum(case.row(r)) for r in range(case.n))
        rows = _inputs(what, case.n, case.dtype, case.op, size)
        return [row[: sum(case.row(r))] for r, row in enumerate(rows)]
    if case.collective in ("allgatherv", "gatherv"):
        rows = _inputs(what, case.n, case.dtype, case.op, case.count + case.n)
        return [row[:length] for row, length in zip(rows, case.counts(), strict=True)]
    blocked = case.collective in ("scatter", "scatterv", "reduce_scatter", "reduce_scatter_block", "alltoall")
    size = sum(case.counts()) if blocked else case.count
    return list(_inputs(what, case.n, case.dtype, case.op, size))


@lru_cache(maxsize=1)
def _inputs(what: str, n: int, dtype: str, op: str, size: int) -> tuple[Array, ...]:
    """Parts of one row of random numbers, each some way behind the one before."""
    seed = hashlib.sha256(what.encode()).digest()
    row = _random(np.random.default_rng(list(seed[:8])), dtype, op, size + (n - 1) * SHIFT)
    row.flags.writeable = False
    return tuple(row[at : at + size] for at in range(0, n * SHIFT, SHIFT))


def _random(rng: np.random.Generator, dtype: str, op: str, size: int) -> Array:
    kind = dtype_of(dtype)
    if dtype == "bool":
        return rng.random(size) < 0.5
    if dtype in INTEGERS:
        info = np.iinfo(kind)
        if op in ("land", "lor", "lxor"):
            return rng.integers(0, 2, size).astype(kind)
        return rng.integers(info.min, info.max, size, dtype=kind, endpoint=True)
    low, high = (0.5, 1.5) if op == "prod" else (-1.0, 1.0)
    if dtype in COMPLEX:
        return (rng.uniform(low, high, size) + 1j * rng.uniform(low, high, size)).astype(kind)
    values = rng.uniform(low, high, size).astype(kind)
    if op in ("min", "max"):
        some = values[5::SHIFT]  # in half of the ranks' vectors, and further on in some that are long
        some[rng.random(some.size) < 0.5] = np.nan
    return values


def expected(case: Case, rank: int) -> Array | None:
    """What ``rank`` must receive, exactly for integers and moves, in float64/complex128 for floating sums."""
    kind, sends = case.collective.removesuffix("v"), inputs(case)
    if kind == "broadcast":
        return None if rank == case.root else sends[case.root]
    if kind == "allgather" or (kind == "gather" and rank == case.root):
        return np.concatenate(sends)
    if kind == "scatter":
        start = sum(case.counts()[:rank])
        return sends[case.root][start : start + case.counts()[rank]]
    if kind == "alltoall":
        rows = [case.row(r) if case.collective == "alltoallv" else case.counts() for r in range(case.n)]
        parts = [(sum(row[:rank]), row[rank]) for row in rows]
        return np.concatenate([send[at : at + length] for send, (at, length) in zip(sends, parts, strict=True)])
    if kind == "exscan" and rank == 0:
        return None
    if kind in ("gather", "reduce") and rank != case.root:
        return None
    return _folded(case, rank)[0]


def mistakes(case: Case, got: Array, want: Array, rank: int) -> int:
    """How many elements of ``got``, which ``rank`` received, lie outside the error that docs/numerics.md allows."""
    if got.shape != want.shape or got.dtype != dtype_of(case.dtype):
        return max(1, want.size)
    allowed = _folded(case, rank)[1] if case.op else None
    if allowed is not None:
        return int((~(np.abs(got.astype(want.dtype) - want) <= allowed)).sum())
    if case.op in ("min", "max") and case.dtype in FLOATS:
        return int((~((got.astype(np.float64) == want) | (np.isnan(got.astype(np.float64)) & np.isnan(want)))).sum())
    return int((got != want.astype(got.dtype)).sum())


def _folded(case: Case, rank: int) -> tuple[Array, Array | None]:
    """The fold of everybody's vectors, or blocks for ``rank``, and how far a result may be from it: see `_fold`."""
    blocked = case.collective in ("reduce_scatter", "reduce_scatter_block")
    folded = {"scan": rank + 1, "exscan": rank}.get(case.collective, case.n)
    return _fold(replace(case, in_place=False, root=0), rank if blocked else -1, folded)


@lru_cache(maxsize=8)
def _fold(case: Case, block: int, folded: int) -> tuple[Array, Array | None]:
    """The fold of a rank's blocks, or of whole vectors (-1), of so many ranks; and how far off a result may be.

    Sums and averages: (n-1) eps(accumulator) sum|x_i|; products: of the product of |x_i|; and half an ulp of a 16-bit
    result. None for what must be exact.
    """
    start = sum(case.counts()[:block]) if block >= 0 else 0
    parts = [s[start : start + case.counts()[block]] if block >= 0 else s for s in inputs(case)[:folded]]
    wide = {"bool": np.bool_, **dict.fromkeys(FLOATS, np.float64), **dict.fromkeys(COMPLEX, np.complex128)}
    kind = wide.get(case.dtype, dtype_of(case.dtype))
    bounded = case.op in ("sum", "prod", "avg") and case.dtype in (*FLOATS, *COMPLEX)
    logical = case.op in ("land", "lor", "lxor")
    fold = ARITHMETIC.get(case.op) or getattr(np, f"{'logical' if logical else 'bitwise'}_{case.op[1:]}")
    each = np.bool_ if logical else kind
    total = parts[0].astype(each)
    scale = np.abs(total) if bounded else None
    for part in parts[1:]:
        operand = part.astype(each)
        fold(total, operand, out=total)
        if scale is not None:
            fold(scale, np.abs(operand), out=scale)
    if case.op == "avg" and np.issubdtype(kind, np.integer):  # towards zero
        n = kind.type(case.n)
        total = total // n + ((total < 0) & (total % n != 0))  # -total would be no int8 for -128
    elif case.op == "avg":
        total /= case.n
    return total.astype(kind, copy=False), None if scale is None else _allowed_error(case, total, scale)


def _allowed_error(case: Case, want: Array, scale: Array) -> Array:
    eps = np.finfo(accumulator_of(case.dtype)).eps
    # a complex product has two roundings more in each component, so allow four times as much
    allowed = case.n * eps * scale * (4 if case.op == "prod" else 1)
    if case.dtype in NARROW:
        half = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}[case.dtype]
        least = {"float8_e4m3fn": 2.0**-10, "float8_e5m2": 2.0**-17}.get(case.dtype, 2.0**-24)  # half a subnormal step
        allowed = allowed + np.abs(want) * half + least
    return np.asarray(allowed)


def same(one: Array, other: Array) -> bool:
    """Whether two arrays have the same bits."""
    return np.array_equal(one.view(np.uint8), other.view(np.uint8))
