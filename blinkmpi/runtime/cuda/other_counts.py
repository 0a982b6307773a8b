"""Hand calls on streams that differ in their counts alone to C, at the second count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ...planning.plan import Rule
from ...program.call import Call
from ...program.template import Sizes, Template
from .call import CudaCall
from .context import CudaContext
from .repeating import Repeating

TRIED = 8  # C is offered a kind so often before that is given up
KNOWN = 256  # after so many calls by Python C is told of a kind again: it may have dropped it


class OtherCounts:
    """The kinds of calls of a communicator that differ in their counts, and what C was offered of them."""

    def __init__(self, context: CudaContext, repeating: Repeating) -> None:
        self._context, self._repeating = context, repeating
        self._seen: Counter[tuple[Any, ...]] = Counter()

    def offer(self, bound: CudaCall, method: object, args: tuple[Any, ...], stream: Any) -> None:
        """Have C make calls that are as this one but for their counts, if another one was seen before."""
        call = bound.call
        if bound.kernel.fit is None or not call.even or any(p and p.offset for p in bound.places):
            return
        if any(isinstance(arg, list | tuple) for arg in args):  # a specification may have another count than its array
            return
        buffers = zip(bound.registered, bound.places, strict=True)
        registered = all(known for known, place in buffers if place is not None)
        row = self._row(call, registered)
        read_as = method, type(stream), *map(type, args)  # C distinguishes calls by these, too
        kind = read_as, replace(call, counts=()), Sizes.of(call).most, bound.stream, row, *bound.registered
        self._seen[kind] += 1
        if not 1 < self._seen[kind] <= TRIED:
            return

        def alike(count: int) -> bool:
            return self._row(replace(call, counts=(count,) * len(call.counts)), registered) == row

        count, most = call.counts[0], Sizes.of(call).most
        counts = _farthest(count, most // 2 + 1, alike), _farthest(count, most, alike)
        if self._repeating.keep_counts(bound, counts, row[1] if row else None, method, args, stream):
            self._seen[kind] = -KNOWN

    def forget(self) -> None:
        """What was offered is known no more."""
        self._seen.clear()

    def _row(self, call: Call, registered: bool) -> tuple[Rule, Template | None] | None:
        """The row of the table that a call takes, and its template if any; None while its chunk is looked for."""
        context = self._context
        search = context.chunk_search(call, registered=registered)
        if search is not None and not search.done:
            return None
        rule = context.taken(call, registered=registered)
        return rule, context.template(call, rule) if rule.protocol == "slots" else None


def _farthest(count: int, end: int, alike: Callable[[int], bool]) -> int:
    """A number between two of which all are alike up to the first, if they are from the first on up to some place."""
    while end != count and not alike(end):
        end = (count + end) // 2 if end > count else (count + end + 1) // 2
    return end
