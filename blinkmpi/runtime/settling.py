"""What the ranks settle before a call can be made: lengths that they tell one another, and its part of the plan.

Persistent calls settle it once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ..errors import ArgumentError
from ..planning.selection import parse_algo
from ..transport.announcement import NUMBERS, ON_GPU, Called, Numbers
from ..transport.interface import PeerDelegates, Refused
from .arguments import InBlocks, Lengths, Prepared, Unsettled
from .buffers import DelegatedToMPI
from .calls_without_program import EntryCall, RefusedCall
from .collectives import CollectiveMethod, Invocation, describe
from .cuda.buffers import lies_on_device
from .requests import Persistent, persistent_on_host

if TYPE_CHECKING:
    from .context import Context
    from .dispatch import Dispatcher

T = TypeVar("T")


class DelegatedByPeer(DelegatedToMPI):
    """Another rank's arguments are MPI's; all ranks have entered the call and know."""


def exchange(
    dispatcher: Dispatcher, numbers: Sequence[int], timeout_s: float, collective: str = ""
) -> tuple[tuple[int, ...], ...]:
    """Every rank's numbers (each brings as many); as many calls as a record has to be filled."""
    found: list[tuple[int, ...]] = [()] * dispatcher.context.n
    for at in range(0, len(numbers), NUMBERS):
        said = Numbers(tuple(numbers[at : at + NUMBERS]), collective)
        told = _numbered(dispatcher, partial(dispatcher.host.exchange, said=said, timeout_s=timeout_s))
        found = [(*before, *now) for before, now in zip(found, told, strict=True)]
    return tuple(found)


def settled(
    dispatcher: Dispatcher, ready: Prepared | Unsettled | InBlocks | Exception, collective: str, timeout_s: float
) -> Prepared | InBlocks | Exception:
    """A call whose lengths and plan are known, or that needs neither; or an error that the peers have to learn of.

    Raises:
        BlinkError: which all ranks know.
    """
    if isinstance(ready, InBlocks | Exception):
        return ready
    if ready.blocks and takes_blocks(dispatcher.context, ready.blocks.moves.collective):
        return ready.blocks
    if isinstance(ready, Unsettled):
        ready = _with_lengths(dispatcher, ready, collective, timeout_s)
    return _planned(dispatcher, ready, timeout_s) if isinstance(ready, Prepared) else ready


def settled_alone(
    dispatcher: Dispatcher, ready: Prepared | Unsettled | InBlocks | Exception
) -> Prepared | InBlocks | None:
    """The same, where no rank needs to hear of others; None where some may."""
    if isinstance(ready, InBlocks):
        return ready
    if isinstance(ready, Exception):
        return None
    if ready.blocks and takes_blocks(dispatcher.context, ready.blocks.moves.collective):
        return ready.blocks
    return ready if isinstance(ready, Prepared) and not _lacks_plan(dispatcher.context, ready) else None


def _lacks_plan(context: Context, ready: Prepared) -> bool:
    plans = context.cuda().planned if ready.on_device else context.planned
    call = ready.call
    return bool(call.total and not call.name and plans.lacks(call.collective, call.root))


def takes_blocks(context: Context, collective: str) -> bool:
    """Whether a call of blocks is made as such, and not by a plan: unless a plan, or a scheme for it, was asked for."""
    options, settings = context.options, context.settings
    if context.host.block_memory is None or context.host.window.full:
        return False
    if context.gpus is not None:  # then what is said of plans is about GPUs
        return True
    algo = settings.algo if options.algo is None else options.algo
    asked = _asked(algo, tuple(made.collective for made in options.algorithms))
    return collective not in asked and not (context.emulated or options.plan or settings.graph_file)


@lru_cache(maxsize=64)
def _asked(algo: str, made: tuple[str, ...]) -> frozenset[str]:
    """The collectives for which a scheme or an algorithm was asked for."""
    named = parse_algo(algo).items()
    return frozenset(made) | {of for of, schemes in named if any(not scheme.startswith("^") for scheme in schemes)}


def differ(dispatcher: Dispatcher, lengths: Lengths, text: str, collective: str, timeout_s: float) -> NoReturn:
    """Tell all lengths, and raise on the rank that expects others than it hears; the other ranks learn of it."""
    host, rows = dispatcher.host, exchange(dispatcher, lengths.numbers, timeout_s, collective)
    call: EntryCall = EntryCall(host, Called(text), timeout_s)
    try:
        lengths.compare(rows)
    except ArgumentError as error:
        call = RefusedCall(host, error, timeout_s)
    dispatcher.seq += 1
    call.run(dispatcher.seq)
    raise AssertionError(f"{text}: C found that lengths differ, and they are {rows}")


def _with_lengths(dispatcher: Dispatcher, ready: Unsettled, collective: str, timeout_s: float) -> Prepared | Exception:
    try:
        rows = exchange(dispatcher, ready.numbers, timeout_s, collective)
    except PeerDelegates:
        dispatcher.seq -= 1  # of the call that is made: the one that was entered
        return DelegatedByPeer("another rank's arguments are MPI's")
    try:
        return ready.settle(rows)
    except Exception as error:
        return error


def _planned(dispatcher: Dispatcher, ready: Prepared, timeout_s: float) -> Prepared | Exception:
    """A call that the plan has trees for: rank 0 makes them now, if it is the first of its collective and root."""
    context, call = dispatcher.context, ready.call
    if not _lacks_plan(context, ready):
        return ready
    plans = context.cuda().planned if ready.on_device else context.planned
    what = f"{describe(call)}{ON_GPU if ready.on_device else ''}, to be planned first"
    try:
        _numbered(dispatcher, EntryCall(context.host, Called(what), timeout_s).run)
    except PeerDelegates:
        dispatcher.seq -= 1
        return DelegatedByPeer("another rank's arguments are MPI's")
    began = time.monotonic()
    try:
        with context.rendezvous.doing(f"planning of {describe(call)}", timeout_s):
            plans.add(call.collective, call.root)
    except Exception:  # which all ranks know
        raise
    except BaseException as interrupt:
        dispatcher.die(interrupt)
        raise
    seconds = time.monotonic() - began
    context.say(lambda: f"planned for {describe(call)} and the like in {seconds:.3f} s", "INFO")
    return ready


def _numbered(dispatcher: Dispatcher, call: Callable[[int], T]) -> T:
    """Make a call that has the next number; what it raises kills the communicator, unless all ranks know it."""
    dispatcher.check_alive()
    dispatcher.seq += 1
    try:
        return call(dispatcher.seq)
    except Refused as refused:
        raise refused.error from None
    except PeerDelegates:
        raise
    except BaseException as fatal:
        dispatcher.die(fatal)
        raise


def persist(dispatcher: Dispatcher, method: CollectiveMethod, args: tuple[Any, ...], stream: Any) -> Persistent | None:
    """See :meth:`.dispatch.Dispatcher.persist`."""
    ready: Prepared | Unsettled | InBlocks | Exception = dispatcher.prepare(Invocation(method, args), None, stream)
    ours = not dispatcher.context.has_mpi
    if isinstance(ready, Exception) and not isinstance(ready, DelegatedToMPI):
        if ours or any(map(lies_on_device, args)):
            raise ready
        return None
    if dispatcher.cuda is None or not isinstance(ready, Prepared) or not ready.on_device:
        return persistent_on_host(partial(dispatcher.begin, method, args, None, None)) if ours else None
    dispatcher.drain()
    ready = settled(dispatcher, ready, method.name, dispatcher.context.timeout_s)
    if not isinstance(ready, Prepared):
        raise ready if isinstance(ready, Exception) else AssertionError("calls of blocks are on host memory")
    bound = dispatcher.cuda.bind(ready, stream, dispatcher.context.timeout_s)
    return Persistent(lambda: dispatcher.launch(bound), lambda: dispatcher.wait(bound), bound.test, args)
