"""The fast path: calls on GPUs as DDP and FSDP make them, of contiguous tensors.

Their arguments are read in C++. Between two such calls the model's own work has taken the processor's caches, so that
there Python takes many times as long as in a loop of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import BlinkError
from ..runtime.cuda.torch_extension import extension
from .compiler import hide
from .operands import Tensor
from .streams import capturing, communication_stream, current_stream
from .work import Work, work_on

if TYPE_CHECKING:
    from .collectives import TensorCollectives

MILLI = 1e3


def allreduce(group: TensorCollectives, tensors: Any, opts: Any) -> Work | None:
    """The Work of such a call; here and below None for another call, and where there is no torch_extension.cpp (yet).

    Raises:
        BlinkError: as the call by any other way.
    """
    quick = _extension(group)
    return quick and _put(group, quick, group.comm.Allreduce, quick.read_allreduce(tensors, opts), tensors, tensors)


def broadcast(group: TensorCollectives, tensors: Any, opts: Any) -> Work | None:
    """As :func:`allreduce`."""
    quick = _extension(group)
    return quick and _put(group, quick, group.comm.Bcast, quick.read_broadcast(tensors, opts), tensors, tensors)


def allgather(group: TensorCollectives, output: Any, tensor: Any, opts: Any) -> Work | None:
    """As :func:`allreduce`."""
    if not (quick := _extension(group)):
        return None
    found = quick.read_allgather(output, tensor, group.rank_here, opts)
    return _put(group, quick, group.comm.Allgather, found, [output], [output, tensor])


def reduce_scatter(group: TensorCollectives, output: Any, tensor: Any, opts: Any) -> Work | None:
    """As :func:`allreduce`."""
    if not (quick := _extension(group)):
        return None
    comm = group.comm
    found = quick.read_reduce_scatter(output, tensor, group.rank_here, comm.size, opts)
    return _put(group, quick, comm.Reduce_scatter_block, found, [output], [output, tensor])


def _extension(group: TensorCollectives) -> Any:
    """The module, unless calls are made together with others."""
    hide()
    return extension() if group._coalescing is None else None


def _put(
    group: TensorCollectives, quick: Any, method: Any, found: Any, outputs: Sequence[Tensor], memory: Sequence[Tensor]
) -> Work | None:
    """Put a call on a stream, if C++ has found its arguments."""
    if found is None or 0 < found[2] != group.timeout_s * MILLI:
        return None
    args, apart, _ = found
    device = outputs[0].device
    if apart := apart and not capturing():
        stream = communication_stream(device)
        quick.follow(stream)
    else:
        stream = current_stream(device)
    try:
        method(*args, stream=stream)
    except BlinkError as error:
        group.explain(error)
        raise
    return work_on(stream, outputs, memory if apart else (), apart=apart)
