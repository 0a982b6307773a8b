"""``Work``: what torch gets for a collective, to wait for it, ask it, or hang more work on it.

What it waits for depends on where the tensors lie: nothing for a call that is through, a request for one in host
memory, an event for one on a GPU, where waiting makes the current stream wait and not the host.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

from ..errors import BlinkError, CollectiveTimeout
from ..runtime.bootstrap import own_settings
from ..util.settings import log
from .compiler import hidden
from .operands import After, Tensor
from .streams import capturing, current_stream, stream_apart
from .torch_extension import extension

POLL_S = 2e-4
OLDER = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 7)
_alive: set[Work] = set()  # before 2.7 torch holds only the C++ half of an object that Python has made


@hidden
class Work(dist._Work):  # type: ignore[misc]
    """A call that is through.

    Args:
        outputs: the tensors that hold its results.
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.outputs = list(outputs)
        self._error: BaseException | None = None

    def is_completed(self) -> bool:
        """Whether the result is there, or an error."""
        return True

    def is_success(self) -> bool:
        """Whether it ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """The error, if it ended with one."""
        return self._error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result, on a GPU for the current stream only; raises the call's own error.

        Args:
            timeout: how long the host waits at most; none, or zero: as long as the group's own deadline lets it.
        """
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that hold the results, or will."""
        return self.outputs

    def get_future(self) -> Any:
        """A future of the tensors. In host memory it waits for them first: so errors keep their type."""
        self.wait()
        future = torch.futures.Future()
        future.set_result(self.outputs)
        return future


@hidden
class HostWork(Work):
    """A call in host memory that is under way; several threads may wait for it.

    Args:
        request: MPI's way to wait for it, which one thread may do.
        after: what is left to do with the result on this rank.
        explain: completes the call's error.
    """

    def __init__(
        self, outputs: Sequence[Tensor], request: Any, after: After, explain: Callable[[BlinkError], object]
    ) -> None:
        super().__init__(outputs)
        self._request, self._after, self._explain, self._one = request, after, explain, Lock()
        if OLDER:
            _alive.add(self)

    def is_completed(self) -> bool:
        """Whether the result is there, or an error."""
        if not self._one.acquire(blocking=False):  # a thread waits, or looks, and finds it under way
            return False
        try:
            return self._ended("Test")
        finally:
            self._one.release()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result."""
        seconds = timeout.total_seconds() if timeout else 0.0
        until = time.monotonic() + seconds
        while seconds > 0 and not self.is_completed():
            if time.monotonic() > until:
                raise CollectiveTimeout(f"wait({seconds} s): the call is still under way; wait longer")
            time.sleep(POLL_S)
        with self._one:
            self._ended("Wait")
        if self._error is not None:
            raise self._error
        return True

    def _ended(self, look: str) -> bool:
        """Whether the call has ended, by the request's ``Test`` or ``Wait``; then nothing is left to do."""
        if self._request is None:
            return True
        try:
            if not getattr(self._request, look)():
                return False
            if self._after is not None:
                self._after()
        except BaseException as error:
            if isinstance(error, BlinkError):
                self._explain(error)
            self._error = error
        self._request = self._after = None
        _alive.discard(self)
        return True

    def __del__(self) -> None:
        """Nobody waited: a result that is not where it shall be stays away from there."""
        if getattr(self, "_after", None) is not None and not sys.is_finalizing():
            text = "nobody waited for an asynchronous call, so its result was not copied into a tensor that is not"
            log(own_settings(), "WARN", f"{text} contiguous, or a list; call wait() on what the call returned")


@hidden
class DeviceWork(Work):
    """A call on a GPU that a stream runs.

    Args:
        stream: torch's stream on which it is.
        event: recorded behind it there, or None if that is the stream on which it was asked for.
        operands: what must live until it is through; given back by the first ``wait``, or left to ``stream``.
    """

    def __init__(self, outputs: Sequence[Tensor], stream: Any, event: Any, operands: Sequence[Tensor]) -> None:
        super().__init__(outputs)
        self.stream, self._event, self._operands = stream, event, list(operands)
        if OLDER and event is not None:
            _alive.add(self)

    def is_completed(self) -> bool:
        """Whether the stream has come behind the call."""
        return bool(self._event.query() if self._event is not None else self.stream.query())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait; with a timeout the host waits, too."""
        if self._event is not None:
            current_stream(self.stream.device).wait_event(self._event)
            self._operands.clear()  # what the current stream does next, freeing them too, comes behind the call
            _alive.discard(self)
        seconds = timeout.total_seconds() if timeout else 0.0
        until = time.monotonic() + seconds
        while seconds > 0 and not self.is_completed():
            if time.monotonic() > until:
                raise CollectiveTimeout(f"wait({seconds} s): the call is still under way; wait longer")
            time.sleep(POLL_S)
        return True

    def get_future(self) -> Any:
        """A future of the tensors, which is there at once; who asks for them has its stream wait."""
        future = torch.futures.Future(devices=[self.stream.device])
        with torch.cuda.stream(self.stream):
            future.set_result(self.outputs)
        return future

    def __del__(self) -> None:
        """Nobody waited: the allocator is told which stream still uses the memory."""
        if sys.is_finalizing():  # CUDA may have gone
            return
        for tensor in getattr(self, "_operands", ()):
            tensor.record_stream(self.stream)


def enqueue(
    put: Callable[[Any], object], outputs: Sequence[Tensor], operands: Sequence[Tensor], after: After, *, apart: bool
) -> Work:
    """Put a call on a stream.

    One of which the user waits at once, and any during the capture of a graph, goes on the current stream.

    Args:
        put: makes the call on the stream that it is given.
        operands: all tensors that the call reads and writes, temporaries too.
        after: what is left to do with the result, on the same stream.
        apart: whether the user goes on with other work meanwhile.

    Returns:
        A :class:`DeviceWork`, or one of torch_extension.cpp, which does the same, if that is there.
    """
    device = operands[0].device
    if not apart or capturing():
        put(current := current_stream(device))
        if after is not None:
            after()
        return work_on(current, outputs, (), apart=False)
    stream = stream_apart(device)
    put(stream)
    if after is not None:  # work of torch's own, which goes on the current stream
        with torch.cuda.stream(stream):
            after()
    return work_on(stream, outputs, (*operands, *outputs), apart=True)


def work_on(stream: Any, outputs: Sequence[Tensor], operands: Sequence[Tensor], *, apart: bool) -> Work:
    """The Work of a call that was put on a stream: one of its own, ``apart``, or the current one."""
    if quick := extension():
        work: Work = quick.work(outputs, operands, stream, apart)
        return work
    return DeviceWork(outputs, stream, stream.record_event() if apart else None, operands)


@hidden
class Coalesced(Work):
    """A call that is made together with others, in ``made``; until then there is nothing to wait for."""

    made: Work | None = None

    def is_completed(self) -> bool:
        """Whether it was made, and is through."""
        return self.made is not None and self.made.is_completed()

    def is_success(self) -> bool:
        """Whether it ended without an error."""
        return self.made is not None and self.made.is_success()

    def exception(self) -> BaseException | None:
        """Its error, or another one's of those that were made with it."""
        return None if self.made is None else self.made.exception()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all that were made with it."""
        return self.made is None or _waited_for(self.made, timeout)


@hidden
class Several(Work):
    """Some calls that torch's user made as one."""

    def __init__(self, works: Sequence[Work], outputs: Sequence[Tensor]) -> None:
        super().__init__(outputs)
        self._works = list(works)

    def is_completed(self) -> bool:
        """Whether all are through."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all ended without an error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """The first error."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all."""
        return all(_waited_for(work, timeout) for work in self._works)


def _waited_for(work: Work, timeout: timedelta | None) -> bool:
    """Wait for a Work of ours or of torch_extension.cpp, which takes no None."""
    return work.wait() if timeout is None else work.wait(timeout)
