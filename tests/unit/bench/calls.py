"""Calls for the tests of the benchmark."""

from typing import Any

from blinkmpi.program.call import Call


def call_of_count(collective: Any, n: int, count: int, dtype: str, op: str = "", root: int = -1) -> Call:
    """A call by nccl-tests' count: the elements of the vector, or of every rank's block."""
    return Call(collective, n, (count,) * (n if collective == "reduce_scatter" else 1), dtype, op, root)
