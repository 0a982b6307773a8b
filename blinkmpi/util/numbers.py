"""Whole numbers that programs pass: Python's, NumPy's, and what mpi4py takes for one."""

import operator
from numbers import Real

from ..errors import ArgumentError
from .text import quoted


def whole(value: object) -> int | None:
    """An int of what mpi4py takes for one: also NumPy's integers and bools, arrays of no dimension, and ``2.0``."""
    if type(value) is int:
        return value
    if getattr(value, "shape", ()) != ():
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        if not isinstance(value, Real) and not hasattr(value, "shape"):
            return None
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number == value else None


def rank_of(value: object, n: int, name: str = "root") -> int:
    """A rank of ``n`` as an int.

    Raises:
        ArgumentError: for anything else.
    """
    rank = whole(value)
    if rank is None or not 0 <= rank < n:
        raise ArgumentError(f"{name}={quoted(value)}: expected a rank, 0 to {n - 1}; pass one of these")
    return rank


def size_of(value: object, name: str = "nbytes") -> int:
    """A number of bytes as an int.

    Raises:
        ArgumentError: for anything else.
    """
    nbytes = whole(value)
    if nbytes is None or not 0 <= nbytes < 1 << 62:
        raise ArgumentError(f"{name}={quoted(value)}: expected a number of bytes, 0 to 2^62; pass one")
    return nbytes
