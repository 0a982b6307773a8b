"""A hook for DDP, which averages the gradients with a Communicator.

``model.register_comm_hook(None, blinkmpi.torch.ddp_hook())``. Without a hook DDP divides the gradients before it sums
them, by a kernel for each parameter. With a Communicator of one's own, DDP may keep another process group.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..collectives import dispatcher_of
from ..errors import BlinkError
from ..runtime.collectives import ALLREDUCE
from .fast_path import average, quick_calls
from .group import communicator, same_ranks
from .operands import typed
from .profiling import profiled
from .streams import stream_apart
from .torch_extension import extension


def ddp_hook(comm: Any = None) -> Callable[[Any, Any], Any]:
    """A communication hook of ``DistributedDataParallel``.

    Args:
        comm: a Communicator of the model's ranks, or a group of backend ``blink``; by default the default group.

    Returns:
        What ``register_comm_hook(state, hook)`` takes; it has no state. An error of a call says which bucket it was.

    Raises:
        ArgumentError: if there is no such group, or its one rank is not all of torch's job.
    """
    comm, quick = communicator(comm, "ddp_hook"), None
    if comm.size == 1 and dist.is_initialized():  # DDP does not say whose gradients these are; one's own need no hook
        same_ranks(comm, dist.distributed_c10d._get_default_group(), "ddp_hook")

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        nonlocal quick
        buffer = bucket.buffer()
        try:
            if not buffer.is_cuda:
                return _averaged_on_host(comm, buffer)
            quick = quick or quick_calls(comm)
            found = None if quick is None else average(comm, quick, buffer)
            if found is None or type(found) is tuple:  # it is Python's to read, or to make
                return _averaged(comm, buffer, found)
            return found
        except BlinkError as error:
            parameters = len(bucket.parameters())
            error.add_note(f"in bucket {bucket.index()} of DDP: {parameters} parameters, {buffer.numel()} elements")
            raise

    # torch compares annotations with these types
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return profiled("all_reduce")(hook)


def _averaged(comm: Any, buffer: Any, read: Any) -> Any:
    """A future of a buffer on a GPU, which is averaged in place.

    Args:
        read: its arguments, True, and what C says of the call; None if C++ has not read it.
    """
    stream = stream_apart(buffer.device)
    if read is None:
        comm.Allreduce(None, buffer, "avg", stream=stream)
    else:
        dispatcher_of(comm).go_on(ALLREDUCE, read[0], stream, read[2])
    if quick := extension():
        return quick.future(buffer, buffer, stream)
    future = torch.futures.Future(devices=[buffer.device])
    with torch.cuda.stream(stream):
        future.set_result(buffer)
    return future


def _averaged_on_host(comm: Any, buffer: Any) -> Any:
    comm.Allreduce(None, typed(buffer), "avg")
    future = torch.futures.Future()
    future.set_result(buffer)
    return future
