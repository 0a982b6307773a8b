"""How long something computes, whatever runs beside it: processors that share caches slow one another down."""

import time
from collections.abc import Callable

TIMES = 3


def least_seconds(call: Callable[[], object]) -> float:
    """The least CPU time of some calls."""
    found = []
    for _ in range(TIMES):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return min(found)
