"""How long a test waits: the two times that assertions may name, so that no test measures the machine.

Both are for a machine whose cores are all taken, by a second run of these tests or by programs that spin.
"""

import time
from collections.abc import Callable

# What takes a fraction of a second on an idle machine may take so long, behind the event or the deadline that starts
# it: beside others, a process gets a core now and then.
PATIENCE_S = 20.0

# A deadline of ours that must not pass, longer than any test may take: what comes earlier came for another reason.
NEVER_S = 600.0


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait for what another thread or process does; an AssertionError says that it has not come."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.005)
