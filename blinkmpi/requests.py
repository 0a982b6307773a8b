"""The request of a non-blocking call: a generalized request that our progress thread completes."""

from __future__ import annotations

import threading
from typing import Any, Literal

from mpi4py import MPI

from .errors import BlinkError


class Request(MPI.Grequest):
    """Behaves as any ``MPI.Request`` (also in ``Waitall``); ``Wait`` and ``Test`` raise the call's own error."""

    _done: threading.Event
    _error: list[BaseException]

    def __new__(cls) -> Request:
        """Start a request that :meth:`finish` ends."""
        error: list[BaseException] = []

        def query(status: MPI.Status, *_: Any) -> None:
            status.Set_elements(MPI.BYTE, 0)
            status.Set_cancelled(False)
            if error:
                raise error[0]

        base = MPI.Grequest.Start(query, None, None)
        self = super().__new__(cls, base)
        self._done, self._error = threading.Event(), error
        return self

    def finish(self, error: BaseException | None) -> None:
        """Mark the call as ended (from any thread)."""
        if error is not None:
            self._error.append(error)
        self.Complete()
        self._done.set()

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Block until the result is there.

        Raises:
            What the call itself would have raised.
        """
        self._done.wait()
        self._raise()
        super().Wait(status)
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Whether the result is there; raises as :meth:`Wait` does."""
        if not self._done.is_set():
            return False
        self._raise()
        return bool(super().Test(status))

    def wait(self, status: MPI.Status | None = None) -> Any:
        """As :meth:`Wait`."""
        return self.Wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, Any | None]:
        """As :meth:`Test`, in the form of mpi4py's lower-case methods."""
        return self.Test(status), None

    def _raise(self) -> None:
        if self._error:
            error = self._error[0]
            raise error if isinstance(error, BlinkError) else BlinkError(f"the call failed: {error!r}") from error
