"""Measure how slots are best written on this machine: when a transport opens, and while it is used.

Where two ranks' cores share a cache, a slot is read from it. Where they do not
(other sockets, other core complexes, many virtual machines), fetching a line
that another core has just written is slow, and a slot written past the caches
is read faster from memory. So both are tried when a transport opens, and go on
being tried now and then by every program that runs: what is best changes with
the size and, seen on a virtual machine, within minutes (its cores may have been
moved; that was not established). Each rank chooses for the slots that it
writes; results do not depend on it.
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
AGAIN = 64  # every so many calls a program tries the other way
TRIALS = (0, 0, 1, 1)  # its first calls: the way that calibration chose, the other


class SlotStyle:
    """The choice for one program: what its calls took lately, each way."""

    def __init__(self, push: bool = False) -> None:
        self.first = int(push)
        self.count = 0
        self.last = self.first
        self.spent_ns: list[float] = [0.0, 0.0]

    def next(self) -> int:
        """1 to write past the caches in the next call, 0 to write through them."""
        if self.count < len(TRIALS):
            self.last = self.first ^ TRIALS[self.count]
        else:
            best = int(self.spent_ns[1] < self.spent_ns[0])
            self.last = best ^ (self.count % AGAIN == 0)
        self.count += 1
        return self.last

    def learn(self, spent_ns: int) -> None:
        """What the call took. A trial counts in full, as things may have changed since the last."""
        trial = self.count <= len(TRIALS) or self.count % AGAIN == 1
        share = 1.0 if trial else 0.25
        self.spent_ns[self.last] += share * (spent_ns - self.spent_ns[self.last])


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
    push = seconds[1] < seconds[0]
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
