"""Messages of GPU tensors: from GPU to GPU, or by gloo and host memory.

A group of ranks of one node whose GPUs have mapped each other's memory sends them from GPU to GPU. But torch opens a
group by its first collective, which messages may come before. Those go by gloo. The ranks open the group at different
moments of their own, so they tell each other how many messages each has begun. The first ones, up to the greater of the
sender's number and the receiver's, go by gloo at both ends.
"""

from __future__ import annotations

import ctypes
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from ..collectives import dispatcher_of
from ..errors import BufferTypeError, DeviceError
from ..runtime.bootstrap import own_settings
from ..transport.cuda.memory_layout import shape_text
from ..util.settings import LogOnce
from .compiler import hide
from .operands import Tensor, flat, nbytes, writable
from .streams import current_stream
from .torch_extension import extension
from .work import Work, work_on

if TYPE_CHECKING:
    from ..transport.cuda.messages import Fifo
    from ..transport.cuda.transport import CudaTransport

NOT_OPEN = "the group is opened by its first collective; make one before"
CLOSED = "the group was destroyed"


class DeviceMessages:
    """The messages of GPU tensors of a group of ``size`` ranks.

    Attributes:
        why_not: why they go by gloo; empty if they go from GPU to GPU.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.why_not = NOT_OPEN
        self._rank, self._size, self._one = rank, size, Lock()
        self._begun = [[0] * size, [0] * size]  # received from each rank, and sent to it
        self._by_gloo = [[0] * size, [0] * size]  # likewise, how many go by gloo
        self._dispatcher: Any = None
        self._ends: dict[tuple[int, bool], MessageEnd] = {}
        self._say = LogOnce(own_settings())

    def explain(self, nbytes: int) -> str:
        """Say how a message of so many bytes goes, and why."""
        if self.why_not:
            return f"a message of a GPU tensor goes by gloo and host memory: {self.why_not}"
        return f"a message of {nbytes} bytes goes from GPU to GPU: {shape_text(nbytes, self._size)}"

    def open(self, comm: Any) -> None:
        """Send from GPU to GPU from now on, if the ranks of an opened group can; collective."""
        dispatcher = dispatcher_of(comm)
        context = dispatcher.sequence.context
        with self._one:
            if context.gpus is None:
                self.why_not = context.why_no_gpus
            elif self._size == 1:
                self.why_not = "it has one rank"
            elif context.gpus.here:
                self.why_not = "its ranks are on several nodes"
            else:
                context.gpus.transport.load_messages()
                told = dispatcher.sequence.numbers_of_all([*self._begun[0], *self._begun[1]], context.timeout_s)
                for sends in (0, 1):
                    theirs = [numbers[(1 - sends) * self._size + self._rank] for numbers in told]
                    self._by_gloo[sends] = [*map(max, self._begun[sends], theirs)]
                self.why_not, self._dispatcher = "", dispatcher

    def close(self) -> None:
        """Send nothing any more."""
        with self._one:
            self.why_not = CLOSED
            self._ends.clear()

    def next(self, peer: int, *, sends: bool) -> MessageEnd | None:
        """What carries the next message to a rank, or from it; None: gloo does."""
        with self._one:
            number = self._begun[sends][peer]
            self._begun[sends][peer] += 1
            if self.why_not or number < self._by_gloo[sends][peer]:
                if self.why_not:
                    self._say(f"messages of GPU tensors go by gloo and host memory: {self.why_not}")
                return None
            end = self._ends.get((peer, sends))
            if end is None:
                end = self._ends[peer, sends] = MessageEnd(self._dispatcher, peer, sends=sends)
            return end

    def count_received(self, peer: int) -> None:
        """A message for any source has come from a rank, by gloo."""
        with self._one:
            self._begun[0][peer] += 1


class MessageEnd:
    """This rank's end of the messages to a rank, or of those from it."""

    def __init__(self, dispatcher: Any, peer: int, *, sends: bool) -> None:
        self._dispatcher, self._sequence, self._sends = dispatcher, dispatcher.sequence, sends
        self._transport: CudaTransport = dispatcher.sequence.context.gpus.transport
        self._fifo: Fifo = self._transport.messages.fifo(peer, sends=sends)
        self._stream = _stream(self._fifo.stream.ptr, self._transport.gpu.device)
        self._quick: Any = None  # the same in C++, once that is there

    def put(self, tensor: Tensor, tag: int, timeout_s: float) -> Work:
        """Send a tensor, or receive one of the same length, on a stream that waits for the current one.

        Raises:
            BufferTypeError: for a tensor of another GPU. BlinkError: if an earlier call or message has failed.
        """
        hide()
        if self._quick is None and (made := extension(begin=True)):
            numbers, words = self._fifo.for_c()
            lock, report = self._fifo.order.lock, ctypes.addressof(self._transport.report)
            self._quick = made.MessageEnd(numbers, words, lock.acquire, lock.release, self._stream, report)
        if self._quick is not None and self._sequence.dead is None:
            found = self._quick.put(tensor, tag, int(timeout_s * 1e9))
            if type(found) is int:
                raise DeviceError(f"launch of a message: CUDA error {found}; this process must be started again")
            if found is not None:
                work: Work = found
                return work
        return self._put(tensor, tag, timeout_s)

    def _put(self, tensor: Tensor, tag: int, timeout_s: float) -> Work:
        self._dispatcher.check()
        whole, after = (flat(tensor), None) if self._sends else writable(tensor)
        if whole.get_device() != self._transport.gpu.device:
            raise BufferTypeError(
                f"a message of a tensor on {whole.device}, and this rank's GPU is cuda:{self._transport.gpu.device}; "
                "pass a tensor of that"
            )
        self._stream.wait_stream(current_stream(whole.device))
        self._fifo.put(whole.data_ptr(), nbytes(whole), tag, timeout_s)
        if after is not None:
            with torch.cuda.stream(self._stream):
                after()
        return work_on(self._stream, [tensor], (whole, tensor), apart=True)


@cache
def _stream(address: int, device: int) -> Any:
    """Torch's object of a stream of ours, which lives as long as the process."""
    return torch.cuda.ExternalStream(address, device=device)
