"""A call of blocks on CPU ranks of one node (``blocks.h``): its table, bound to buffers and a deadline.

C compares sums of all lengths when all ranks have entered the call; lengths are not exchanged. If two ranks expect
different lengths, all ranks come back to Python and call ``differ``, which raises.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ...program.blocks import BlockMoves
from ...program.memory import address
from ..announcement import Called
from .block_memory import CHUNKS
from .c_structs import fields, names
from .host_call import HostBuffers, HostCall
from .host_program import CACHE_BYTES
from .native import RUNNING
from .traffic import names_of_blocks

if TYPE_CHECKING:
    from .host_program import HostProgram
    from .transport import HostTransport


class BlockCall(HostCall):
    """A bound call of blocks; its ``program`` is the one of all calls with the same lengths.

    Args:
        differ: called with the deadline, on every rank, where the lengths of two ranks differ; it raises.
    """

    def __init__(
        self,
        transport: HostTransport,
        program: HostProgram,
        moves: BlockMoves,
        buffers: HostBuffers,
        timeout_s: float,
        *,
        owns: bool,
        differ: Callable[[float], NoReturn],
    ) -> None:
        super().__init__(transport, program, Called(moves.text), buffers, timeout_s, owns=owns)
        assert transport.block_memory is not None
        assert transport.native is not None
        self._table = transport.block_memory.table(moves)
        self._differ = differ
        self.struct.blocks = self._table.ctypes.data
        transport.native.code.blink_sum_lengths(self._at)

    def aim(self, buffers: HostBuffers, timeout_s: float) -> None:
        """Take other buffers, in which the blocks have the same places, and another deadline."""
        self.timeout_s, self.struct.timeout_ns = timeout_s, int(self.transport.slice_of(timeout_s) * 1e9)
        struct, ends = self.struct, (buffers.send, buffers.recv)
        send, recv = (0 if array is None else address(array) for array in ends)
        if (send, recv) != (struct.send, struct.recv):
            struct.send, struct.recv, struct.readable = send, recv, 0

    def lengths_differ(self, seq: int) -> NoReturn:
        """Leave the call, in which no rank has received anything."""
        self.transport.pages.finished[self.transport.rank] = seq
        self._differ(self.timeout_s)

    def owed(self) -> dict[int, str]:
        """Ranks whose blocks have not come, or that have not read this rank's."""
        transport, rank = self.transport, self.transport.rank
        if self.struct.phase < RUNNING:
            return transport.peers.absent(int(self.struct.seq))
        words = names("call.h", "blocks_t")
        head = dict(zip(words, self._table.tolist(), strict=False))
        rows = self._table[len(words) :].reshape(-1, len(names("call.h", "block_t"))).tolist()
        found: dict[int, str] = {}
        for r, (_, sends, _, receives, sent, received) in enumerate(rows):
            if received < receives and r != rank:
                found[r] = f"its block of {receives} bytes, of which {received} have come"
            elif sent < sends and (r != rank or head["shared"]):
                behind = [r] if r != rank else self._behind(sent // head["chunk"])
                found |= {p: f"its reading of a block of {sends} bytes" for p in behind if p not in found}
        return found

    def _behind(self, chunk: int) -> list[int]:
        """The ranks whose reading keeps this one from sending a chunk of what all get."""
        pages, want = self.transport.pages, int(self.struct.base) + chunk + 1 - CHUNKS
        readers = (r for r in range(pages.n) if r != pages.rank)
        return [r for r in readers if int(pages.words[pages.tail(r, pages.rank)]) < want]


class KindStruct(ctypes.Structure):
    """``kind_t`` of block_kinds.h."""

    _fields_ = fields("block_kinds.h", "kind_t")


NO_BLOCK, ONE_BLOCK, EACH_A_BLOCK = range(3)  # as in block_kinds.h


def blocks_of(moves: BlockMoves, rank: int) -> tuple[int, int]:
    """What a rank's send buffer and its receive buffer have in calls of a collective."""
    of_root = EACH_A_BLOCK if rank == moves.root else NO_BLOCK
    found = {
        "alltoall": (EACH_A_BLOCK, EACH_A_BLOCK), "allgather": (ONE_BLOCK, EACH_A_BLOCK),
        "gather": (ONE_BLOCK, of_root), "scatter": (of_root, ONE_BLOCK),
    }  # fmt: skip
    return found[moves.collective]


class BlockKind(BlockCall):
    """Calls of blocks that differ in lengths and places alone: C fills this one in each time (``block_kinds.h``).

    Args:
        item: bytes of an element.
        differ: as :class:`BlockCall`'s, and of what was ``made``.
    """

    def __init__(
        self, transport: HostTransport, program: HostProgram, moves: BlockMoves, buffers: HostBuffers,
        timeout_s: float, *, item: int, differ: Callable[[Any, float], NoReturn],
    ) -> None:  # fmt: skip
        super().__init__(
            transport, program, moves, buffers, timeout_s, owns=False, differ=lambda late: differ(self.made, late)
        )
        assert transport.block_memory is not None
        n, counters = transport.n, transport.recorder.counters
        names = names_of_blocks(moves, transport.rank)
        self._tally = np.array([(counters.address(name), 0, 0) for name in names], np.int64)
        self.struct.tally, self.struct.tallies = self._tally.ctypes.data, len(names)
        rings = len(transport.block_memory.takes(moves)) > 1
        has = blocks_of(moves, transport.rank)
        self.kind = KindStruct(item, moves.root, CACHE_BYTES // (2 * n), rings, *has, self._tally.ctypes.data)

    @property
    def address(self) -> int:
        """Where its structure lies, for C."""
        return ctypes.addressof(self.kind)
