"""Verification of results: what each rank sends in a benchmark, and what must come back.

Every rank can compute every other rank's input: element ``i`` of rank ``r`` is a hash of ``r`` and ``i mod PERIOD``.
The period is a prime, so no displaced chunk matches, and one period of the reference serves vectors of any length.
Magnitudes of floating inputs stay in [0.625, 0.75) or [1.25, 1.5) and integers are odd: a contribution that is missing
or counted twice always shows.

Pure data, no MPI. Buffers are NumPy's, or those of a module with NumPy's interface that is passed as ``xp`` (CuPy):
their elements are then written and compared in place, at most ``PIECE_BYTES`` of them at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..program.call import Call
from ..program.reduction import FLOATS, Array, dtype_of, finish
from .nccl_tests import TEST_NAMES

PERIOD = 131071
SHOWN = 8  # wrong elements of a result of which more is said than that they are wrong
PIECE_BYTES = 16 << 20  # of a buffer outside this process's caches, compared at a time; NumPy takes one period

# Bits of the fraction and smallest normal exponent of the 16-bit types.
_STEPS = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
_SHORT = {"float16": (10, -14), "bfloat16": (7, -126)}


@lru_cache(maxsize=64)
def pattern(rank: int, dtype: str) -> Array:
    """One period of ``rank``'s input, read-only."""
    x = np.arange(PERIOD, dtype=np.uint64) + np.uint64(rank * PERIOD + 1)
    x *= np.uint64(0x9E3779B97F4A7C15)  # splitmix64
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    if dtype not in FLOATS:
        return _frozen((x | np.uint64(1)).astype(dtype_of(dtype)))
    unit = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    magnitude = np.where(x & np.uint64(2), 1.25 + 0.25 * unit, 0.625 + 0.125 * unit)
    return _frozen(np.where(x & np.uint64(1), magnitude, -magnitude).astype(dtype_of(dtype)))


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


def fill(out: Any, rank: int, dtype: str, start: int = 0, *, xp: Any = np) -> None:
    """Write ``rank``'s input from element ``start`` on into ``out``."""
    period = xp.asarray(_bits(np.roll(pattern(rank, dtype), -(start % PERIOD))))
    for piece in _periods(_bits(out), out.size):
        piece[:] = period[: piece.shape[1]]


def _bits(values: Any) -> Any:
    """The elements as unsigned integers: every type moves and compares so, bfloat16 too."""
    return values.view(f"u{values.dtype.itemsize}")


def _periods(values: Any, most: int) -> Iterator[Any]:
    """Views of ``values``: whole periods as rows, at most ``most`` elements at once if over one, then the rest."""
    whole = values.size // PERIOD * PERIOD
    step = max(1, most // PERIOD) * PERIOD
    for at in range(0, whole, step):
        yield values[at : min(at + step, whole)].reshape(-1, PERIOD)
    if whole < values.size:
        yield values[whole:].reshape(1, -1)


def poison(out: Any) -> None:
    """Overwrite ``out`` so that what is not written afterwards is wrong: NaN, or all bits set."""
    out.view("u1")[:] = 0xFF


class Reference(NamedTuple):
    """One period of the right values, and how far a result may be off (None: not at all)."""

    value: Array
    tolerance: Array | None


@lru_cache(maxsize=32)
def reference(sources: tuple[int, ...], op: str, dtype: str, *, narrow: bool = False) -> Reference:
    """Fold the inputs of ``sources``: integers exactly as they wrap, floats in a wider type with an error bound.

    The bound is (n-1) eps sum|x| (for prod (n-1) eps |prod|), one rounding more for avg, plus half an ulp of a
    16-bit result, whose partial values are float32. With ``narrow`` they are of 16 bits, too, and each of the n-1 sums
    may be off by half an ulp of sum|x|: as NCCL folds along a ring.
    """
    first = pattern(sources[0], dtype)
    if len(sources) == 1 and op != "avg":
        return Reference(first, None)
    if op in ("min", "max") or dtype not in FLOATS:
        step: Callable[..., Any] = _STEPS[op]
        value = first
        for rank in sources[1:]:
            value = step(value, pattern(rank, dtype))
        if op == "avg":
            value = value.copy()
            finish(op, len(sources), value)
        return Reference(value, None)
    wide = np.longdouble if dtype == "float64" else np.float64
    value = first.astype(wide)
    scale = np.abs(value)
    for rank in sources[1:]:
        x = pattern(rank, dtype).astype(wide)
        value = value * x if op == "prod" else value + x
        scale = np.abs(value) if op == "prod" else scale + np.abs(x)
    n = len(sources)
    short = dtype in _SHORT
    eps = float(np.finfo(np.float32 if short else dtype).eps)
    tolerance = (n - 1) * eps * scale
    if op == "avg":
        value, tolerance = value / n, (tolerance + eps * scale) / n
    if short:
        tolerance = tolerance + _half_ulp(value, dtype)
        if narrow:
            tolerance = tolerance + (n - 1) * _half_ulp(scale, dtype)
    return Reference(value, tolerance)


def _half_ulp(value: Array, dtype: str) -> Array:
    """Half the spacing of a 16-bit type at ``value``, a hair more for values beside a power of two."""
    bits, smallest = _SHORT[dtype]
    exponent = np.maximum(np.frexp(np.abs(value))[1] - 1, smallest) - bits
    half: Array = np.ldexp(0.5001, exponent)
    return half


def pieces(call: Call, rank: int) -> list[tuple[int, int, tuple[int, ...], int]]:
    """What ``rank`` must hold: (start in its result, length, ranks folded, start in their inputs)."""
    everyone, count = tuple(range(call.n)), call.counts[0]
    match call.collective:
        case "allreduce":
            return [(0, count, everyone, 0)]
        case "reduce":
            return [(0, count, everyone, 0)] if rank == call.root else []
        case "broadcast":
            return [(0, count, (call.root,), 0)]
        case "allgather":
            return [(r * count, count, (r,), 0) for r in everyone]
        case "gather":
            return [(r * count, count, (r,), 0) for r in everyone] if rank == call.root else []
        case "scatter":
            return [(0, count, (call.root,), rank * count)]
        case "alltoall":
            return [(r * count, count, (r,), rank * count) for r in everyone]
        case "scan" | "exscan":
            earlier = everyone[: rank + (call.collective == "scan")]
            return [(0, count, earlier, 0)] if earlier else []
        case "reduce_scatter":
            return [(0, count, everyone, rank * count)]
        case _:
            raise ArgumentError(f"{call.collective} moves no data to compare; use one of {', '.join(TEST_NAMES)}")


@dataclass(frozen=True, slots=True)
class WrongElement:
    """An element of a rank's result that is not what it must be."""

    rank: int
    index: int  # in the result
    expected: str
    found: str  # with its bits

    def __str__(self) -> str:
        return f"rank {self.rank}, element {self.index}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class Wrong:
    """How many elements are wrong, and the first of them."""

    count: int
    first: tuple[WrongElement, ...]


def find_wrong(call: Call, rank: int, result: Any, *, xp: Any = np, narrow: bool = False) -> Wrong:
    """The elements of ``rank``'s ``result`` that are not what they must be; ``narrow`` as for :func:`reference`."""
    most = PERIOD if xp is np else PIECE_BYTES // call.itemsize
    count = 0
    first: list[WrongElement] = []
    for start, length, sources, offset in pieces(call, rank):
        exact, value, tolerance = _expected(call, sources, offset, xp, narrow)
        at = start
        for got in _periods(result[start : start + length], most):
            width = got.shape[1]
            right = _bits(got) == exact[:width]
            if tolerance is not None:
                with np.errstate(all="ignore"):
                    right |= abs(_wide(got, call.dtype, value.dtype) - value[:width]) <= tolerance[:width]
            if wrong := right.size - int(xp.count_nonzero(right)):
                count += wrong
                for i in xp.flatnonzero(~right.ravel())[: SHOWN - len(first)].tolist():
                    bits = int(_bits(got).ravel()[i])
                    want = _text(int(exact[i % width]), call.dtype)
                    found = f"{_text(bits, call.dtype)} (0x{bits:0{2 * call.itemsize}x})"
                    first.append(WrongElement(rank, at + i, want, found))
            at += right.size
    return Wrong(count, tuple(first))


def count_wrong(call: Call, rank: int, result: Any, *, xp: Any = np, narrow: bool = False) -> int:
    """How many elements of ``rank``'s ``result`` are not what they must be."""
    return find_wrong(call, rank, result, xp=xp, narrow=narrow).count


def _text(bits: int, dtype: str) -> str:
    """The value of an element with these bits."""
    kind = dtype_of(dtype)
    return str(np.array(bits, f"u{kind.itemsize}").view(kind)[()])


def _expected(call: Call, sources: tuple[int, ...], offset: int, xp: Any, narrow: bool) -> tuple[Any, Any, Any]:
    """One period of the right result from ``offset`` on: its bits, its value, how far off it may be (None: not)."""
    value, tolerance = reference(sources, call.op, call.dtype, narrow=narrow)
    if xp is not np and value.dtype == np.longdouble:  # which GPUs lack: half an ulp for the rounding to double
        value = value.astype(np.float64)
        tolerance = None if tolerance is None else (tolerance + 2.0**-53 * np.abs(value)).astype(np.float64)
    value = np.roll(value, -(offset % PERIOD))
    exact = xp.asarray(_bits(value.astype(dtype_of(call.dtype))))
    if tolerance is None:
        return exact, None, None
    return exact, xp.asarray(value), xp.asarray(np.roll(tolerance, -(offset % PERIOD)))


def _wide(values: Any, dtype: str, wide: Any) -> Any:
    """``values`` in the type of the reference; bfloat16 is the upper half of a float32."""
    if dtype == "bfloat16":
        values = (_bits(values).astype("u4") << 16).view("f4")
    return values.astype(wide)
