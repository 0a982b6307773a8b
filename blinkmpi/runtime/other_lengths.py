"""Hand calls on host memory that differ in lengths or counts alone to C.

Lengths are arguments of a program to C (``block_kinds.h``, ``count_kinds.h``), once Python has made what C fills in. It
is made of a call of blocks at once, and of others at their second count, for most programs never change theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from weakref import proxy

from msgspec.structs import replace

from ..lang.algorithms import SCHEME as LANG
from ..planning.plan import ONE_SHOTS, chunk_for
from ..transport.host.host_call import HostBuffers
from ..transport.host.host_program import CACHE_BYTES, past_caches
from ..transport.host.shared_window import NoRoom
from ..transport.host.traffic import BLOCKS
from ..util.lru import LRU
from .arguments import InBlocks, Lengths, Prepared
from .collectives import Invocation, announced

if TYPE_CHECKING:
    from ..planning.plan import Rule
    from ..program.blocks import BlockMoves
    from ..program.call import Call
    from ..program.spans import Cut
    from ..transport.host.block_call import BlockCall, BlockKind
    from ..transport.host.count_kind import CountKind
    from ..transport.host.host_program import HostProgram
    from ..transport.host.repeated import RepeatedCalls
    from .context import Context

CALLS = 8192  # calls of blocks that are kept for other buffers
TRIED = 8  # C is offered calls that differ in lengths so often before that is given up
ONE_SHOT_BYTES, LONGEST = 1 << 20, 1 << 40  # bytes of a call of another count: in one shot, and at most


class Calls(Protocol):
    """What is asked of what binds the calls of a communicator."""

    context: Context
    repeated: RepeatedCalls

    def program(self, call: Call, *, blocking: bool) -> tuple[Rule | None, HostProgram | None]:
        """The row of the table that a call takes, and its program."""

    def prepare(self, invocation: Invocation, timeout_s: float | None, stream: Any) -> object:
        """Check a call's arguments."""

    def differ(self, lengths: Lengths, text: str, collective: str, timeout_s: float) -> NoReturn:
        """Raise, on every rank, where two ranks expect different lengths of a call."""


class OtherLengths:
    """The calls of a communicator that differ in lengths alone, and what C was offered to make them by itself."""

    def __init__(self, calls: Calls) -> None:
        self._calls: Calls = proxy(calls)
        self._offered: Counter[tuple[str, Rule | None, bool]] = Counter()  # offers since C last took one
        self.block_calls: LRU[tuple[BlockMoves, bool], BlockCall] = LRU(CALLS)  # for whatever buffers

    def offer(self, ready: Prepared | InBlocks | Exception, invocation: Invocation, *, pending: bool) -> None:
        """Offer a call, which is non-blocking if ``pending``; in vain a few times, no more."""
        calls = self._calls
        host = calls.context.host
        if host.recorder.ring is not None or host.messages is not None or isinstance(ready, Exception):
            return
        if isinstance(ready, InBlocks):
            rule, text, first = None, ready.moves.text, 1
        else:
            rule, text, first = calls.program(ready.call, blocking=not pending)[0], announced(ready.call).text, 2
            if rule is None or rule.scheme == "mpi" or rule.scheme.startswith(LANG):
                return
        self._offered[text, rule, pending] += 1
        if first <= self._offered[text, rule, pending] <= TRIED and self._take(ready, rule, invocation, pending):
            self._offered[text, rule, pending] = 0

    def _take(self, ready: Prepared | InBlocks, rule: Rule | None, invocation: Invocation, pending: bool) -> bool:
        method, args, repeated = invocation.method, invocation.args, self._calls.repeated
        if isinstance(ready, InBlocks):
            kind = self._block_kind(ready, invocation.name)
            return kind is not None and repeated.keep_kind(kind, method, args, pending=pending)
        assert rule is not None
        counts = count_kind(self._calls.context, ready, rule, method.buffers.bit_count(), blocking=not pending)
        return counts is not None and repeated.keep_counts(counts, method, args, pending=pending)

    def blocks(self, ready: InBlocks, collective: str, timeout_s: float, *, owns: bool) -> BlockCall:
        """A call of blocks, which makes the ranks compare lengths where they differ.

        One that C does not find again is found here by its blocks, and takes whatever buffers.
        """
        from ..transport.host.block_call import BlockCall

        calls, moves, buffers = self._calls, ready.moves, HostBuffers(ready.send, ready.recv)
        known = self.block_calls.find((moves, owns))
        if known is not None:
            known.aim(buffers, timeout_s)
            return known
        program = calls.context.host.load_blocks(moves)
        calls.context.say(lambda: f"{moves.text}: {program.said(BLOCKS)}", "INFO")

        def differ(late_s: float) -> NoReturn:
            calls.differ(ready.lengths, moves.text, collective, late_s)

        made = BlockCall(calls.context.host, program, moves, buffers, timeout_s, owns=owns, differ=differ)
        if owns:
            self.block_calls.put((moves, owns), made)
        return made

    def _block_kind(self, ready: InBlocks, collective: str) -> BlockKind | None:
        """What C makes calls of blocks by that differ from this one in lengths and places alone."""
        from ..transport.host.block_call import BlockKind

        buffer = ready.recv if ready.send is None else ready.send
        if buffer is None:
            return None
        calls, moves, buffers = self._calls, ready.moves, HostBuffers(ready.send, ready.recv)
        host, timeout_s = calls.context.host, calls.context.timeout_s

        def differ(made: Invocation, late_s: float) -> NoReturn:
            again = calls.prepare(made, late_s, None)
            lengths = again.lengths if isinstance(again, InBlocks) else again.blocks.lengths  # type: ignore[attr-defined]
            calls.differ(lengths, moves.text, collective, late_s)

        return BlockKind(host, host.load_blocks(moves), moves, buffers, timeout_s, item=buffer.itemsize, differ=differ)


# ---- counts


def count_kind(context: Context, ready: Prepared, rule: Rule, arguments: int, *, blocking: bool) -> CountKind | None:
    """What C makes calls by that differ from this one in their counts alone; None where it cannot.

    Args:
        rule: the row of the table that the call takes.
        arguments: how many buffers the call has.
    """
    from ..program.lower import cuts
    from ..transport.host.count_kind import kind_of

    call, called = ready.call, announced(ready.call)
    if called.count is None or ready.said or ready.final is not None or ready.before or ready.after:
        return None

    def of(count: int) -> Call:
        return replace(call, counts=(count,) * len(call.counts))

    def load(count: int) -> HostProgram:
        return context.load(of(count), rule)

    one_shot = rule.protocol in ONE_SHOTS
    packing = None if one_shot else context.plans.packing(call.collective, call.root, rule.scheme)
    parts = {} if packing is None else cuts(packing, call)

    def alike(count: int) -> bool:
        """Whether a call takes the same row, with slots of the same size."""
        slots = packing is None or chunk_for(packing, of(count), rule) == chunk_for(packing, call, rule)
        return slots and context.rule(of(count), blocking=blocking) == rule

    others = [row.min_bytes for row in context.plans.rules if row.collective == call.collective]
    counts = _counts_of(call, rule, others, parts, alike, ONE_SHOT_BYTES if one_shot else LONGEST)
    buffers, timeout_s = HostBuffers(ready.send, ready.recv), context.timeout_s
    try:
        return kind_of(context.host, load, called, buffers, timeout_s, cuts=parts, counts=counts, arguments=arguments)
    except NoRoom:
        return None


def _counts_of(
    call: Call, rule: Rule, rows: list[int], parts: Mapping[int, Cut], alike: Callable[[int], bool], most_bytes: int
) -> tuple[int, int]:
    """The least and the greatest count of calls whose programs are as this call's, as far as can be said at once.

    They are ``alike``, each tree has elements to carry, and results are written past the caches, or are not.

    Args:
        rows: from how many bytes on calls take other rows.
        most_bytes: of the longest in any case.
    """
    from ..program.spans import align_of

    count = call.counts[0]
    each = call.nbytes // count
    shares = [cut.end - cut.first for cut in parts.values()]
    least = max(1, -(-rule.min_bytes // each), int(2 * align_of(call) / min(shares)) if shares else 1)
    longest = min((row for row in rows if row > call.nbytes), default=most_bytes)
    most = (longest - 1) // each
    cached = CACHE_BYTES // (2 * call.n) // each
    if past_caches(call):
        least = max(least, cached + 1)
    elif not call.in_place:
        most = min(most, cached)
    while least < count and not alike(least):
        least = (least + count + 1) // 2
    while most > count and not alike(most):
        most = (most + count) // 2
    return least, most
