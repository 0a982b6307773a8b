"""The streams of calls on GPUs: the current one, and one of our own that waits for it.

All groups of a process share one stream a device, so that their calls have one order.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch

from ..runtime.cuda.buffers import current_stream_of_torch
from .torch_extension import extension

STREAMS = 64  # that are remembered
capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


@cache
def communication_stream(device: Any) -> Any:
    """The stream of a device for the calls of all groups; its kernels begin before those of the model that wait."""
    return torch.cuda.Stream(device, priority=-1)


def communication_stream_here() -> tuple[int, Any]:
    """This process's device, by number, and that stream of it."""
    index = torch.cuda.current_device()
    return index, communication_stream(torch.device("cuda", index))


def current_stream(device: Any) -> Any:
    """Torch's current stream on a device; torch makes the object anew each time it is asked."""
    return _current(device.index, current_stream_of_torch(torch, device.index))


def stream_apart(device: Any) -> Any:
    """The stream for a call beside which the user goes on, told to wait for the current one.

    During the capture of a graph it is the current one itself.
    """
    if capturing():
        return current_stream(device)
    stream = communication_stream(device)
    if quick := extension(begin=True):
        quick.follow(stream)
    else:
        stream.wait_stream(current_stream(device))
    return stream


@lru_cache(STREAMS)
def _current(index: int, _address: int) -> Any:
    return torch.cuda.current_stream(index)
