"""``BlockMoves``: what one rank moves in a call whose blocks have lengths and places of their own. Pure.

Where a program is the same on every rank, this is one rank's: it knows the blocks that it sends and receives, and not
those between others.
"""

from __future__ import annotations

import msgspec

from ..trees.tree import Collective

Place = tuple[int, int]  # where a block begins, and its bytes


class BlockMoves(msgspec.Struct, frozen=True):
    """The blocks of one rank: where they lie in its send and receive buffers, by the rank at the other end.

    ``text`` is the call as ranks compare it. A ``shared`` block is the one that a rank sends all others. In its own
    place, each list has the block that the rank keeps, which lies there already if it ``stays``.
    """

    text: str
    collective: Collective
    root: int
    sends: tuple[Place, ...]
    receives: tuple[Place, ...]
    shared: bool = False
    in_place: bool = False
    stays: bool = False

    @property
    def lengths(self) -> tuple[object, ...]:
        """What calls have in common that differ in the places of their blocks."""
        bytes_of = [tuple(nbytes for _, nbytes in places) for places in (self.sends, self.receives)]
        return (self.text, *bytes_of, self.stays)

    @property
    def nbytes(self) -> int:
        """Of the larger one of this rank's buffers."""
        sent = max(self.sends)[1] if self.shared else sum(nbytes for _, nbytes in self.sends)
        return max(sent, sum(nbytes for _, nbytes in self.receives))
