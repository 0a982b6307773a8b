"""PyTorch: a backend ``blink`` of ``torch.distributed``, and hooks for those who keep their own process group.

``dist.init_process_group("blink")`` needs no import of this package: torch (2.5 and newer) finds it by an entry point.
Importing it registers the backend and the rendezvous ``mpi://``, and touches neither MPI nor a GPU (docs/pytorch.md).

``start``        makes groups: under mpirun by MPI, under torchrun by torch's store
``nodes``        torchrun on several nodes: MPI's world of its ranks; ``variables`` are torchrun's
``group``        what torch sees of a group; ``describe`` says in words what it is
``names``        programs that name another backend (``blinkmpi run --backend-for gloo,nccl``)
``mixed``        a group that leaves some devices to other backends; ``messages`` is gloo, for point-to-point
``collectives``  torch's collectives, each as a call of the Communicator (``operation``); ``operands`` reads tensors
``fast_path``    the calls of DDP and FSDP on GPUs, which ``torch_extension`` reads in C++
``work``         what torch waits for; ``streams`` puts calls on GPUs on their stream
``device_messages``  from GPU to GPU; ``own_messages`` are a rank's to itself
``profiling``    rows in torch's profiler; ``compiler`` hides from torch.compile what torch calls here
``hook``         DDP and ``fsdp`` FSDP2, for those who keep another process group
``ft``           torchft, which makes groups anew as replicas come and go
``mem_pool``     tensors in memory that all ranks have mapped
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from ..errors import no_mpi_has_a_remedy
from ..util.lazy import lazily
from ..util.singleton import connecting_to_nobody

if TYPE_CHECKING:
    from .describe import explain
    from .fsdp import AllGather, ReduceScatter
    from .group import BlinkGroup
    from .hook import ddp_hook
    from .mem_pool import memory, memory_pool
    from .variables import setenv
else:
    __getattr__, __dir__ = lazily(__name__, {  # and with them MPI
        "describe": ("explain",),
        "fsdp": ("AllGather", "ReduceScatter"),
        "group": ("BlinkGroup",),
        "hook": ("ddp_hook",),
        "mem_pool": ("memory", "memory_pool"),
        "variables": ("setenv",),
    })  # fmt: skip

__all__ = [
    "AllGather",
    "BlinkGroup",
    "ReduceScatter",
    "ddp_hook",
    "explain",
    "memory",
    "memory_pool",
    "register",
    "setenv",
]


def found_by_torch() -> None:
    """What torch calls when it is imported, by the entry point: nothing may go wrong here that would end that."""
    try:
        register()
    except Exception as error:
        warnings.warn(f"blinkmpi could not register its backend with torch: {error!r}", stacklevel=2)


def register() -> None:
    """Make the backend ``blink`` and the rendezvous ``mpi://`` known to torch. Safe to call twice."""
    import torch.distributed as dist  # not above: it may be torch's own import that calls, in the middle of ours

    if not dist.is_available() or hasattr(dist.Backend, "BLINK"):
        return
    dist.Backend.register_backend("blink", _create, extended_api=True, devices=["cpu", "cuda"])
    dist.register_rendezvous_handler("mpi", _rendezvous)


def _create(options: Any, backend_options: Any = None) -> Any:
    with no_mpi_has_a_remedy(), connecting_to_nobody():
        from .nodes import open_world

        open_world(options)
        from .start import create  # and with it MPI

    return create(options, backend_options)


def _rendezvous(url: str, **settings: Any) -> Any:
    with no_mpi_has_a_remedy():
        from .start import rendezvous

    return rendezvous(url, **settings)


found_by_torch()
