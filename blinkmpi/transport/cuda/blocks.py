"""Calls of blocks between the GPUs of a node: who sends whom a block, and the arguments of the kernel.

Each rank knows the lengths of what it sends and receives, and no others, so the ranks' hosts do not meet. The kernels
(``kernels/blocks.cu``) compare the lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .kernel_layout import BLOCK_END, BLOCKS, common_words
from .memory_layout import block_lanes, lanes_of_block

if TYPE_CHECKING:
    from ...program.blocks import BlockMoves

Ends = tuple[tuple[int, bool], ...]  # of a rank: the rank at the other end, and whether this one sends
OWN = ("own_from", "own_to", "own_bytes")  # words before the ends: the block that the rank keeps


def ends_of(collective: str, root: int, rank: int, n: int) -> Ends:
    """The ends of the blocks that a rank sends and receives, in the order of their CTAs: to rank + i, from rank - i."""
    to, of = [(rank + i) % n for i in range(1, n)], [(rank - i) % n for i in range(1, n)]
    if collective in ("gather", "scatter"):
        to, of = (to, of) if rank == root else ([root], [root])
        to, of = (to, []) if (collective == "scatter") == (rank == root) else ([], of)
    return (*((peer, True) for peer in to), *((peer, False) for peer in of))


def usable_lanes(n: int, ctas: int) -> int:
    """Lanes of a block at most, where a kernel has so many CTAs at most; 0 if not all ends have one each."""
    return min(block_lanes(n), ctas // (2 * n - 1))


def block_words(moves: BlockMoves, rank: int, memory_at: int, lanes: int) -> tuple[list[int], int]:
    """The arguments of a call behind the common ones, and its CTAs.

    Args:
        memory_at: where blocks have their memory in every rank's symmetric memory.
        lanes: of a block, at most.
    """
    n = len(moves.sends)
    ends = ends_of(moves.collective, moves.root, rank, n)
    (own_from, own), (own_to, _) = moves.sends[rank], moves.receives[rank]
    words = [memory_at, lanes, len(ends), own_from, own_to, 0 if moves.stays else own]
    longest = 0 if moves.stays else own
    for peer, sends in ends:
        at, nbytes = (moves.sends if sends else moves.receives)[peer]
        words += peer, int(sends), at, nbytes
        longest = max(longest, nbytes)
    room = len(BLOCKS) + 2 * (n - 1) * len(BLOCK_END)
    return words + [0] * (room - len(words)), (len(ends) + 1) * lanes_of_block(longest, lanes)


def ends_at(n: int) -> int:
    """The word of a kernel's arguments where its ends begin; before it are those of :data:`OWN`."""
    return common_words(n) + len(BLOCKS)
