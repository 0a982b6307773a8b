"""Messages of calls in one shot between nodes, for the C executor: each has the announcement and the data of a node.

The first rank of a node sends each other node the slots of its node's ranks, behind a line with the number and the
fingerprint of the call (``program/partition.py`` lays them out), and marks that node's ranks as entered when theirs has
come. It does so inside the C executor (``node_messages.h``), which calls MPI through the addresses of four of its
functions and keeps MPI's handles as mpi4py has them, so it needs no header of any MPI. Here these structures are made.
If a node announces something else, or only what Python reads, :mod:`..network.messages` tell all nodes what.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ..network.messages import SHOT_TAG, NodeMessages
from .c_structs import names
from .native import PIECE_BYTES
from .shared_window import SharedWindow

NODE = names("call.h", "node_t")
HEADER_BYTES = 64  # a line
LAST_SECONDS = 1.0  # wait at the end for messages of refused calls, which nobody has received
Words = NDArray[np.int64]
Look = Callable[[int], int]  # (address of nodes_t): whether none of its messages is under way


class NodeShots:
    """The messages of this node's calls in one shot; freed by :meth:`close`, before ``messages`` are.

    Args:
        found: the addresses of MPI's functions (``SHOTS``).
        messages_done: blink_messages_done of the C executor.
        stride: bytes from a message of an even call to the next one of an odd call.
    """

    def __init__(
        self,
        found: tuple[int, ...],
        messages: NodeMessages,
        window: SharedWindow,
        stride: int,
        messages_done: Look,
    ) -> None:
        from .mpi_functions import handle, handles_are_pointers

        self._messages_done = messages_done
        self._requests: list[MPI.Prequest] = []
        self._others = [node for node in window.nodes if node != window.pages.here[0]]
        self._source = window.pages.here[0]
        self.address = 0  # address of nodes_t; 0: another rank sends for this node
        if not messages.leads:
            return
        self._status = np.zeros(256, np.uint8)
        assert MPI._sizeof(MPI.Status) <= self._status.nbytes
        self._here = np.array(window.pages.here, np.int64)
        self._away = [np.array(messages.ranks_of(first), np.int64) for first in self._others]
        self._each = np.zeros((len(self._others), len(NODE)), np.int64)
        base, pages, told = window.bytes.ctypes.data, messages.comm, messages.told()
        for i, first in enumerate(self._others):
            at = window.received(first)
            starts = (at, at + stride)
            places = [window.bytes[start : start + min(PIECE_BYTES, window.longest_message)] for start in starts]
            receives = [pages.Recv_init(place, first, SHOT_TAG + k) for k, place in enumerate(places)]
            self._requests += receives
            request, number = told[first]
            self._each[i, : NODE.index("sending[0][0]")] = (
                first, len(self._away[i]), self._away[i].ctypes.data, base + at, base + at + stride,
                *map(MPI._addressof, receives), 0, 0, MPI._addressof(request), number,
            )  # fmt: skip
        out = base + window.sent()
        self._nodes = np.array(
            (*found, handles_are_pointers(), handle(messages.comm),
             handle(MPI.BYTE), SHOT_TAG, self._status.ctypes.data, out, out + stride, self._here.ctypes.data,
             len(self._here), MPI._addressof(messages.aborts), len(self._others), self._each.ctypes.data, 0), np.int64,
        )  # fmt: skip
        self.address = self._nodes.ctypes.data

    def sends(self, messages: Mapping[tuple[int, int], tuple[int, int]]) -> Words:
        """What this rank sends in a program's calls: (first byte, bytes) for each other node; headers if nothing."""
        if not self.address:
            return np.zeros(0, np.int64)
        found = [messages.get((self._source, node), (0, HEADER_BYTES)) for node in self._others]
        return np.array(found, np.int64).reshape(-1)

    def close(self) -> None:
        """Free MPI's requests, after a last call that all ranks entered."""
        end = time.monotonic() + LAST_SECONDS
        while self.address and not self._messages_done(self.address) and time.monotonic() < end:
            time.sleep(1e-4)
        for k, request in enumerate(self._requests):
            if self._each[k // 2][NODE.index(f"receiving[{k % 2}]")]:
                request.Cancel()
                request.Wait()
            request.Free()
        self._requests.clear()
