"""Algorithms for two nodes, each of half of the ranks: ``blinkmpi bench --algorithm halves.py:two_step``.

``--algo lang:NAME`` names only those of the library that take the number of ranks alone.
"""

from blinkmpi import lang
from blinkmpi.lang import library


@lang.algorithm("allreduce", chunks=lambda n: n, inplace=True)
def hierarchical(n: int) -> None:
    """As the library's on nodes of n/2 ranks."""
    library.hierarchical.body(n, n // 2)


@lang.algorithm("alltoall", chunks=1)
def two_step(n: int) -> None:
    """As the library's on nodes of n/2 ranks."""
    library.two_step.body(n, n // 2)
