"""The collectives of FSDP2 for models whose process group stays another one (torch 2.9 and newer).

``model.set_custom_all_gather(blinkmpi.torch.AllGather(comm))`` and ``model.set_custom_reduce_scatter(...)``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError
from .collectives import NO_SECONDS, TensorCollectives
from .group import communicator, same_ranks
from .mem_pool import in_pool, mem_pool
from .operands import Tensor
from .work import Work


class CallOptions(NamedTuple):
    """What torch would say of a call, by its names."""

    asyncOp: bool  # noqa: N815
    reduceOp: Any = None  # noqa: N815
    timeout: timedelta = NO_SECONDS


class _OnCommunicator(TensorCollectives):
    """Calls on tensors by a Communicator that no process group owns.

    Args:
        comm: a Communicator of the ranks that share the model's parameters, in their order, or a group of backend
            ``blink``; by default the default group.

    Raises:
        ArgumentError: if there is no such group; of a call, if the model's group has other ranks.
    """

    def __init__(self, comm: Any = None) -> None:
        self.comm = communicator(comm, type(self).__name__)
        self.rank_here, self.timeout_s = self.comm.rank, -1.0
        self._said = False  # that there is no pool

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Tensor:
        """Memory for a call: of the communicator's memory pool, if one was made, which is so on all ranks or on none.

        Raises:
            torch.OutOfMemoryError: if the pool has no room: memory of another kind on one rank alone would not do.
        """
        if torch.device(device).type != "cuda":
            return torch.empty(*size, dtype=dtype, device=device)
        try:
            pool = self.comm.memory_pool()
        except ArgumentError as error:
            if self.comm.rank == 0 and not self._said:
                warnings.warn(f"FSDP's buffers are not registered: {error}", stacklevel=2)
            self._said = True
            return torch.empty(*size, dtype=dtype, device=device)
        with in_pool(pool, mem_pool(pool)):
            return torch.empty(*size, dtype=dtype, device=device)


def _work(made: Work, asynchronous: bool) -> Work | None:
    if asynchronous:
        return made
    made.wait()
    return None


class AllGather(_OnCommunicator):
    """For ``set_custom_all_gather``."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Work | None:
        """Collect everybody's tensor in one; ``group`` is torch's, which carries nothing."""
        same_ranks(self.comm, group, "AllGather")
        return _work(self.all_gather_single(output_tensor, input_tensor, CallOptions(async_op)), async_op)


class ReduceScatter(_OnCommunicator):
    """For ``set_custom_reduce_scatter``."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Work | None:
        """Reduce a tensor of one block for each rank; each gets its own."""
        same_ranks(self.comm, group, "ReduceScatter")
        return _work(self.reduce_scatter_single(output_tensor, input_tensor, CallOptions(async_op, op)), async_op)
