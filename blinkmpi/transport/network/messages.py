"""Between nodes: messages that carry chunks, the calls of ranks, and last words (Blink section 3.5).

Chunks are sent and received at the ends of channels: see ``ends``.

The first rank of each node tells the first ranks of the others what its ranks have called, and writes what it hears
into the control pages of the ranks that are elsewhere: so all ranks meet in a call, and compare it, as those of one
node do. Whoever gives up, or leaves for good, tells every rank that is elsewhere.

Nothing here waits: :meth:`Net.turn` does what can be done and returns.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ..host.shared_window import RECORD, SharedWindow
from .endpoints import Ends

CALLS, WORDS_TAG, FIRST_CHUNK = 1, 2, 3  # tags; those of chunks begin at FIRST_CHANNEL
CALLS_BYTES = 64 << 10
HEAR_EVERY = 16  # turns: last words are rare
LEFT = b"left"  # said by who leaves for good; all other words are last ones


class _Calls(msgspec.Struct, array_like=True):
    """What the ranks of a node call: each different text once, and which one each rank has. The call's number leads."""

    texts: list[tuple[int, bytes]]  # fingerprint and text
    of: list[int]


class _Node:
    """Another node, as its first rank tells of it: a receive that is begun again and again."""

    def __init__(self, comm: MPI.Intracomm, first: int, ranks: list[int]) -> None:
        self.ranks, self.status = ranks, MPI.Status()
        self.buffer = np.empty(CALLS_BYTES, np.uint8)
        self.request = comm.Recv_init(self.buffer, first, CALLS)
        self.request.Start()
        self.last = [b"", b""]  # what was told of the calls before, by turns: mostly the same


class Net:
    """This rank's messages to and from other nodes; opened and closed by all ranks together.

    Args:
        comm: all ranks; a copy of it carries the messages.
    """

    def __init__(self, comm: MPI.Intracomm, window: SharedWindow) -> None:
        self.comm = comm.Dup()
        self.window = window
        firsts: list[int] = self.comm.allgather(window.here[0])
        self.away = [r for r in range(window.n) if r not in window.here]
        self._nodes = {first: [r for r in self.away if firsts[r] == first] for first in sorted(set(firsts))}
        del self._nodes[window.here[0]]
        pids: list[int] = self.comm.allgather(os.getpid())
        if window.rank == window.here[0]:
            window.pids[self.away] = [pids[r] for r in self.away]
        self._told = 0  # the last call that the other nodes have heard of from here
        self._sent: list[tuple[MPI.Request, Any]] = []
        self._calls: list[_Node] = []
        self._body: tuple[list[int], bytes] = ([], b"")  # what was told last, and of which fingerprints
        if window.rank == window.here[0]:
            self._calls = [_Node(self.comm, first, ranks) for first, ranks in self._nodes.items()]
        self._status = MPI.Status()
        self._words = self._listen(MPI.ANY_SOURCE, WORDS_TAG, RECORD)
        self._cried = False
        self._turns = 0
        self._known: set[tuple[int, bool, int]] = set()  # to or from whom chunks of what size went

    def _listen(self, source: int, tag: int, room: int) -> tuple[MPI.Request, NDArray[np.uint8]]:
        buffer = np.empty(room, np.uint8)
        return self.comm.Irecv(buffer, source, tag), buffer

    # ---- meeting

    def turn(self, seq: int) -> bool:
        """Hear what was said, and pass on which call the ranks of this node are in; returns whether anything moved."""
        self._turns += 1
        if self._turns % HEAR_EVERY == 0:
            self.hear()
        return bool(self._calls) and self._tell(seq) | bool(sum(self._told_by(node) for node in self._calls))

    def met(self, seq: int) -> bool:
        """Whether the other nodes know that all ranks of this one are in call ``seq``; the first rank tells them."""
        return not self._calls or self._told >= seq

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its node, who tells and is told."""
        return bool(self._calls)

    def _tell(self, seq: int) -> bool:
        window = self.window
        if self._told >= seq or any(int(window.seqs[r]) < seq for r in window.here):
            return False
        prints = [int(window.words[window.record(r, seq) // 8]) for r in window.here]
        if prints != self._body[0]:
            texts: dict[int, bytes] = {}
            for r, mark in zip(window.here, prints, strict=True):
                texts.setdefault(mark, window.read(window.record(r, seq)))
            order, room = list(texts), CALLS_BYTES // 2 // len(texts)
            told = _Calls([(mark, text[:room]) for mark, text in texts.items()], [order.index(p) for p in prints])
            self._body = prints, msgspec.msgpack.encode(told)
        self._send(seq.to_bytes(8, "little") + self._body[1], self._nodes, CALLS)
        self._told = seq
        return True

    def _told_by(self, node: _Node) -> bool:
        """Write down what another node's ranks call."""
        if not node.request.Test(node.status):
            return False
        message = node.buffer[: node.status.Get_count(MPI.BYTE)].tobytes()
        node.request.Start()
        window, seq, body = self.window, int.from_bytes(message[:8], "little"), message[8:]
        if body != node.last[seq % 2]:
            node.last[seq % 2] = body
            told = msgspec.msgpack.decode(body, type=_Calls)
            for r, which in zip(node.ranks, told.of, strict=True):
                mark, text = told.texts[which]
                at = window.record(r, seq)
                window.words[at // 8] = mark
                window.write(at, text)
        if window.fence:
            window.fence()
        for r in node.ranks:
            window.done[r] = seq  # it uses no slot of this node
            window.seqs[r] = seq
        return True

    # ---- chunks

    def move(self, ends: Ends) -> bool:
        """Send and receive what can be in the call that ``ends`` are in; returns whether anything moved."""
        return ends.move(self.comm, self.window.fence)

    def acquaint(self, ends: Ends) -> list[MPI.Request]:
        """Begin to send a chunk of each size that a rank has not yet had from this one, and to receive likewise.

        An MPI that takes GPU memory maps a peer's, and allocates its own, when the first such message goes. The driver
        may let that wait until no kernel runs, so it must not happen during a call. What is received means nothing.
        """
        new = {(x.peer, x.sends, x.chunk): x.slots[0] for x in ends.all}
        requests = []
        for peer, sends, chunk in sorted(set(new) - self._known):  # at both ends in the order of sizes
            start = self.comm.Isend if sends else self.comm.Irecv
            requests.append(start(new[peer, sends, chunk], peer, FIRST_CHUNK))
        self._known |= set(new)
        return requests

    # ---- last words

    def cry(self, words: bytes) -> None:
        """Tell every rank elsewhere why this one gave up. Safe to call twice."""
        if not self._cried:
            self._cried = True
            self._say(words[: RECORD - 16])

    def leave(self) -> None:
        """Tell every rank elsewhere that this one takes part in no call any more."""
        self._say(LEFT)

    def hear(self) -> None:
        """Write down the last words of ranks elsewhere, who has left, and whom MPI knows to have failed."""
        window, status = self.window, self._status
        while self._heard(status):
            said = self._words[1][: status.Get_count(MPI.BYTE)].tobytes()
            self._words = self._listen(MPI.ANY_SOURCE, WORDS_TAG, RECORD)
            if said == LEFT:
                window.lefts[status.source] = 1
            elif not int(window.abort[0]):
                window.write(window.last_words(status.source), said)
                if window.fence:
                    window.fence()
                window.abort[0] = 1 + status.source

    def _heard(self, status: MPI.Status) -> bool:
        """Whether somebody has said something. Where MPI outlives a process (ULFM), this is told of it here."""
        try:
            return self._words[0].Test(status)
        except MPI.Exception as error:
            if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING):
                raise
            self.comm.Ack_failed()  # or nobody is heard any more
            failed, everybody = self.comm.Get_failed(), self.comm.Get_group()
            numbers = MPI.Group.Translate_ranks(failed, list(range(failed.size)), everybody)
            self.window.gone.update(int(r) for r in numbers)
            failed.Free()
            everybody.Free()
            if not self._words[0]:
                self._words = self._listen(MPI.ANY_SOURCE, WORDS_TAG, RECORD)
            return False

    def _say(self, words: bytes) -> None:
        """Say it to every rank elsewhere that can be reached; the others will find out by their deadlines."""
        for r in self.away:
            if r not in self.window.gone:
                with contextlib.suppress(MPI.Exception):
                    self._send(words, [r], WORDS_TAG)

    def _send(self, words: bytes, to: Any, tag: int) -> None:
        self._sent = [(request, body) for request, body in self._sent if not request.Test()]
        self._sent += [(self.comm.Isend([words, MPI.BYTE], r, tag), words) for r in to]

    def close(self) -> None:
        """Free the messages' communicator, after a last call in which all ranks met; collective."""
        MPI.Request.Waitall([request for request, _ in self._sent])
        for request in [*(node.request for node in self._calls), self._words[0]]:
            request.Cancel()
            request.Wait()
        for node in self._calls:
            node.request.Free()
        self.comm.Free()
