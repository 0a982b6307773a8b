"""``CallInFlight``: wait for a call that was put on its stream, and raise what went wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from ...errors import BlinkError, DeviceError, MismatchError, PeerLost
from ...transport.host.transport import LOOK_SECONDS
from .history import CallHistory

GRACE_S = 1.0  # a peer whose process has ended, and whose part is missing, counts as lost after this time
SHORT_S = 0.001  # a wait polls without sleeping for so long


class CallInFlight:
    """A call on a stream.

    Args:
        on: what is waited for: the stream, or an event on it.
    """

    __slots__ = ("_history", "_on", "_timeout_s", "seq", "text")

    def __init__(self, history: CallHistory, seq: int, text: str, timeout_s: float, on: Any) -> None:
        self._history, self.seq, self.text, self._timeout_s, self._on = history, seq, text, timeout_s, on

    def test(self) -> bool:
        """Whether the stream is through."""
        return self._history.context.gpu.idle(self._on)

    def wait(self, progress: Callable[[], bool] = lambda: False) -> None:
        """Wait until the stream is through; look after the peers now and then.

        Args:
            progress: does meanwhile what is to be done on the host, and says whether there may be more of it.

        Raises:
            CollectiveTimeout, MismatchError, PeerLost: after which the communicator is dead.
        """
        peers, transport = self._history.host.peers, self._history.context.transport
        began = looked = time.monotonic()
        polls, lost_since = 0, 0.0
        found: BlinkError | None = None
        while (found is None and progress()) | (not self._idle()):
            polls += 1
            if polls % 64:
                continue
            now = time.monotonic()
            if now - began > SHORT_S:
                time.sleep(2e-5)
            if found is not None or now - looked < LOOK_SECONDS:
                continue
            looked = now
            found = peers.mismatch_so_far(self.seq, self.text)
            peers.warn(self.seq, self._owed, now - began, self._timeout_s)
            gone = peers.ended()
            lost_since = (lost_since or now) if gone else 0.0
            if found is None and lost_since and now - lost_since > GRACE_S:
                found = PeerLost(f"GPU call {self.text}: {peers.states(gone, self.seq)}; {peers.remedy}", gone)
            if found is not None:
                transport.abort()
        if transport.aborted or (found is not None and progress()):
            raise found or self.failure()

    def failure(self) -> BlinkError:
        """What a kernel that gave up has left, or the error of the rank that made it give up."""
        host, error = self._history.host, self._history.error(self.text, self.seq)
        if isinstance(error, MismatchError) and (different := host.peers.different(self.seq)):
            return MismatchError(f"{different}; call the same on every rank. The communicator is dead")
        until = time.monotonic() + GRACE_S
        try:
            # the rank that gave up first has the reason: wait for its error
            while isinstance(error, PeerLost) and time.monotonic() < until:
                host.raise_abort(self.seq)
                time.sleep(0.01)
        except BlinkError as known:
            return known
        return error

    def _owed(self) -> dict[int, str]:
        """The ranks that have not come; where all have, one of them may not go on, or this GPU has other work."""
        peers = self._history.host.peers
        return peers.absent(self.seq) or peers.owing("its kernel, or other work on the streams")

    def _idle(self) -> bool:
        """As :meth:`test`; what breaks the GPU's work may be that a peer's memory is gone."""
        try:
            return self.test()
        except DeviceError as broken:
            peers, error = self._history.host.peers, cast(BlinkError, broken)
            until = time.monotonic() + GRACE_S
            while time.monotonic() < until and not peers.ended():
                time.sleep(0.01)
            if gone := peers.ended():
                error = PeerLost(f"GPU call {self.text}: {peers.states(gone, self.seq)}; {broken}", gone)
            raise error from broken
