"""The slots and rings of a call of blocks (``blocks.h``) in the shared window, and which lengths take which."""

import numpy as np
from numpy.typing import NDArray

from ...program.blocks import BlockMoves
from ..control_pages import HEADS, LINE
from .c_structs import names
from .shared_window import SharedWindow

# Blocks up to so many bytes go through a slot whole, if they fit there: of ranks with a core each, and of more ranks
# than cores. Longer ones go in chunks, but those from READ_FROM bytes on are read out of their senders' buffers
# (process_vm_readv); what all others read, from so many bytes on for each of them; and what one rank alone receives
# from several, from GATHERED bytes on. From trials on machines of 2 and 16 cores. Between 2 ranks, each on a core of
# its own, slots took 0.5 to 0.85 of the time of reading for blocks of 4 to 12 KiB, as long at 16 KiB, and 1.5 times
# as long at 64 KiB. Among 4, of which two share a core and what lies in its cache, slots and chunks took 0.4 to 0.7
# of the time up to 1 MiB; where each had a core, 1.4 times and more, but 0.8 in a gather, of which the root's own
# reading is the longest part.
SHORT_BYTES = (16 << 10, 96 << 10)
READ_FROM, READ_FROM_OF_ALL, GATHERED = (0, 1 << 20), (20 << 10, 4 << 20), 1 << 20
HELPED_BYTES = 8 << 20  # the root of a gather reads with a second thread where it has so long a block: 0.8 of the time
# bytes of a chunk, and of one that all read; chunks in a ring
CHUNK_BYTES, CHUNK_OF_ALL, CHUNKS = 64 << 10, 256 << 10, 4
LEAST_CHUNK = 256  # bytes: flags can count the chunks of 4 GiB
NEVER = (1 << 63) - 1


class BlockMemory:
    """Where blocks lie between the ranks: slots behind the arenas, rings of chunks in them.

    Args:
        reads: whether the ranks may read one another's memory.
        crowded: whether they are more than the cores that they may use.
    """

    def __init__(self, window: SharedWindow, *, reads: bool, crowded: bool) -> None:
        pages = window.pages
        self._n, self._rank, self._reads, self._crowded = pages.n, pages.rank, reads, crowded
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
        short = SHORT_BYTES[self._crowded or not self._reads]
        return room, min(short, room), ring, min(chunk, ring // CHUNKS // LINE * LINE)

    def lengths(self, collective: str) -> tuple[int, int]:
        """Bytes of the longest block that goes through a slot whole, and of the shortest that is read; 0 for none."""
        shared = collective == "allgather"
        short = self._rooms(shared=shared)[1]
        read_from = READ_FROM_OF_ALL[self._crowded] * (self._n - 1) if shared else READ_FROM[self._crowded]
        if collective == "gather" and self._n > 2:
            read_from = GATHERED
        return short, max(read_from, short + 1) if self._reads else 0

    def takes(self, moves: BlockMoves) -> list[tuple[int, bool]]:
        """Bytes of slots that a rank's part of a call takes, and whether they are those of calls in one shot.

        Rings are taken where blocks are longer than a slot, as memory that should be read may be closed.
        """
        longest = max(nbytes for _, nbytes in (*moves.sends, *moves.receives))
        rings = [(self._arena_bytes, False)] if longest > self._rooms(shared=moves.shared)[1] else []
        return [(self._slot_bytes, True), *rings]

    def _read_from(self, moves: BlockMoves) -> int:
        """Bytes from which on blocks are read out of their senders' buffers."""
        return (0 if moves.in_place else self.lengths(moves.collective)[1]) or NEVER

    def protocol(self, moves: BlockMoves, nbytes: int) -> str:
        """How a block of such a call crosses, if its sender's memory can be read: ``slots`` or ``cma``."""
        return "cma" if nbytes >= self._read_from(moves) else "slots"

    def gains_by_help(self, moves: BlockMoves) -> bool:
        """Whether this rank reads long blocks while all others only wait to be read."""
        longest = max(nbytes for _, nbytes in moves.receives)
        reads = longest >= HELPED_BYTES and self.protocol(moves, longest) == "cma"
        return reads and moves.collective == "gather" and moves.root == self._rank

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
        words += [0] * (len(names("call.h", "blocks_t")) - len(words))
        for r, ((start, sent), (stop, received)) in enumerate(zip(moves.sends, moves.receives, strict=True)):
            own = r == self._rank
            goes = not own or (moves.shared and self._n > 1)
            words += start, sent if goes else 0, stop, 0 if own and moves.stays else received, 0, 0
        return np.array(words, np.int64)
