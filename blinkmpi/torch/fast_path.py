"""The fast path: calls on GPUs as DDP and FSDP make them, of tensors that are taken as they lie in memory.

Their arguments are read in C++. Between two such calls the model's own work has taken the processor's caches, so that
there Python takes many times as long as in a loop of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.distributed_c10d as c10d

from ..errors import BlinkError
from ..runtime.cuda.torch_extension import extension
from .compiler import hide
from .operands import Tensor
from .streams import capturing, current_stream, stream_apart
from .work import Work, work_here, work_on

if TYPE_CHECKING:
    from .collectives import TensorCollectives

MILLI = 1e3
TENSORS = torch.Tensor, torch.nn.Parameter  # and no types of tensors that only stand for others


def allreduce(group: TensorCollectives, tensors: Any, opts: Any) -> Work | None:
    """The Work of such a call; here and below None for another call, and where there is no torch_extension.cpp (yet).

    Raises:
        BlinkError: as the call by any other way.
    """
    if type(tensors) is not list or not _is_quick(group, opts, c10d.AllreduceOptions, *tensors):
        return None
    return _put(group, group.comm.Allreduce, extension().read_allreduce(tensors, opts), tensors, ())


def broadcast(group: TensorCollectives, tensors: Any, opts: Any) -> Work | None:
    """As :func:`allreduce`."""
    if type(tensors) is not list or not _is_quick(group, opts, c10d.BroadcastOptions, *tensors):
        return None
    return _put(group, group.comm.Bcast, extension().read_broadcast(tensors, opts), tensors, ())


def allgather(group: TensorCollectives, output: Any, tensor: Any, opts: Any) -> Work | None:
    """As :func:`allreduce`."""
    if not _is_quick(group, opts, c10d.AllgatherOptions, output, tensor):
        return None
    found = extension().read_allgather(output, tensor, group.rank_here, opts)
    return _put(group, group.comm.Allgather, found, [output], [tensor])


def reduce_scatter(group: TensorCollectives, output: Any, tensor: Any, opts: Any) -> Work | None:
    """As :func:`allreduce`."""
    if not _is_quick(group, opts, c10d.ReduceScatterOptions, output, tensor):
        return None
    comm = group.comm
    found = extension().read_reduce_scatter(output, tensor, group.rank_here, comm.size, opts)
    return _put(group, comm.Reduce_scatter_block, found, [output], [tensor])


def _is_quick(group: TensorCollectives, opts: Any, options: type, *tensors: Any) -> bool:
    """Whether C++ can read a call."""
    hide()
    return (
        extension() is not None
        and group._coalescing is None
        and type(opts) is options
        and all(type(tensor) in TENSORS for tensor in tensors)
    )


def _put(
    group: TensorCollectives, method: Any, found: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Work | None:
    """Put a call on a stream, if C++ has found its arguments."""
    if found is None or 0 < found[2] != group.timeout_s * MILLI:
        return None
    args, apart, _ = found
    device = outputs[0].device
    apart = apart and not capturing()
    stream = stream_apart(device) if apart else current_stream(device)
    try:
        method(*args, stream=stream)
    except BlinkError as error:
        group.explain(error)
        raise
    return work_on(stream, outputs, [*outputs, *inputs]) if apart else work_here(stream, outputs)
