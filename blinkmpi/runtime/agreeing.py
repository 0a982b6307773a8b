"""What the ranks exchange before a call can be bound: lengths of blocks, and the part of the plan that it needs."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn

from ..errors import ArgumentError
from ..planning.selection import parse_algo
from ..program.call import Call
from ..transport.announcement import ON_GPU, Called
from ..transport.interface import PeerDelegates
from .arguments import InBlocks, Lengths, NeedsNumbers, Prepared, Read
from .buffers import DelegatedToMPI
from .calls_without_program import EntryCall, RefusedCall
from .collectives import describe
from .delegation import BY_A_PEER
from .sequence import CallSequence, Fatal

if TYPE_CHECKING:
    from .context import Context


class DelegatedByPeer(DelegatedToMPI):
    """Another rank's arguments are MPI's; all ranks have entered the call and know."""


def agreed(sequence: CallSequence, ready: Read, collective: str, timeout_s: float) -> Prepared | InBlocks | Exception:
    """A call whose lengths and plan are known, or that needs neither; or an error that the peers have to learn of.

    Raises:
        BlinkError: which all ranks know.
    """
    if isinstance(ready, InBlocks | Exception):
        return ready
    if (made := _in_blocks(sequence.context, ready)) is not None:
        return made
    if isinstance(ready, NeedsNumbers):
        ready = _with_numbers(sequence, ready, collective, timeout_s)
    return _planned(sequence, ready, timeout_s) if isinstance(ready, Prepared) else ready


def agreed_alone(context: Context, ready: Read) -> Prepared | InBlocks | None:
    """The same, where no rank needs to hear of others; None where some may."""
    if isinstance(ready, InBlocks):
        return ready
    made = ready if isinstance(ready, Exception) else _in_blocks(context, ready)
    if made is not None:
        return None if isinstance(made, Exception) else made
    return ready if isinstance(ready, Prepared) and not _lacks_plan(context, ready) else None


def _in_blocks(context: Context, ready: Prepared | NeedsNumbers) -> Prepared | InBlocks | Exception | None:
    """A call as one of blocks, if it is made as such. All ranks decide alike, before they hear of any length."""
    blocks = ready.blocks
    if blocks is not None and blocks.counts is not None and (why := context.cuda().why_no_blocks):
        return ArgumentError(
            f"Alltoallv with counts in GPU memory is for GPUs that NVLink joins, and here {why}; pass counts as lists"
        )
    if blocks is None:
        return None
    if blocks.counts is None and not takes_blocks(context, blocks.moves.collective, on_gpus=ready.on_device):
        return None
    if not ready.on_device:
        return blocks
    moves, dtype = blocks.moves, (ready.buffers if isinstance(ready, NeedsNumbers) else ready).call.dtype
    call = Call(moves.collective, context.n, (0,), dtype, "", moves.root)
    return Prepared(call, blocks.send, blocks.recv, blocks=blocks)


def _lacks_plan(context: Context, ready: Prepared) -> bool:
    plans = context.cuda().planned if ready.on_device else context.planned
    call = ready.call
    return bool(call.total and not call.name and plans.lacks(call.collective, call.root))


def takes_blocks(context: Context, collective: str, *, on_gpus: bool = False) -> bool:
    """Whether a call of blocks is made as such, and not by a plan: unless a plan, or a scheme for it, was asked for."""
    options, settings = context.options, context.settings
    if on_gpus:
        if context.cuda().why_no_blocks:
            return False
    elif context.host.block_memory is None or context.host.window.full:
        return False
    elif context.gpus is not None:  # the plans given or asked for are then those of the GPUs
        return True
    algo = settings.algo if options.algo is None else options.algo
    asked = _asked(algo, tuple(made.collective for made in options.algorithms))
    return collective not in asked and not (context.emulated or options.plan or settings.graph_file)


@lru_cache(maxsize=64)
def _asked(algo: str, made: tuple[str, ...]) -> frozenset[str]:
    """The collectives for which a scheme or an algorithm was asked for."""
    named = parse_algo(algo).items()
    return frozenset(made) | {of for of, schemes in named if any(not scheme.startswith("^") for scheme in schemes)}


def differ(sequence: CallSequence, lengths: Lengths, text: str, collective: str, timeout_s: float) -> NoReturn:
    """Tell all lengths, and raise on the rank that expects others than it hears; the other ranks learn of it."""
    host, rows = sequence.host, sequence.numbers_of_all(lengths.numbers, timeout_s, collective)
    call: EntryCall = EntryCall(host, Called(text), timeout_s)
    try:
        lengths.compare(rows)
    except ArgumentError as error:
        call = RefusedCall(host, error, timeout_s)
    sequence.numbered(call.run)
    raise AssertionError(f"{text}: C found that lengths differ, and they are {rows}")


def _with_numbers(
    sequence: CallSequence, ready: NeedsNumbers, collective: str, timeout_s: float
) -> Prepared | Exception:
    try:
        rows = sequence.numbers_of_all(ready.numbers, timeout_s, collective)
    except PeerDelegates:
        sequence.seq -= 1  # the announcement took this call's number, so the call takes it again
        return DelegatedByPeer(BY_A_PEER)
    try:
        return ready.with_numbers(rows)
    except Exception as error:
        return error


def _planned(sequence: CallSequence, ready: Prepared, timeout_s: float) -> Prepared | Exception:
    """A call that the plan has trees for: rank 0 makes them now, if it is the first of its collective and root."""
    context, call = sequence.context, ready.call
    if not _lacks_plan(context, ready):
        return ready
    plans = context.cuda().planned if ready.on_device else context.planned
    what = f"{describe(call)}{ON_GPU if ready.on_device else ''}, to be planned first"
    try:
        sequence.entered(EntryCall(context.host, Called(what), timeout_s).run)
    except PeerDelegates:
        sequence.seq -= 1
        return DelegatedByPeer(BY_A_PEER)
    began = time.monotonic()
    with Fatal(sequence, Exception), context.rendezvous.doing(f"planning of {describe(call)}", timeout_s):
        plans.add(call.collective, call.root)  # an error in it is raised on every rank
    seconds = time.monotonic() - began
    context.say(lambda: f"planned for {describe(call)} and the like in {seconds:.3f} s", "INFO")
    return ready
