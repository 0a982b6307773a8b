"""Calls that are interrupted: when C makes them again by itself, and before they begin."""

import os
import signal
import time
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import PeerLost
from blinkmpi.runtime.sequence import CallSequence
from tests.harness import NEVER_S, PATIENCE_S, mpi
from tests.mpi.faults import when_it_enters
from tests.mpi.test_conformance import OURS

COUNT = 3000


@pytest.mark.parametrize("what", ["barrier", "call", "group"])
@mpi(ranks=(2, 3), timeout=60)
def test_an_interrupt_is_heard_by_the_others(comm: MPI.Intracomm, what: str) -> None:
    """Also in the first slice of its deadline, in which nobody looks after the peers."""
    ours = blinkmpi.Communicator(comm, algo=OURS, timeout=NEVER_S)
    x, y, block, out = np.ones(COUNT), np.empty(COUNT), np.ones(7), np.empty(7)
    call = {
        "barrier": ours.Barrier,
        "call": lambda: ours.Allreduce(x, y),
        "group": lambda: ours.Allreduce([x, block], [y, out]),
    }[what]
    for _ in range(3):
        call()
    comm.Barrier()
    if comm.rank == 0:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        when_it_enters(ours, lambda: os.kill(os.getpid(), signal.SIGALRM))
        with pytest.raises(KeyboardInterrupt):
            call()
        signal.signal(signal.SIGALRM, before)
    comm.Barrier()
    since = time.monotonic()
    with pytest.raises(PeerLost, match="KeyboardInterrupt"):
        call()
    assert time.monotonic() - since < PATIENCE_S
    comm.Barrier()
    ours.Free()


@mpi(ranks=(2,), timeout=60)
def test_an_interrupt_before_a_call_leaves_the_ranks_at_the_same_one(comm: MPI.Intracomm) -> None:
    ours = blinkmpi.Communicator(comm, algo=OURS, timeout=10)
    x, y = np.full(COUNT, comm.rank + 1.0), np.empty(COUNT)
    ours.Barrier()
    if comm.rank == 0:
        with mock.patch.object(CallSequence, "run", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            ours.Allreduce(x, y)
    ours.Allreduce(x, y)
    assert (y == 3).all()
    ours.Free()
