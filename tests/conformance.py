"""One conformance suite for every executor: the cases, their inputs, and what must come out.

An executor is anything that takes a case and the inputs of all ranks and gives
back what a rank received. Inputs depend on the case alone, so every rank can
compute everybody's, and the reference is worked out apart from the package, in
float64 or exact integers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blinkmpi.errors import BufferTypeError
from blinkmpi.numerics import COMPLEX, DTYPES, FLOATS, INTEGERS, NARROW, OPS, accumulator_of, check_op, dtype_of

Array = NDArray[Any]
REDUCING = ("allreduce", "reduce", "reduce_scatter", "reduce_scatter_block")
COLLECTIVES = (
    "broadcast",
    "reduce",
    "allreduce",
    "gather",
    "scatter",
    "allgather",
    "reduce_scatter_block",
    "reduce_scatter",
)
BLOCKED = ("gather", "scatter", "allgather", "reduce_scatter_block", "reduce_scatter")
LARGE = (("float32", "sum"), ("bfloat16", "sum"), ("int8", "max"))


@dataclass(frozen=True)
class Case:
    """One call on ``n`` ranks; ``count`` elements per rank's block (or of the vector where there are no blocks)."""

    collective: str
    n: int
    dtype: str
    op: str
    count: int
    in_place: bool
    root: int

    def counts(self) -> tuple[int, ...]:
        """Every rank's block: uneven, with an empty one, for reduce_scatter."""
        if self.collective == "reduce_scatter":
            return tuple(0 if r == self.n - 1 and self.n > 1 else self.count + r for r in range(self.n))
        return (self.count,) * self.n

    def __str__(self) -> str:
        where = "in place" if self.in_place else "out of place"
        return f"{self.collective} np={self.n} {self.count} x {self.dtype} {self.op} root {self.root} {where}"


def cases(collective: str, n: int, *, full: bool = True) -> Iterator[Case]:
    """All cases of a collective: every type and operation on odd small counts, some on a large one."""
    pairs = (
        [(d, o) for d in DTYPES for o in OPS if _allowed(o, d)] if collective in REDUCING else [(d, "") for d in DTYPES]
    )
    if not full:
        pairs = [
            p
            for p in pairs
            if p[0] in ("float32", "bfloat16", "int16", "bool") and p[1] in ("", "sum", "lor", "avg", "min")
        ]
    rooted = collective in ("broadcast", "reduce", "gather", "scatter")
    for dtype, op in pairs:
        large = (dtype, op or "sum") in LARGE or (not op and dtype in ("float32", "complex64"))
        # every rank works out everybody's blocks: long ones are for the full list
        elements = (1 << 20) // dtype_of(dtype).itemsize // (1 if full or collective not in BLOCKED else n)
        for count in (0, 1, 7, *([elements + 3] if large else [])):
            for root in sorted({0, n - 1}) if rooted else (0,):
                for in_place in (False,) if collective == "broadcast" else (False, True):
                    yield Case(collective, n, dtype, op, count, in_place, root)


def _allowed(op: str, dtype: str) -> bool:
    try:
        check_op(op, dtype)
    except BufferTypeError:
        return False
    return True


def inputs(case: Case) -> list[Array]:
    """Every rank's send vector. Random, of both signs, with a sum that no missing or doubled part can fake.

    Cases that differ in root and place alone, which follow one another, have the same, and nobody may write to them.
    """
    blocked = case.collective in ("scatter", "reduce_scatter", "reduce_scatter_block")
    size = sum(case.counts()) if blocked else case.count
    return list(_inputs(case.collective, case.n, case.dtype, case.op, case.count, size))


@lru_cache(maxsize=1)
def _inputs(collective: str, n: int, dtype: str, op: str, count: int, size: int) -> tuple[Array, ...]:
    made = []
    for rank in range(n):
        seed = hashlib.sha256(f"{collective} {dtype} {op} {count} {rank}".encode()).digest()
        made.append(_random(np.random.default_rng(list(seed[:8])), dtype, op, size))
        made[-1].flags.writeable = False
    return tuple(made)


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
    if op in ("min", "max") and size > 5:
        values[5] = np.nan if rng.random() < 0.5 else values[5]
    return values


def expected(case: Case, sends: list[Array], rank: int) -> Array | None:
    """What ``rank`` must receive, exactly for integers and moves, in float64/complex128 for floating sums."""
    kind = case.collective
    if kind == "broadcast":
        return None if rank == case.root else sends[case.root]
    if kind == "allgather" or (kind == "gather" and rank == case.root):
        return np.concatenate(sends)
    if kind == "scatter":
        return sends[case.root][rank * case.count : (rank + 1) * case.count]
    if kind in ("gather", "reduce") and rank != case.root:
        return None
    if kind in ("reduce_scatter", "reduce_scatter_block"):
        start = sum(case.counts()[:rank])
        sends = [s[start : start + case.counts()[rank]] for s in sends]
    return _fold(case, sends)


def _fold(case: Case, sends: list[Array]) -> Array:
    wide = {"bool": np.bool_, **dict.fromkeys(FLOATS, np.float64), **dict.fromkeys(COMPLEX, np.complex128)}
    kind = wide.get(case.dtype, dtype_of(case.dtype))
    parts = np.stack([s.astype(kind) for s in sends])
    with np.errstate(over="ignore"):
        match case.op:
            case "sum":
                total = parts.sum(0, dtype=kind)
            case "avg":
                total = parts.sum(0) / case.n
            case "prod":
                total = parts.prod(0, dtype=kind)
            case "min":
                total = parts.min(0)
            case "max":
                total = parts.max(0)
            case "land":
                total = parts.all(0).astype(kind)
            case "lor":
                total = parts.any(0).astype(kind)
            case "lxor":
                total = (parts.astype(bool).sum(0) % 2).astype(kind)
            case "band":
                total = np.bitwise_and.reduce(parts, 0)
            case "bor":
                total = np.bitwise_or.reduce(parts, 0)
            case _:
                total = np.bitwise_xor.reduce(parts, 0)
    return np.asarray(total)


def mistakes(case: Case, sends: list[Array], got: Array, want: Array, rank: int) -> int:
    """How many elements of ``got``, which ``rank`` received, lie outside the error that docs/numerics.md allows.

    (n-1) eps(accumulator) sum|x_i| (a product: of the product of |x_i|), and half an ulp of a 16-bit result.
    """
    if got.shape != want.shape or got.dtype != dtype_of(case.dtype):
        return max(1, want.size)
    if case.op in ("sum", "prod", "avg") and case.dtype in (*FLOATS, *COMPLEX):
        start = sum(case.counts()[:rank]) if case.collective.startswith("reduce_scatter") else 0
        kind = np.complex128 if case.dtype in COMPLEX else np.float64
        sizes = np.stack([np.abs(s[start : start + want.size].astype(kind)) for s in sends])
        scale = sizes.prod(0) if case.op == "prod" else sizes.sum(0)
        eps = np.finfo(accumulator_of(case.dtype)).eps
        # a complex product has two roundings more in each component, so allow four times as much
        allowed = case.n * eps * scale * (4 if case.op == "prod" else 1)
        wide = got.astype(want.dtype)
        if case.dtype in NARROW:
            half = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}[
                case.dtype
            ]
            least = {"float8_e4m3fn": 2.0**-10, "float8_e5m2": 2.0**-17}.get(
                case.dtype, 2.0**-24
            )  # half a subnormal step
            allowed = allowed + np.abs(want) * half + least
        return int((~(np.abs(wide - want) <= allowed)).sum())
    if case.op in ("min", "max") and case.dtype in FLOATS:
        return int((~((got.astype(np.float64) == want) | (np.isnan(got.astype(np.float64)) & np.isnan(want)))).sum())
    return int((got != want.astype(got.dtype)).sum())
