"""Calls on streams that differ from earlier ones in their counts alone: C is told of them at their second count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ...program.call import Call
from ...program.template import Sizes
from .call import CudaCall
from .context import CudaContext
from .repeating import Repeating

TRIED = 8  # times that calls of a kind are offered to C in vain


class OtherCounts:
    """The kinds of calls of a communicator that differ in their counts, and what C was offered of them."""

    def __init__(self, context: CudaContext, repeating: Repeating) -> None:
        self._context, self._repeating = context, repeating
        self._seen: Counter[tuple[Any, ...]] = Counter()

    def offer(self, bound: CudaCall, method: object, args: tuple[Any, ...], stream: Any) -> None:
        """Have C make calls that are as this one but for their counts, if another one was seen before."""
        call = bound.call
        if not bound.places or bound.kernel.fit is None or not call.even or any(p and p.offset for p in bound.places):
            return
        kind = replace(call, counts=()), Sizes.of(call).most, bound.stream, *bound.registered
        self._seen[kind] += 1
        if not 1 < self._seen[kind] <= TRIED:
            return
        if self._repeating.keep_counts(bound, self._range(bound), method, args, stream):
            self._seen[kind] = 0

    def forget(self) -> None:
        """What was offered is known no more."""
        self._seen.clear()

    def _range(self, bound: CudaCall) -> tuple[int, int]:
        """The least and the greatest count whose calls take the same row of the table, and one template if any."""
        context, call = self._context, bound.call
        buffers = zip(bound.registered, bound.places, strict=True)
        registered = all(known for known, place in buffers if place is not None)
        count, most = call.counts[0], Sizes.of(call).most

        def of(count: int) -> Call:
            return replace(call, counts=(count,) * len(call.counts))

        rule = context.taken(call, registered=registered)
        template = context.template(call, rule) if rule.protocol == "slots" else None

        def alike(count: int) -> bool:
            other = of(count)
            search = context.chunk_search(other, registered=registered)
            if (search is not None and not search.done) or context.taken(other, registered=registered) != rule:
                return False
            return template is None or context.template(other, rule) is template

        return _farthest(count, most // 2 + 1, alike), _farthest(count, most, alike)


def _farthest(count: int, end: int, alike: Callable[[int], bool]) -> int:
    """A number between two of which all are alike up to the first, if they are from the first on up to some place."""
    while end != count and not alike(end):
        end = (count + end) // 2 if end > count else (count + end + 1) // 2
    return end
