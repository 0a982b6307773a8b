"""Where blocks lie between the ranks of a node in a call of blocks (``blocks.h``), and how long they may be there."""

import numpy as np
from numpy.typing import NDArray

from ...program.blocks import BlockMoves
from ..control_pages import HEADS, LINE
from .native import BLOCKS
from .shared_window import SharedWindow

# Blocks up to here go through a slot whole, if they fit there: between two ranks of one machine, calls of blocks of
# 8 to 96 KiB took 0.3 to 0.5 of the time that it takes to read them out of the senders' buffers (process_vm_readv).
SHORT_BYTES = 96 << 10
# Longer ones go in chunks: of 128 KiB to 1 MiB they took 0.5 to 0.8 of that time, on 2 cores, among 2 and 4 ranks. Of
# 2 MiB and more they are read from there. What all read gains longer by lying in a cache, to 8 MiB for 2 ranks.
READ_FROM_BYTES, READ_FROM_OF_ALL = 1 << 20, 4 << 20  # with one reader; by all others, for each of them
CHUNK_BYTES, CHUNK_OF_ALL, CHUNKS = 64 << 10, 256 << 10, 4  # of a chunk, of one that all read; how many have room
LEAST_CHUNK = 256  # so that a call has no more chunks of 4 GiB than its flags can count
NEVER = (1 << 63) - 1


class BlockMemory:
    """Where blocks lie between the ranks: slots behind the arenas, rings of chunks in them.

    Args:
        reads: whether the ranks may read one another's memory.
    """

    def __init__(self, window: SharedWindow, *, reads: bool) -> None:
        pages = window.pages
        self._n, self._rank, self._reads = pages.n, pages.rank, reads
        self._arena_bytes, self._slot_bytes = window.arena_bytes, window.one_shot_bytes // 2
        ranks = range(self._n)
        slots, arenas = [window.one_shot(r) for r in pages.here], [window.arena(r) for r in pages.here]
        apart = slots[1] - slots[0] if len(slots) > 1 else 0
        even = slots == [slots[0] + r * apart for r in ranks] and arenas == [arenas[0] + r * apart for r in ranks]
        room, _, _, chunk = self._rooms(shared=False)
        self.fits = even and self._n <= HEADS and room >= LINE and chunk >= LEAST_CHUNK
        base = pages.address
        self._places = base + slots[0], base + arenas[0], apart, self._slot_bytes
        self._flags = base + 8 * pages.head(0, 0), base + 8 * pages.tail(0, 0)

    def _rooms(self, *, shared: bool) -> tuple[int, int, int, int]:
        """Bytes of a slot, of the longest block that goes through one whole, of a ring, and of its chunks."""
        parts, chunk = (1, CHUNK_OF_ALL) if shared else (self._n, CHUNK_BYTES)
        room, ring = (whole // parts // LINE * LINE for whole in (self._slot_bytes, self._arena_bytes))
        return room, min(SHORT_BYTES, room), ring, min(chunk, ring // CHUNKS // LINE * LINE)

    def lengths(self, *, shared: bool) -> tuple[int, int]:
        """Bytes of the longest block that goes through a slot whole, and of the shortest that is read; 0 for none."""
        read_from = READ_FROM_OF_ALL * max(self._n - 1, 1) if shared else READ_FROM_BYTES
        return self._rooms(shared=shared)[1], read_from if self._reads else 0

    def _read_from(self, moves: BlockMoves) -> int:
        """Bytes from which on blocks are read out of their senders' buffers."""
        return (0 if moves.in_place else self.lengths(shared=moves.shared)[1]) or NEVER

    def protocol(self, moves: BlockMoves, nbytes: int) -> str:
        """How a block of such a call crosses, if its sender's memory can be read: ``slots`` or ``cma``."""
        return "cma" if nbytes >= self._read_from(moves) else "slots"

    def table(self, moves: BlockMoves) -> NDArray[np.int64]:
        """``blocks_t`` of call.h, but for the sum of lengths."""
        room, longest, ring, chunk = self._rooms(shared=moves.shared)
        words = [
            moves.shared,
            moves.in_place,
            self._read_from(moves),
            *self._places,
            room,
            longest,
            ring,
            chunk,
            CHUNKS,
        ]
        words += self._flags
        words += [0] * (len(BLOCKS) - len(words))
        for r, ((start, sent), (stop, received)) in enumerate(zip(moves.sends, moves.receives, strict=True)):
            own = r == self._rank
            goes = not own or (moves.shared and self._n > 1)
            words += start, sent if goes else 0, stop, 0 if own and moves.stays else received, 0, 0
        return np.array(words, np.int64)
