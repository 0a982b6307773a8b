"""Measure how slots are best written on this machine, when a transport opens.

Where two ranks' cores share a cache, a slot is read from it. Where they do not
(other sockets, other core complexes, many virtual machines), fetching a line
that another core has just written is slow, and a slot written past the caches
is read faster from memory. So both are tried, for a few milliseconds. Virtual
cores may be moved apart later; then slots in the caches cost up to ten times
as much, while past them they cost a little more than need be. So the caches
are chosen only where they are clearly faster.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from ..program import Call, Channel, Lane, Program

if TYPE_CHECKING:
    from .host import HostTransport

BYTES = 512 << 10
ROUNDS = 8
CLEARLY = 1.5


def push_slots(transport: HostTransport, comm: MPI.Intracomm, timeout_s: float) -> tuple[bool, str]:
    """Whether to write slots past the caches, and the measurement that says so; the same on every rank.

    Every rank sends to its neighbour through a slot, all at once: the rates of a job whose ranks all work.
    """
    n = comm.size
    if n == 1 or transport.runner != "c":
        return False, ""
    send, recv = np.ones(BYTES, np.uint8), np.zeros(BYTES, np.uint8)
    loaded = transport.load(ring(n))
    seconds = {}
    for past in (0, 1):
        loaded.job.push = past
        times = np.empty(ROUNDS)
        for i in range(ROUNDS):
            seq = 1 + 2 * (past * ROUNDS + i)
            transport.enter(seq, "start", timeout_s)
            start = time.perf_counter()
            transport.call(loaded, seq + 1, "calibration", send, recv, timeout_s)
            times[i] = time.perf_counter() - start
        comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
        seconds[past] = float(times.min())  # what else runs here disturbs single rounds
    push = seconds[1] < seconds[0] * CLEARLY
    rates = [f"{BYTES / 1e9 / seconds[p]:.1f} GB/s" for p in (0, 1)]
    if push:
        return True, f"slots are written past the caches ({rates[1]}; through them {rates[0]})"
    return False, f"slots are written through the caches ({rates[0]}; past them {rates[1]})"


def ring(n: int) -> Program:
    """Everybody's buffer to the next rank, through one slot of its size."""
    send = [Lane(r, r, "down", BYTES, 0, (), (-1,), None, (r,), False) for r in range(n)]
    recv = [Lane((r + 1) % n, r, "down", BYTES, None, (r,), (0,), 0, (), False) for r in range(n)]
    channels = tuple(Channel(r, r, ((r + 1) % n,)) for r in range(n))
    return Program(Call("allgather", n, (BYTES,), "uint8"), "ring", BYTES, 1, channels, (*send, *recv))
