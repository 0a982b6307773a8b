"""Channels of GPUs that lead to other nodes (Blink section 3.5).

The kernel fills a slot and raises the head, the host sends it and raises the tail; the other way round for what comes.
Flags lie in pinned host memory. So do the slots, which the kernel reaches over PCIe, unless MPI takes GPU memory: then
they lie on the GPU. Each CTA of a stage has slots and flags of its own, so a channel has one end for each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...program.partition import NodePart
from ...program.reduction import accumulator_of, dtype_of
from ..network.endpoints import FIRST_CHANNEL, Endpoint, Endpoints
from .device import Gpu
from .memory_layout import LINE, MAX_CTAS, NET_BYTES, NET_FLAG_BYTES, Place

WORDS = LINE // 8


@dataclass(frozen=True)
class Port:
    """A rank's memory for channels to other nodes: addresses of flags and of slots.

    Args:
        on_gpu: whether the slots lie there, for MPI to take; else on the host, behind the flags.
    """

    flags: int
    slots: int
    on_gpu: bool

    @classmethod
    def of(cls, gpu: Gpu, *, on_gpu: bool) -> Port:
        """Make one, all zeros."""
        flags = gpu.pinned(NET_FLAG_BYTES + (0 if on_gpu else NET_BYTES))
        return cls(flags, gpu.allocate(NET_BYTES) if on_gpu else flags + NET_FLAG_BYTES, on_gpu)

    def close(self, gpu: Gpu) -> None:
        """Give it back."""
        gpu.free_pinned(self.flags)
        if self.on_gpu:
            gpu.free(self.slots)


def endpoints_of(
    part: NodePart, rank: int, groups_of: Mapping[int, int], places: Sequence[Place], port: Port
) -> Endpoints:
    """The endpoints that a rank has, as the part names it."""
    found = []
    flags = _bytes_at(port.flags, NET_FLAG_BYTES).view(np.uint64)
    memory, program = _bytes_at(port.slots, NET_BYTES), part.program
    for stage in program.of(rank):
        many = groups_of[stage.tree]
        for c in (*stage.ins, *stage.outs):
            if c not in part.far:
                continue
            kind = (accumulator_of if program.channels[c].partial else dtype_of)(program.call.dtype)
            chunk, at, far = program.chunk_of(stage) * kind.itemsize, places[c], part.far[c]
            for cta in range(many):
                first = at.slots + cta * program.depth * at.slot_bytes
                slots = [memory[s : s + chunk] for s in (first + k * at.slot_bytes for k in range(program.depth))]
                head, tail = (at.heads // 8 + cta * WORDS, at.tails // 8 + cta * WORDS)
                tag = FIRST_CHANNEL + far.channel * MAX_CTAS + cta
                total = stage.count * kind.itemsize
                found.append(
                    Endpoint(c in stage.outs, far.rank, tag, flags, head, tail, slots, chunk, total, cta, many)
                )
    return Endpoints(found)


def _bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Memory as MPI is given it. What lies on the GPU is an address to this process, and never looked at."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
