"""Every algorithm of the library, for the numbers of ranks that it is for; shared by tests."""

from collections.abc import Iterator

from blinkmpi.lang import Algorithm, library
from blinkmpi.lang.written import Written

NODES = (library.two_step, library.hierarchical, library.islands)  # take ranks in a node, too
WRITTEN = tuple(value for value in vars(library).values() if isinstance(value, Written))


def of_ranks(n: int) -> Iterator[Algorithm]:
    """All that there are for ``n`` ranks; on nodes of every size."""
    for written in WRITTEN:
        if written in NODES:
            yield from (written(n, k) for k in range(1, n + 1) if n % k == 0)
        elif written.ranks is None or n in written.ranks:
            yield written(n)
