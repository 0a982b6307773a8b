"""A hook for DDP, for those who keep another process group: it averages the gradients with a Communicator.

``model.register_comm_hook(None, blinkmpi.torch.ddp_hook(comm))``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..errors import BlinkError
from .operands import typed
from .work import enqueue


def ddp_hook(comm: Any) -> Callable[[Any, Any], Any]:
    """A communication hook of ``DistributedDataParallel``.

    Args:
        comm: a Communicator of the model's ranks.

    Returns:
        What ``register_comm_hook(state, hook)`` takes; it has no state. An error of a call says which bucket it was.
    """

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        buffer = bucket.buffer()
        try:
            return _averaged(comm, buffer)
        except BlinkError as error:
            parameters = len(bucket.parameters())
            error.add_note(f"in bucket {bucket.index()} of DDP: {parameters} parameters, {buffer.numel()} elements")
            raise

    # torch compares annotations with these types
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return hook


def _averaged(comm: Any, buffer: Any) -> Any:
    """A future of the buffer, which is averaged in place."""
    if buffer.is_cuda:
        put = partial(_put, comm, buffer)
        work = enqueue(put, [buffer], [buffer], None, apart=True)
        future = torch.futures.Future(devices=[buffer.device])
        with torch.cuda.stream(work.stream):
            future.set_result(buffer)
        return future
    comm.Allreduce(None, typed(buffer), "avg")
    future = torch.futures.Future()
    future.set_result(buffer)
    return future


def _put(comm: Any, buffer: Any, stream: Any) -> None:
    comm.Allreduce(None, buffer, "avg", stream=stream)
