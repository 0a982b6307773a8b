"""What the steps of calls cost on the CPU ranks of a job, for predictions (``blinkmpi tune``); collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..forecast.rates import StepRates
from ..runtime.inspection import call_of, measure_steps
from ..trees.tree import Collective


def time_steps(comm: Any, names: Sequence[Collective], sizes: Sequence[int], *, root: int = 0) -> StepRates:
    """The costs for some collectives and sizes, of float32 and the sum.

    Args:
        root: of the rooted collectives.

    Raises:
        ArgumentError: where calls are not executed by C on one node.
    """
    context = comm.context
    calls = [call_of(context.n, name, nbytes, "float32", "sum", root) for name in names for nbytes in sizes]
    buffers = [np.empty(max(sizes), np.uint8) for _ in range(2)]
    for memory in buffers:
        memory.fill(0)  # pages that nothing was written to yet are all one
    for name in names:
        comm.plan(name, root)
    found = measure_steps(context, calls, (buffers[0], buffers[1]), comm.Barrier)
    if found is None:
        raise ArgumentError(
            f"steps are timed of C on the CPU ranks of one node, not of {comm.executor}; start it there"
        )
    return found
