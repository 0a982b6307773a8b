"""Messages between the GPUs of a node: a kernel for each end of a message, on a stream for each end of a FIFO.

What one rank sends to another meets what that receives from it in the order of the calls, as with NCCL. A message is
matched, checked and moved by the kernels (``kernels/messages.cu``); the ranks' hosts do not meet. A stream for each
rank and direction keeps the messages of one FIFO in order, and lets no message wait for another rank's.

In a CUDA graph the streams are branches of the graph. An event chains the messages of each end in the order in which
calls and graphs are launched, as :class:`.order.Order` has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..announcement import Called
from .codegen import MESSAGE_THREADS
from .kernel_layout import MESSAGE, buffers_at, fill_call, timeout_at
from .loaded_kernel import load_kernel
from .memory_layout import MESSAGE_LANE, lanes_for, message_lanes
from .order import Order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .device import Gpu, Kernel


KNOWN = MESSAGE.index("nbytes")  # words of a message that are the same for all of a FIFO
SPARE_STREAMS: list[Any] = []  # of closed communicators: others may still name a stream, so none is destroyed


class Fifo:
    """This rank's end of the messages to a rank, or of those from it.

    Args:
        words: the arguments of every message, up to ``nbytes``.

    Attributes:
        stream: of its kernels alone.
        order: of its messages, on that stream and in graphs.
    """

    def __init__(self, gpu: Gpu, kernel: Kernel, n: int, words: Sequence[int]) -> None:
        self._gpu, self._n, self._sends = gpu, n, bool(words[-1])
        self.stream, self.order = SPARE_STREAMS.pop() if SPARE_STREAMS else gpu.new_stream(), Order()
        self.order.chain_from_now(gpu)
        room = len(words) + len(MESSAGE) - KNOWN
        self._message = load_kernel(kernel, 1, MESSAGE_THREADS, words, "messages", Called("a message"), room=room)
        self._launches: dict[int, Callable[[], None]] = {}  # by lanes

    def put(self, at: int, nbytes: int, tag: int, timeout_s: float) -> None:
        """Send what lies at an address, or receive it there, behind what is on the stream.

        Args:
            at: on this GPU, where the memory stays what it is until the stream is through.
            nbytes, tag: the same at both ends.
            timeout_s: how long the kernel waits for the other rank at a time.

        Raises:
            DeviceError: if the kernel cannot be launched.
        """
        args, stream = self._message.args, self.stream.ptr
        with self.order.lock:
            self.order.begin(self._gpu, stream, self.stream, mixes=True)
            ends = (at, 0) if self._sends else (0, at)
            fill_call(args, self._n, int(timeout_s * 1e9), (*ends, 0, 0, 0, 0))
            args[len(args) - 2 : len(args)] = [nbytes, tag]
            self._launch(lanes_for(nbytes, self._n))()
            self.order.end(self._gpu, stream, mixes=True)

    def _launch(self, lanes: int) -> Callable[[], None]:
        found = self._launches.get(lanes)
        if found is None:
            message = self._message
            found = message.kernel.launcher(lanes, message.block, self.stream.ptr, message.params, message.called.words)
            self._launches[lanes] = found
        return found

    def for_c(self) -> tuple[dict[str, int], list[int]]:
        """What C++ needs to do the same: numbers by name, and the arguments, of which it sets those that differ.

        Of those that differ, the last two are ``nbytes`` and ``tag``.
        """
        names, kernel = ("launch", "wait", "record", "capturing"), self._message.kernel
        numbers = {name: self._gpu.functions[name] for name in names} | {
            "function": kernel.handle, "block": self._message.block, "stream": self.stream.ptr,
            "chain": self.order.state.event or 0, "device": self._gpu.device,
            "lane": MESSAGE_LANE, "lanes": message_lanes(self._n),
            "timeout_at": timeout_at(self._n), "buffer_at": buffers_at(self._n) + (not self._sends),
        }  # fmt: skip
        return numbers, [*self._message.args]


class Messages:
    """The FIFOs of this rank.

    Args:
        common: the first arguments of the kernel, for all messages.
        memory_at: where FIFOs are in every rank's symmetric memory.
    """

    def __init__(self, gpu: Gpu, kernel: Kernel, n: int, common: Sequence[int], memory_at: int) -> None:
        self._gpu, self._kernel, self._n = gpu, kernel, n
        self._common, self._memory_at = common, memory_at
        self._fifos: dict[tuple[int, bool], Fifo] = {}

    def fifo(self, peer: int, *, sends: bool) -> Fifo:
        """The end of what goes to a rank, or comes from it; made when it is first asked for."""
        found = self._fifos.get((peer, sends))
        if found is None:
            given: dict[str, Any] = {"memory_at": self._memory_at, "peer": peer, "sends": int(sends)}
            words = [*self._common, *(given[name] for name in MESSAGE[:KNOWN])]
            with self._gpu.entered():
                made = Fifo(self._gpu, self._kernel, self._n, words)
            found = self._fifos.setdefault((peer, sends), made)
        return found

    def close(self) -> None:
        """Leave the streams to others, when their work is done."""
        SPARE_STREAMS.extend(fifo.stream for fifo in self._fifos.values())
        self._fifos.clear()
