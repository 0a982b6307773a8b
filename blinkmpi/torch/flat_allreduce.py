"""An AllReduce of one flat tensor on a GPU, as DDP asks for it for each bucket of gradients, by the shortest way.

Between two buckets the model's own work has taken the processor's caches, so that there Python takes many times as long
as in a loop of calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..errors import BlinkError
from ..runtime.cuda.torch_extension import extension
from .compiler import hide
from .streams import capturing, stream_apart
from .work import Work, work_on

if TYPE_CHECKING:
    from .collectives import TensorCollectives

MILLI, OPTIONS = 1e3, dist.AllreduceOptions


def put_flat(group: TensorCollectives, tensors: Any, opts: Any) -> Work | None:
    """The Work of such a call; None for another one, and where there is no torch_extension.cpp (yet).

    Raises:
        BlinkError: as the call by any other way.
    """
    hide()
    quick = extension()
    if quick is None or group._coalescing is not None or type(tensors) is not list or type(opts) is not OPTIONS:
        return None
    found = quick.read_allreduce(tensors, opts)
    if found is None or 0 < found[2] != group.timeout_s * MILLI or capturing():
        return None
    tensor, op, _ = found
    stream = stream_apart(tensor.device)
    try:
        group.comm.Allreduce(None, tensor, op, stream=stream)
    except BlinkError as error:
        group.explain(error)
        raise
    return work_on(stream, tensors, tensors)
