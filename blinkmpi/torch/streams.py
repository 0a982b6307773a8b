"""Calls on GPUs: on the current stream, or on one of our own that waits for it.

All groups of a process share one stream a device, so that their calls have one order. A call of which the user waits at
once, and any during the capture of a graph, is put on the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from .operands import After, Tensor
from .work import DeviceWork


@cache
def communication_stream(device: Any) -> Any:
    """The stream of a device for the calls of all groups."""
    return torch.cuda.Stream(device)


def enqueue(
    put: Callable[[Any], object], outputs: Sequence[Tensor], operands: Sequence[Tensor], after: After, *, apart: bool
) -> DeviceWork:
    """Put a call on a stream.

    Args:
        put: makes the call on the stream that it is given.
        operands: all tensors that the call reads and writes, temporaries too.
        after: what is left to do with the result, on the same stream.
        apart: whether the user goes on with other work meanwhile.
    """
    device = operands[0].device
    current = torch.cuda.current_stream(device)
    if not apart or torch.cuda.is_current_stream_capturing():
        put(current)
        if after is not None:
            after()
        return DeviceWork(outputs, current, None, ())
    stream = communication_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        put(stream)
        if after is not None:
            after()
        event = stream.record_event()
    return DeviceWork(outputs, stream, event, (*operands, *outputs))
