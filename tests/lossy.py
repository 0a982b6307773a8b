"""The calls of a job that loses ranks and goes on by ``shrink``, for Communicators of either kind."""

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from blinkmpi.errors import PeerLost

CALLS, COUNT = 40, 20_000


def on_host(_comm: Any) -> Any:
    """The vector of a communicator's calls."""
    return np.empty(COUNT)


def make_calls(
    comm: Any, dies_at: int | None, vector_for: Callable[[Any], Any] = on_host, stream: Any = None
) -> tuple[Any, dict[str, Any]]:
    """Make all calls, in one communicator after another, or die at a step.

    Args:
        vector_for: makes the vector of a communicator's calls.
        stream: on which calls are only enqueued.

    Returns:
        The last communicator; and its and the others' ``sizes``, how many calls were ``wrong``, and which ranks each
        error said were ``lost``.
    """
    step, wrong, sizes, lost = 0, 0, [comm.size], []
    vector = vector_for(comm)
    on = {} if stream is None else {"stream": stream}
    while step < CALLS:
        if dies_at == step:
            os.kill(os.getpid(), signal.SIGKILL)
        vector[:] = comm.rank + step
        try:
            comm.Allreduce(MPI.IN_PLACE, vector, **on)
            if stream is not None:
                stream.synchronize()
                comm.check()
        except PeerLost as error:
            wrong += "comm.shrink()" not in str(error)
            lost.append(list(error.ranks))
            comm = comm.shrink()
            sizes.append(comm.size)
            vector = vector_for(comm)
            steps = np.array([step])
            comm.Allreduce(MPI.IN_PLACE, steps, MPI.MIN)
            step = int(steps[0])
            continue
        wrong += not (vector == comm.size * (comm.size - 1) / 2 + comm.size * step).all()
        step += 1
    return comm, {"sizes": sizes, "wrong": wrong, "lost": lost}
