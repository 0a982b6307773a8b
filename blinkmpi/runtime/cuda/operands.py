"""Operands of calls on streams, kept alive until the GPU's work on them is through.

A call with ``stream=`` returns before its kernel has run, and then the user may drop the last reference to a tensor:
its memory would be given to somebody else while the kernel still reads and writes it. Calls of one process follow one
another on its GPU, so an event behind one call is behind all earlier ones, and events can be few. Of long tensors
torch is told itself, so that it has their memory back at the first moment.
"""

from collections import deque
from typing import Any

from ...transport.cuda.device import Gpu
from ..foreign import imported

CALLS, NBYTES = 64, 32 << 20  # after so many calls, or bytes that they have moved, an event is recorded


class OperandsInFlight:
    """What calls on streams were given, newest last; nothing of a captured call: a graph's memory is its owner's."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.newest: list[Any] = []
        self._nbytes = 0
        self._torch_streams: dict[int, Any] = {}  # torch's objects of streams, by address
        self._pending: deque[tuple[Any, list[Any]]] = deque()  # events, and what may be dropped behind them

    def keep(self, operands: tuple[Any, ...], nbytes: int, stream: int) -> None:
        """Keep what a call has just been given, whose kernel is on ``stream``."""
        self.newest.append(operands)
        self._nbytes += nbytes
        if len(self.newest) >= CALLS or self._nbytes >= NBYTES:
            with self._gpu.entered():
                self._mark(operands, nbytes, stream)

    def _mark(self, operands: tuple[Any, ...], nbytes: int, stream: int) -> None:
        if self._gpu.capturing(stream):  # an event that was recorded in a capture cannot be queried
            self.newest.pop()
            return
        if nbytes >= NBYTES and (tensors := tensors_among(operands)):
            on = self._torch_streams.get(stream)
            if on is None:
                torch = imported("torch")
                on = self._torch_streams[stream] = torch.cuda.ExternalStream(stream, device=self._gpu.device)
            for tensor in tensors:
                tensor.record_stream(on)
            self.newest[-1] = tuple(o for o in operands if not any(o is t for t in tensors))
        self._pending.append((self._gpu.mark(stream), self.newest))
        self.newest, self._nbytes = [], 0
        while self._pending and self._gpu.idle(self._pending[0][0]):
            self._pending.popleft()


def tensors_among(operands: tuple[Any, ...]) -> list[Any]:
    """Those that are torch's; a torch without CUDA, or one still being imported, has none."""
    kind = getattr(imported("torch"), "Tensor", None)
    return [o for o in operands if isinstance(o, kind)] if kind is not None else []
