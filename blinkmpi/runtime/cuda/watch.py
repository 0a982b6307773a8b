"""A thread that looks after kernels that nobody waits for: calls on streams, and replays of graphs.

It says when one has given up, and makes those give up whose peers never come: because a process has ended, or the peer
makes another call, or none, because its arguments are wrong.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

from ...errors import PeerLost
from ...util.settings import log
from ...util.text import error_text

if TYPE_CHECKING:
    from ..dispatch import Dispatcher
    from .context import CudaContext

LOOK_S = 1.0
WATCHED: weakref.WeakSet[Dispatcher] = weakref.WeakSet()
LOOKING = threading.Lock()  # while the thread reads what a communicator that is closed gives back
_begun = threading.Event()


def watch(dispatcher: Dispatcher) -> None:
    """Look at a communicator's GPU now and then, until it is closed or dead. One thread for all of a process."""
    WATCHED.add(dispatcher)
    if not _begun.is_set():
        _begun.set()
        threading.Thread(target=_loop, name="blinkmpi-watch", daemon=True).start()


def forget(dispatcher: Dispatcher) -> None:
    """Look at a communicator no longer: it is about to be closed."""
    with LOOKING:
        WATCHED.discard(dispatcher)


def _loop() -> None:
    suspects: set[int] = set()  # at the first look the call itself may be about to raise what is wrong
    while True:
        time.sleep(LOOK_S)
        with LOOKING:
            suspects = look(suspects)


def look(suspects: set[int]) -> set[int]:
    """Look at all once. Returns those where something is wrong; what was so at the last look, too, is acted upon."""
    found: set[int] = set()
    for dispatcher in list(WATCHED):
        gpus, one = dispatcher.context.gpus, id(dispatcher)
        if gpus is None or dispatcher.dead is not None:
            WATCHED.discard(dispatcher)
        elif gpus.transport.aborted or _alone(dispatcher):
            found.add(one)
            if one not in suspects:
                continue
            if not gpus.transport.aborted:
                gpus.transport.abort()  # a kernel that waits reports that; without one there is nothing to say
                continue
            WATCHED.discard(dispatcher)
            _tell(dispatcher, gpus)
    return found


def _alone(dispatcher: Dispatcher) -> bool:
    """Whether a peer's part of the last call will never come."""
    cuda, peers = dispatcher.cuda, dispatcher.host.peers
    last = cuda.last if cuda is not None else None
    if last is None:
        return False
    return bool(peers.ended()) or peers.mismatch_so_far(last.seq, last.text) is not None


def _tell(dispatcher: Dispatcher, gpus: CudaContext) -> None:
    with gpus.gpu.entered():
        error = gpus.failed("a call on a stream or in a graph")
    cuda, peers = dispatcher.cuda, dispatcher.host.peers
    if cuda is not None and cuda.last is not None and (gone := peers.ended()):
        error = PeerLost(peers.states(gone, cuda.last.seq))
    context, then = dispatcher.context, "results since then are wrong, and the next call, or comm.check(), raises it"
    log(context.settings, "WARN", f"rank {context.rank}: {error_text(error)}; {then}")
