"""A thread that looks after kernels that nobody waits for: calls on streams, and replays of graphs.

It says when one has given up, and makes those give up whose peers never come: because a process has ended, or the peer
makes another call, or none, because its arguments are wrong. The next call raises the error, and so do ``check`` and
``Free``. A program that ends without having met it ends with status 1: its results may be wrong.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from typing import TYPE_CHECKING

from ...errors import PeerLost
from ...util.settings import log
from ...util.text import error_text
from ..process_exit import end_with_failure

if TYPE_CHECKING:
    from .calls import CudaCalls

LOOK_S = 1.0
WATCHED: weakref.WeakSet[CudaCalls] = weakref.WeakSet()
LOGGED: list[CudaCalls] = []  # calls whose error was logged; each knows whether it was raised, too
LOOKING = threading.Lock()  # while the thread reads what a communicator that is closed gives back
_begun = threading.Event()


def watch(calls: CudaCalls) -> None:
    """Look at a communicator's GPU now and then, until it is closed or dead. One thread for all of a process."""
    WATCHED.add(calls)
    if not _begun.is_set():
        _begun.set()
        atexit.register(at_exit)
        threading.Thread(target=_loop, name="blinkmpi-watch", daemon=True).start()


def forget(calls: CudaCalls) -> None:
    """Look at a communicator no longer: it is about to be closed."""
    with LOOKING:
        WATCHED.discard(calls)


def _loop() -> None:
    suspects: set[int] = set()  # an error counts at the second look: the call itself may be about to raise it
    while True:
        time.sleep(LOOK_S)
        with LOOKING:
            suspects = look(suspects)


def look(suspects: set[int]) -> set[int]:
    """Look at all once. Returns those where something is wrong; what was so at the last look, too, is acted upon."""
    found: set[int] = set()
    for calls in list(WATCHED):
        transport, one = calls.context.transport, id(calls)
        if _is_over(calls):
            WATCHED.discard(calls)
        elif transport.aborted or _alone(calls):
            found.add(one)
            if one not in suspects:
                continue
            if not transport.aborted:
                transport.abort()  # a kernel that waits reports that; without one there is nothing to say
                continue
            _tell(calls, calls.host.peers.ended())
    return found


def at_exit() -> None:
    """Say what has gone wrong since the last look, and end with status 1 if the program has not heard of some error."""
    with LOOKING:
        for calls in list(WATCHED):
            if not _is_over(calls) and calls.context.transport.aborted:
                _tell(calls, ended=[])  # others may have come to their end, too
    if any(calls.sequence.dead is None for calls in LOGGED):
        end_with_failure("a call on GPU memory failed, and nobody asked for it")


def _is_over(calls: CudaCalls) -> bool:
    """Whether a communicator is closed, or dead: then the program has met the error."""
    return calls.sequence.context.gpus is None or calls.sequence.dead is not None


def _alone(calls: CudaCalls) -> bool:
    """Whether a peer's part of the last call, or of a message, will never come."""
    peers, last = calls.host.peers, calls.last
    if last is None:
        return calls.context.transport.has_messages and bool(peers.ended())
    return bool(peers.ended()) or peers.mismatch_so_far(last.seq, last.text) is not None


def _tell(calls: CudaCalls, ended: list[int]) -> None:
    """Log what a kernel has reported; if other ranks have ended, that is why."""
    WATCHED.discard(calls)
    LOGGED.append(calls)
    with calls.context.gpu.entered():
        error = calls.history.error()
    last = calls.last
    if ended and (last is not None or calls.context.transport.has_messages):
        error = PeerLost(calls.host.peers.states(ended, last.seq if last is not None else 0), ended)
    then = "results since then are wrong; the next call, comm.check() or Free() raises it"
    context = calls.sequence.context
    log(context.settings, "WARN", f"rank {context.rank}: {error_text(error)}; {then}")
