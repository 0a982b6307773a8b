"""Network channels: slots and flags of channels to other nodes, sent as messages by the host (Blink section 3.5).

The kernel fills a slot and raises the head flag; the host sends the slot and raises the tail flag. For incoming chunks
the roles are exchanged. Flags are in pinned host memory. So are the slots, which the kernel reaches over PCIe, unless
MPI takes GPU memory: then they are on the GPU. Each CTA of a stage has slots and flags of its own, so a channel has one
end per CTA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...program.partition import NodePart
from ...program.reduction import accumulator_of, dtype_of
from ..network.endpoints import Endpoint, Endpoints, tag_of
from .device import Gpu
from .memory_layout import LINE, MAX_CTAS, NETWORK_BYTES, NETWORK_FLAG_BYTES, ChannelPlace

WORDS = LINE // 8


@dataclass(frozen=True)
class NetworkBuffers:
    """A rank's memory for network channels: addresses of flags and of slots.

    Args:
        on_gpu: whether the slots are in GPU memory; else they are in host memory, behind the flags.
    """

    flags: int
    slots: int
    on_gpu: bool

    @classmethod
    def of(cls, gpu: Gpu, *, on_gpu: bool) -> NetworkBuffers:
        """Allocate them, all zeros."""
        flags = gpu.pinned(NETWORK_FLAG_BYTES + (0 if on_gpu else NETWORK_BYTES))
        return cls(flags, gpu.allocate(NETWORK_BYTES) if on_gpu else flags + NETWORK_FLAG_BYTES, on_gpu)

    def close(self, gpu: Gpu) -> None:
        """Free them."""
        gpu.free_pinned(self.flags)
        if self.on_gpu:
            gpu.free(self.slots)


def endpoints_of(
    part: NodePart, rank: int, groups_of: Mapping[int, int], places: Sequence[ChannelPlace], buffers: NetworkBuffers
) -> Endpoints:
    """The endpoints of network channels at a rank, by its number in the part."""
    found = []
    flags = _bytes_at(buffers.flags, NETWORK_FLAG_BYTES).view(np.uint64)
    memory, program = _bytes_at(buffers.slots, NETWORK_BYTES), part.program
    for stage in program.of(rank):
        many = groups_of[stage.tree]
        for c in (*stage.ins, *stage.outs):
            if c not in part.far:
                continue
            kind = (accumulator_of if program.channels[c].wide else dtype_of)(program.call.dtype)
            chunk, at, far = program.chunk_of(stage) * kind.itemsize, places[c], part.far[c]
            for cta in range(many):
                first = at.slots + cta * program.depth * at.slot_bytes
                slots = [memory[s : s + chunk] for s in (first + k * at.slot_bytes for k in range(program.depth))]
                head, tail = (at.heads // 8 + cta * WORDS, at.tails // 8 + cta * WORDS)
                tag = tag_of(far.channel * MAX_CTAS + cta)
                total = stage.count * kind.itemsize
                found.append(
                    Endpoint(c in stage.outs, far.rank, tag, flags, head, tail, slots, chunk, total, cta, many)
                )
    return Endpoints(found)


def _bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Memory to hand to MPI. GPU memory is only an address to this process, which never reads it."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
