"""``HostOutlook``: what is known of the transport on CPU ranks before it opens: executor, protocols, places."""

from __future__ import annotations

from . import native
from .capabilities import Known
from .host_program import ExecutorName
from .shared_window import WindowLayout
from .single_copy import Helper


class HostOutlook:
    """What programs are resolved by.

    Args:
        executor_reason: what executes them, in words.
        helps: whether a second thread may read long vectors.

    Attributes:
        no_cma: why the ranks cannot read one another's memory; empty if they can, as far as that is known.
        has_shots: whether C sends the messages of short calls between nodes.
    """

    native: native.Native | None
    executor: ExecutorName
    executor_reason: str
    no_cma: str
    has_shots: bool
    window: WindowLayout
    arena_bytes: int
    helper: Helper

    def __init__(self, known: Known, executor_reason: str, window: WindowLayout, *, helps: bool) -> None:
        self.native, self.executor = known.native, "c" if known.native else "numpy"
        self.executor_reason, self.no_cma, self.has_shots = executor_reason, known.no_cma or "", known.has_shots
        self.window, self.arena_bytes = window, window.arena_bytes
        self.helper = Helper(self.native if helps else None, len(window.here))
