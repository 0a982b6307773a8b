"""What a reduction means: element types, operations, accumulation and rounding.

The rules (documented for users in docs/numerics.md):

* floats of 8 and 16 bits are summed in float32 and rounded once, at the end;
* integers wrap, as in NumPy; min and max propagate NaN, as in NumPy;
* bool takes the logical operations, complex takes sum and prod;
* avg is the sum divided by the number of ranks; of integers the wrapped sum, rounded towards zero, as NCCL has it;
* anything else is a BufferTypeError.

The operands of one element are folded in a fixed order, one ``combine`` after
another, so the same plan gives the same bits every time.
"""

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..errors import BufferTypeError

Array = NDArray[Any]

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NARROW = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")  # accumulated in float32
FLOATS = (*NARROW, "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)

_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "land": np.logical_and,
    "lor": np.logical_or, "lxor": np.logical_xor, "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip
OPS = tuple(_UFUNCS)
_ALLOWED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("sum", "avg", "prod"), (*INTEGERS, *FLOATS, *COMPLEX)),
    **dict.fromkeys(("min", "max"), (*INTEGERS, *FLOATS)),
    **dict.fromkeys(("land", "lor", "lxor"), ("bool", *INTEGERS)),
    **dict.fromkeys(("band", "bor", "bxor"), INTEGERS),
}


@cache
def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype of one of :data:`DTYPES`.

    Raises:
        BufferTypeError: for any other name.
    """
    if name not in DTYPES:
        raise BufferTypeError(f"element type {name!r} is not supported; use one of {', '.join(DTYPES)}")
    return np.dtype(getattr(ml_dtypes, name, name))


NAMES: dict[np.dtype[Any], str] = {dtype_of(name): name for name in DTYPES}


def accumulator_of(name: str) -> np.dtype[Any]:
    """The type in which partial results of ``name`` are kept and travel."""
    return np.dtype(np.float32) if name in NARROW else dtype_of(name)


def check_op(op: str, dtype: str) -> None:
    """Raise BufferTypeError unless ``op`` is defined for ``dtype``."""
    dtype_of(dtype)
    if op not in _UFUNCS:
        raise BufferTypeError(f"operation {op!r} is unknown; use one of {', '.join(OPS)}")
    if dtype not in _ALLOWED[op]:
        raise BufferTypeError(
            f"operation {op!r} is not defined for {dtype}; it takes {', '.join(_ALLOWED[op])}: convert the array first"
        )


def combine(op: str, a: Array, b: Array, out: Array) -> None:
    """``out = a op b`` elementwise, in the type of ``out`` (the accumulator type)."""
    _UFUNCS[op](a, b, out=out, dtype=None if op in ("land", "lor", "lxor") else out.dtype, casting="unsafe")


def finish(op: str, n: int, value: Array) -> None:
    """Turn a complete fold into the result, in place: avg divides by ``n``."""
    if op != "avg":
        return
    if value.dtype.kind not in "iu":
        np.divide(value, value.dtype.type(n), out=value)
        return
    wide = value.astype(np.int64 if value.dtype.kind == "i" else np.uint64)  # which have room for every n
    n_wide = wide.dtype.type(n)
    wide -= np.fmod(wide, n_wide)  # whose sign is the sum's: so the quotient is rounded towards zero
    np.copyto(value, wide // n_wide, casting="unsafe")


def fold(op: str, operands: list[Array], accumulator: Array, *, final: bool, n: int) -> None:
    """Fold ``operands`` from the left into ``accumulator``.

    ``accumulator`` may be the memory of one of the first two operands, never of a later one.
    One operand is copied (and converted to the accumulator's type).
    """
    if len(operands) == 1:
        np.copyto(accumulator, operands[0], casting="unsafe")
    else:
        combine(op, operands[0], operands[1], accumulator)
        for operand in operands[2:]:
            combine(op, accumulator, operand, accumulator)
    if final:
        finish(op, n, accumulator)
