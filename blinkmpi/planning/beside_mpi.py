"""Where calls on CPU ranks were slower than plain mpi4py's blocking ones, for ``explain``, and on which machine.

``benchmarks/report.py`` writes ``beside_mpi.json`` from the result files of ``benchmarks/small_calls.py``.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from ..program.call import Call
from ..util.text import plural, size_text

FILE = "beside_mpi.json"
NEAR = 2.0  # a size is that of a measured one up to this factor


@cache
def measured() -> dict[str, Any]:
    """The file: ``goal``, and for each ``RANKSxHOSTS`` its machine and, by collective, rows of (bytes, least ratio)."""
    found: dict[str, Any] = json.loads(files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    return found


def slower(call: Call, hosts: int) -> str:
    """A sentence if a call of about this size had less than the goal of mpi4py's speed; else nothing.

    Args:
        hosts: on which the ranks lie.
    """
    table, ranks = measured(), f"{call.n}x{hosts}"
    rows = table["rows"].get(ranks, {}).get(call.collective, [])
    if not rows:
        return ""
    size, ratio = min(rows, key=lambda row: max(row[0] / max(call.nbytes, 1), max(call.nbytes, 1) / max(row[0], 1)))
    far = size and not size / NEAR <= call.nbytes <= size * NEAR
    if far or ratio >= table["goal"]:
        return ""
    what = f"a {call.collective}" + (f" of {size_text(size)}" if size else "")
    where = f"{plural(call.n, 'rank')} on {plural(hosts, 'host')}"
    return (
        f"beside plain mpi4py: {what} of {where} ran at {ratio:.2f} of its speed on one machine "
        f"({table['machines'][ranks]}); docs/measurements.md, Short calls, has the table and the reason"
    )
