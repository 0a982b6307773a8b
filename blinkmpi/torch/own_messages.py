"""Messages of a rank to itself, which gloo does not carry: ``batch_isend_irecv`` has them among those to others."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from itertools import count
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError, CollectiveTimeout
from .compiler import hidden
from .operands import Tensor
from .streams import current_stream
from .work import Work


class Message(NamedTuple):
    """A copy of what was sent; on a GPU, an event behind the copying."""

    copy: Tensor
    event: Any


Slot = SimpleQueue[Message]  # of one message


class OwnMessages:
    """What a rank of a group sends to itself: the k-th message of a tag is for the k-th receive of it."""

    def __init__(self) -> None:
        self._one = Lock()
        self._numbers: defaultdict[tuple[bool, int], count[int]] = defaultdict(count)  # by sent or received, and tag
        self._open: dict[tuple[int, int], Slot] = {}  # by tag and number: only sent so far, or only asked for

    def send(self, tensor: Tensor, tag: int) -> Work:
        """Send a copy of a tensor, which may be changed afterwards."""
        copy = tensor.detach().clone()
        event = current_stream(copy.device).record_event() if copy.is_cuda else None
        self._slot(tag, received=False).put(Message(copy, event))
        return Work([tensor])

    def receive(self, tensor: Tensor, tag: int, rank: int, seconds: float) -> Work:
        """Receive what this rank sends, or has sent; ``wait`` waits for it for ``seconds`` at most, and copies it."""
        return OwnReceive(tensor, self._slot(tag, received=True), rank, seconds)

    def _slot(self, tag: int, *, received: bool) -> Slot:
        with self._one:
            key = tag, next(self._numbers[received, tag])
            if key in self._open:
                return self._open.pop(key)
            return self._open.setdefault(key, SimpleQueue())


@hidden
class OwnReceive(Work):
    """A message to oneself that is waited for; several threads may do so."""

    def __init__(self, tensor: Tensor, slot: Slot, rank: int, seconds: float) -> None:
        super().__init__([tensor])
        self._slot, self._rank, self._seconds, self._here, self._waiting = slot, rank, seconds, False, Lock()

    def is_completed(self) -> bool:
        """Whether the message was sent."""
        return self._here or not self._slot.empty()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it was sent and copy it, on a GPU on the current stream.

        Raises:
            CollectiveTimeout: if it was not sent.
            ArgumentError: if it is not as long as the tensor, or of another type.
        """
        seconds = timeout.total_seconds() if timeout else self._seconds
        with self._waiting:
            if not self._here:
                try:
                    message = self._slot.get(timeout=seconds)
                except Empty:
                    raise CollectiveTimeout(
                        f"rank {self._rank} waits for a message from itself, and has sent none within {seconds:g} s; "
                        "send it before wait()"
                    ) from None
                self._here = True
                try:
                    self._bring(*message)
                except BaseException as error:
                    self._error = error
            if self._error is not None:
                raise self._error
        return True

    def source_rank(self) -> int:
        """Who sent it."""
        return self._rank

    _source_rank = source_rank

    def _bring(self, copy: Tensor, event: Any) -> None:
        (tensor,) = self.outputs
        if (copy.numel(), copy.dtype) != (tensor.numel(), tensor.dtype):
            raise ArgumentError(
                f"rank {self._rank} receives {tensor.numel()} x {tensor.dtype} from itself, and has sent "
                f"{copy.numel()} x {copy.dtype}; pass tensors of one length and type"
            )
        if event is not None:
            stream = current_stream(copy.device)
            stream.wait_event(event)
            copy.record_stream(stream)
        with torch.no_grad():
            tensor.copy_(copy.reshape(tensor.shape))
