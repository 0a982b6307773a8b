"""What ranks with GPUs do before they make the communicator of those that are left: unmap one another's memory.

Kernels of a rank may still store into memory of a process that has died. The driver keeps that memory as long as it is
mapped, so such a store does no harm; a GPU on which it did has no work left that succeeds, and its rank says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ...errors import CannotShrink, CollectiveTimeout
from ...transport.network.bounded import Rendezvous
from ...util.together import together
from ..in_thread import InThread
from ..ranks.interface import Ranks

if TYPE_CHECKING:
    from ..cuda.context import CudaContext

R = TypeVar("R", bound=Ranks)


def check_gpus(gpus: CudaContext | None) -> None:
    """Raise CannotShrink for GPUs that no rank can leave when a process is lost."""
    if gpus is not None and gpus.here:
        raise CannotShrink(
            "shrink(): these ranks have GPUs on several nodes, and going on without a process that is lost was tried "
            "on one node alone: start the job again. Ranks that all live go on by shrink(exclude=)"
        )


def leaving(gpus: CudaContext, meet: Callable[[Rendezvous], R], timeout_s: float) -> Callable[[Rendezvous], R]:
    """As ``meet``, which brings the ranks together that are left: they give up their GPUs' memory, all or none.

    It raises CannotShrink, on all of them, if the work on one of their GPUs has failed, or does not end in time.
    """

    def met(rendezvous: Rendezvous) -> R:
        ranks = meet(rendezvous)
        try:
            together(ranks.together, partial(_give_up, gpus, timeout_s), during="shrink()", error=CannotShrink)
        except BaseException as error:
            ranks.give_up(error)
            raise
        return ranks

    return met


def _give_up(gpus: CudaContext, timeout_s: float) -> None:
    work, until = InThread(gpus.give_up, "blinkmpi-gpu"), time.monotonic() + timeout_s
    while not work.ended():
        if time.monotonic() > until:
            raise CollectiveTimeout(
                f"the work on GPU {gpus.gpu.device} has not ended in {timeout_s:.1f} s; end what the program has put "
                "on its streams, or raise timeout="
            )
    work.result()
