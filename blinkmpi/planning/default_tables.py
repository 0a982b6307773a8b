"""The rows of the selection table that come from trials: files like those of ``blinkmpi tune``, in ``tables``.

``tables/KIND-xN.json`` is for at most N ranks, and the largest N of a kind for more. ``nvlink`` and ``other`` are for
GPUs that reach one another over one hop, on NVLink and on other links. ``nvlink-x8`` has no packets: of more GPUs than
were tried :mod:`.gpus.kernel_times` says where these end. ``memory`` is for CPU ranks that share a memory;
``no_cma`` says what these leave to MPI where they cannot read one another's, ``nodes`` what ranks of several nodes do.
``benchmarks/default_tables.py`` writes a file of GPUs anew; those of CPU ranks were written by hand.
"""

from functools import cache
from typing import Literal

from ..trees.tree import Collective
from .plan import Rule
from .tuned_table import TunedTable

Kind = Literal["nvlink", "other", "memory", "no_cma", "nodes"]


@cache
def default_table(kind: Kind, ranks: int) -> TunedTable:
    """The table of a kind for so many ranks."""
    from importlib.resources import files  # not for a barrier, all that opening a communicator plans for

    folder = files(__package__).joinpath("tables")
    sizes = [int(file.name[len(kind) + 2 : -5]) for file in folder.iterdir() if file.name.startswith(f"{kind}-x")]
    name = f"{kind}-x{min((size for size in sizes if size >= ranks), default=max(sizes))}.json"
    return TunedTable.from_json(folder.joinpath(name).read_text("utf-8"), source=name)


def rows_of(kind: Kind, ranks: int, collective: Collective) -> list[Rule]:
    """The rows of a table for a collective, ascending for each kind of buffers and types; none where it has none."""
    if collective == "barrier":  # moves nothing, so no table has rows for it
        return []
    return [row for row in default_table(kind, ranks).rules if row.collective == collective]
