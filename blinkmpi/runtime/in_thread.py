"""Run a call that has no deadline, such as MPI's ``Spawn``, in a thread, and poll it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

MOMENT_S = 1e-3  # length of one wait
T = TypeVar("T")


class InThread(Generic[T]):
    """Work in a thread, which is polled as a request of MPI's is.

    Args:
        name: of the thread.
    """

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._made: list[T] = []
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, args=(work,), name=name, daemon=True).start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._made.append(work())
        except BaseException as error:
            self._error = error
        self._done.set()

    def ended(self) -> bool:
        """Whether it has ended, within a moment."""
        return self._done.wait(MOMENT_S)

    def result(self) -> T:
        """What it has made; raises what went wrong."""
        if self._error is not None:
            raise self._error
        return self._made[0]
