"""Messages of MPI between nodes: chunks, the announcements of ranks, and aborts (Blink section 3.5).

Chunks are sent and received at the endpoints of channels: see :mod:`.endpoints`.

The first rank of each node sends what its ranks have announced to the first ranks of the other nodes, and writes what
it receives into the control pages of the ranks that are elsewhere. So all ranks enter a call, and compare it, as the
ranks of one node do. A rank that aborts, or leaves for good, tells every rank on other nodes.

Nothing here waits: :meth:`NodeMessages.progress` does what can be done and returns.
"""

import contextlib
import os
import time
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI

from ...util.together import allgather
from ..control_pages import BODY, LATE_LOOKS, RECORD, SOON_NS, ControlPages
from .bounded import Bounded
from .endpoints import Endpoints

CALLS_TAG, ABORT_TAG, FIRST_CHUNK_TAG, SHOT_TAG = 1, 2, 3, 4  # to 7; chunks: from FIRST_CHANNEL
CALLS_BYTES = 64 << 10
HEAD = 16  # bytes of it before what was announced
POLL_ABORTS_EVERY = 16  # calls of progress(): aborts are rare
LEFT = b"left"  # sent by a rank that leaves for good; all other bodies are errors


class _Announced(msgspec.Struct, array_like=True):
    """What the ranks of a node announced: each different announcement once, and which one each rank made.

    In the message, the call's number and the length of this stand before it, because the C executor may have found that
    a message is there (``host/shots.py``); then MPI tells nobody else how long it is.
    """

    records: list[tuple[int, bytes]]  # fingerprint and body
    of: list[int]


class _Node:
    """Another node, as its first rank tells of it: a persistent receive."""

    def __init__(self, comm: MPI.Intracomm, first: int, ranks: list[int]) -> None:
        self.ranks = ranks
        self.buffer = np.zeros(CALLS_BYTES, np.uint8)  # C reads the number in front before any has come
        self.request = comm.Recv_init(self.buffer, first, CALLS_TAG)
        self.request.Start()
        self.last = b"", _Announced([], [])  # what was received last, and what it says


class NodeMessages:
    """This rank's messages to and from other nodes; opened and closed by all ranks together.

    Args:
        comm: all ranks; a copy of it carries the messages.
    """

    def __init__(self, comm: Bounded, pages: ControlPages) -> None:
        self.comm = comm.Dup()
        self._ranks = comm
        self.pages = pages
        firsts = allgather(comm, pages.here[0], int)
        self.away = [r for r in range(pages.n) if r not in pages.here]
        self._nodes = {first: [r for r in self.away if firsts[r] == first] for first in sorted(set(firsts))}
        del self._nodes[pages.here[0]]
        pids = allgather(comm, os.getpid(), int)
        self._sent_seq = 0  # the last call whose announcements the other nodes were sent
        self._sending: list[tuple[MPI.Request, Any]] = []
        self._others: list[_Node] = []
        self._encoded: tuple[list[int], bytes] = ([], b"")  # what was sent last, and its fingerprints
        if pages.rank == pages.here[0]:
            pages.pids[self.away] = [pids[r] for r in self.away]
            self._others = [_Node(self.comm, first, ranks) for first, ranks in self._nodes.items()]
        self._told = np.zeros(HEAD + RECORD, np.uint8)  # by a rank that aborts or leaves
        self.aborts = self.comm.Recv_init(self._told, MPI.ANY_SOURCE, ABORT_TAG)
        self.aborts.Start()
        self._aborted = False
        self._turns = self._heard_ns = 0
        self._warm: set[tuple[int, bool, int]] = set()  # to or from whom chunks of what size went

    # ---- announcements

    def progress(self, seq: int) -> bool:
        """Exchange what the ranks announced of call ``seq``, as far as possible; returns whether anything moved."""
        self._turns += 1
        if self._turns % POLL_ABORTS_EVERY == 0:
            self.poll_aborts()
        return bool(self._others) and self._send_announced(seq) | bool(sum(map(self._receive_announced, self._others)))

    def sent(self, seq: int) -> bool:
        """Whether the other nodes were sent the announcements of call ``seq``; the first rank of a node sends them."""
        return not self._others or self._sent_seq >= seq

    def ranks_of(self, first: int) -> list[int]:
        """The ranks of another node, by its first one."""
        return self._nodes[first]

    def told(self) -> dict[int, tuple[MPI.Prequest, int]]:
        """Where each node's announcements come: the request, and the address of the number of the call in them."""
        found = zip(self._nodes, self._others, strict=True)
        return {first: (node.request, node.buffer.ctypes.data) for first, node in found}

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its node."""
        return bool(self._others)

    def _send_announced(self, seq: int) -> bool:
        pages = self.pages
        if self._sent_seq >= seq or any(int(pages.announced[r]) < seq for r in pages.here):
            return False
        fingerprints = [int(pages.words[pages.record(r, seq) // 8]) for r in pages.here]
        if fingerprints != self._encoded[0]:
            bodies: dict[int, bytes] = {}
            for r, fingerprint in zip(pages.here, fingerprints, strict=True):
                bodies.setdefault(fingerprint, pages.read(pages.record(r, seq)))
            order, room = list(bodies), CALLS_BYTES // 2 // len(bodies)  # where it is short, errors say less
            records = [(fingerprint, body[:room]) for fingerprint, body in bodies.items()]
            announced = _Announced(records, [order.index(f) for f in fingerprints])
            self._encoded = fingerprints, msgspec.msgpack.encode(announced)
        head = seq.to_bytes(8, "little") + len(self._encoded[1]).to_bytes(8, "little")
        self._send(head + self._encoded[1], self._nodes, CALLS_TAG)
        self._sent_seq = seq
        return True

    def _receive_announced(self, node: _Node) -> bool:
        """Write what another node's ranks announced into their pages."""
        if not node.request.Test():
            return False
        seq, length = node.buffer[:HEAD].view(np.uint64).tolist()
        body = node.buffer[HEAD : HEAD + length].tobytes()
        node.request.Start()
        pages, now = self.pages, time.monotonic_ns()
        for _ in range(LATE_LOOKS if now - self._heard_ns > SOON_NS else 0):
            self.poll_aborts()
        self._heard_ns = now
        if int(pages.abort[0]):  # they gave up before this rank came, so nobody here enters the call
            return True
        if int(pages.announced[node.ranks[0]]) >= seq:  # a call that was refused when C had heard of them
            return True
        if body != node.last[0]:  # mostly it is the same again
            node.last = body, msgspec.msgpack.decode(body, type=_Announced)
        announced = node.last[1]
        for r, which in zip(node.ranks, announced.of, strict=True):
            fingerprint, record = announced.records[which]
            if int(pages.words[pages.record(r, seq) // 8]) != fingerprint:  # C writes records of calls in one shot
                pages.write(pages.record(r, seq), record, fingerprint)
        if pages.fence:
            pages.fence()
        for r in node.ranks:
            pages.finished[r] = seq  # it uses no slot of this node
            pages.announced[r] = seq
        return True

    # ---- chunks

    def move(self, endpoints: Endpoints) -> bool:
        """Send and receive the chunks that can be now; returns whether anything moved."""
        return endpoints.progress(self.comm, self.pages.fence)

    def warm_up(self, endpoints: Endpoints) -> list[MPI.Request]:
        """Begin to send a chunk of each size that a rank has not yet had from this one, and to receive likewise.

        An MPI that takes GPU memory maps a peer's, and allocates its own, when the first such message goes. The driver
        may let that wait until no kernel runs, so it must not happen during a call. What is received means nothing.
        """
        new = {(x.peer, x.sends, x.chunk): x.slots[0] for x in endpoints.all}
        requests = []
        for peer, sends, chunk in sorted(set(new) - self._warm):  # at both ends in the order of sizes
            start = self.comm.Isend if sends else self.comm.Irecv
            requests.append(start(new[peer, sends, chunk], peer, FIRST_CHUNK_TAG))
        self._warm |= set(new)
        return requests

    # ---- aborts

    def broadcast_abort(self, body: bytes) -> None:
        """Send the error with which this rank aborted to every rank elsewhere. Safe to call twice."""
        if not self._aborted:
            self._aborted = True
            self._send_to_all(body[:BODY])

    def broadcast_leave(self) -> None:
        """Tell every rank elsewhere that this one takes part in no call any more."""
        self._send_to_all(LEFT)

    def poll_aborts(self) -> None:
        """Write down the errors of ranks elsewhere that aborted, who has left, and whom MPI knows to have failed."""
        pages = self.pages
        while self._received_abort():
            source, length = self._told[:HEAD].view(np.uint64).tolist()
            body = self._told[HEAD : HEAD + length].tobytes()
            self._told[:HEAD] = 0
            self.aborts.Start()
            if body == LEFT:
                pages.lefts[source] = 1
            elif body and not int(pages.abort[0]):
                pages.write(pages.error_record(source), body)
                if pages.fence:
                    pages.fence()
                pages.abort[0] = 1 + source

    def _received_abort(self) -> bool:
        """Whether a message has come. Where MPI outlives a process (ULFM), it reports the failure here.

        A receive that a failure has ended, and not a message, leaves a head of zeros.
        """
        try:
            return self.aborts.Test()
        except MPI.Exception as error:
            if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING):
                raise
            self.comm.Ack_failed()  # or no message is received any more
            failed, everybody = self.comm.Get_failed(), self.comm.Get_group()
            numbers = MPI.Group.Translate_ranks(failed, list(range(failed.size)), everybody)
            self.pages.gone.update(int(r) for r in numbers)
            failed.Free()
            everybody.Free()
            return False

    def _send_to_all(self, body: bytes) -> None:
        """Send to every rank elsewhere that can be reached; the others will find out by their deadlines."""
        for r in self.away:
            if r not in self.pages.gone:
                with contextlib.suppress(MPI.Exception):
                    head = self._ranks.rank.to_bytes(8, "little") + len(body).to_bytes(8, "little")
                    self._send(head + body, [r], ABORT_TAG)

    def _send(self, body: bytes, to: Any, tag: int) -> None:
        self._sending = [(request, sent) for request, sent in self._sending if not request.Test()]
        self._sending += [(self.comm.Isend([body, MPI.BYTE], r, tag), body) for r in to]

    def close(self) -> None:
        """Free the messages' communicator, after a last call that all ranks entered; collective."""
        for request, sent in self._sending:
            self._ranks.wait(request, sent, peers=[])
        for request in [*(node.request for node in self._others), self.aborts]:
            request.Cancel()
            request.Wait()
            request.Free()
        self.comm.Free()
