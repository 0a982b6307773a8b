"""Channels of GPUs that lead to other nodes: slots and flags in pinned host memory (Blink section 3.5, staged).

The kernel fills a slot over PCIe and raises the head, the host sends it and raises the tail; the other way round for
what comes. Each CTA of a lane has slots and flags of its own, so a channel has one end for each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ...numerics import accumulator_of, dtype_of
from ..net import FIRST_CHANNEL, Crossing
from ..parts import Part
from .arena import LINE, MAX_CTAS, NET_BYTES, Place

WORDS = LINE // 8


def crossings_of(
    part: Part, rank: int, groups_of: Mapping[int, int], places: Sequence[Place], net: int
) -> Iterator[Crossing]:
    """The ends that a rank has.

    Args:
        rank: as the part names it.
        net: the address of the rank's host memory for them.
    """
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * NET_BYTES).from_address(net))
    flags, program = memory.view(np.uint64), part.program
    for lane in program.of(rank):
        many = groups_of[lane.tree]
        for c in (*lane.ins, *lane.outs):
            if c not in part.far:
                continue
            kind = (accumulator_of if program.channels[c].partial else dtype_of)(program.call.dtype)
            chunk, at, far = program.chunk_of(lane) * kind.itemsize, places[c], part.far[c]
            for cta in range(many):
                first = at.slots + cta * program.depth * at.slot_bytes
                slots = [memory[s : s + chunk] for s in (first + k * at.slot_bytes for k in range(program.depth))]
                head, tail = (at.heads // 8 + cta * WORDS, at.tails // 8 + cta * WORDS)
                tag = FIRST_CHANNEL + far.channel * MAX_CTAS + cta
                total = lane.count * kind.itemsize
                yield Crossing(c in lane.outs, far.rank, tag, flags, head, tail, slots, chunk, total, cta, many)
