"""``shrink`` among processes that share a key-value store, and the memory of one node.

Who has come stands in their shared memory. Those that are left then meet in the store as any new communicator's
processes do, under a name that follows from the old one's and from who they are: so ranks that see different ones do
not meet, and look again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ...errors import PeerLost
from ...transport.network.bounded import Rendezvous
from ..bootstrap import Options
from ..children import part_of_options
from ..context import Context
from ..dispatch import Dispatcher
from ..ranks.store import StoreRanks
from .leaving_gpus import check_gpus, leaving
from .meeting import check_not_left_behind, enter, meet

if TYPE_CHECKING:
    from ..cuda.context import CudaContext


def shrunk_by_store(
    dispatcher: Dispatcher, ranks: StoreRanks, without: frozenset[int], timeout_s: float | None
) -> tuple[tuple[int, ...], Dispatcher]:
    """Those that are left but ``without``, and what makes their calls.

    The old communicator is given back, unless it lives, and ranks are only to go.

    Raises:
        CannotShrink, CollectiveTimeout: then it may be called again. BlinkError: what kept a rank from opening it.
    """
    context = dispatcher.context
    if dispatcher.sequence.dead is not None:
        check_gpus(context.gpus)
    deadline = context.timeout_s if timeout_s is None else timeout_s
    check_not_left_behind(context.host.peers)
    lives = bool(without) and dispatcher.sequence.dead is None
    if not lives:
        enter(dispatcher.sequence, deadline)
    rest, made = _opened(context, ranks, without, deadline, None if lives else context.gpus)
    if lives:
        context.host.pages.shrinks(False)
    else:
        ranks.together.clear(first=rest[0])
        dispatcher.leave_behind()
    return rest, made


def _opened(
    context: Context, ranks: StoreRanks, without: frozenset[int], deadline_s: float, left: CudaContext | None
) -> tuple[tuple[int, ...], Dispatcher]:
    """Those that are left, and what makes their calls.

    Args:
        left: the GPUs whose memory they give up.
    """
    while True:  # each time at least one more is lost
        rest = meet(context.host.peers, without, deadline_s).rest
        begin: Callable[[Rendezvous], StoreRanks] = partial(ranks.left, rest, deadline_s)
        try:
            begin = begin if left is None else leaving(left, begin, deadline_s)
            return rest, Dispatcher(begin, _options(context, rest))
        except PeerLost:
            if not set(context.host.peers.lost()).intersection(rest):
                raise


def _options(context: Context, rest: tuple[int, ...]) -> Options:
    """The arguments for those that are left."""
    machine = context.main.machine.subset(rest) if context.emulated else None
    options = part_of_options(context.options, context.settings, machine, len(rest))
    return replace(options, timeout_s=context.timeout_s)
