"""From when work was done on two streams to a row: matrix products and AllReduces, each alone and beside the other.

A lap has marks: so much of the work was done at such a time. While both run, a product or a call takes that part of the
lap in which neither stream has ended, divided by what was done in it; so whichever ends first does not make the other
one look fast. The total is the time of all that a lap has.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

PARTS = 12  # of the work of a lap, after each of which there is a mark
BLOCK_S = 0.02  # that the calls of a lap take alone
MOST_PRODUCTS, MOST_CALLS = 400, 100  # in a lap: the host must have put all on the streams before they are let go
MICRO = 1e6

Marks = tuple[tuple[int, float], ...]  # so many are done, so many seconds after the start


class Lap(NamedTuple):
    """When the products and the calls of a lap were done; no marks where it had none."""

    products: Marks
    calls: Marks


class Side(NamedTuple):
    """A library in a row: its laps without and with products, wrong elements, and what is known of its kernels."""

    alone: Sequence[Lap]
    beside: Sequence[Lap]
    wrong: int
    about: Mapping[str, Any]


class Beside(NamedTuple):
    """Seconds of a product and of a call while both ran, and of all."""

    product_s: float
    call_s: float
    total_s: float


def marked(count: int) -> tuple[int, ...]:
    """After which of ``count`` pieces of work there is a mark; the last one always has one."""
    return tuple(sorted({math.ceil(count * part / PARTS) for part in range(1, PARTS + 1)}))


def amounts(product_s: float, call_s: float) -> tuple[int, int]:
    """How many products and calls a lap has, so that both take about as long alone."""
    calls = max(1, min(MOST_CALLS, round(BLOCK_S / call_s)))
    return max(1, min(MOST_PRODUCTS, round(calls * call_s / product_s))), calls


def slowest(laps: Sequence[Lap]) -> Lap:
    """Of the same lap on all ranks, the latest time of each mark."""
    products, calls = (tuple((at[0][0], max(s for _, s in at)) for at in zip(*found, strict=True))
                       for found in zip(*laps, strict=True))  # fmt: skip
    return Lap(products, calls)


def done(marks: Marks, at_s: float) -> float:
    """How much is done at a time that is no later than the last mark: between two marks, in proportion to the time."""
    before, start = 0, 0.0
    for count, end in marks:
        if at_s < end:
            return before + (count - before) * (at_s - start) / (end - start)
        before, start = count, end
    return float(before)


def beside(lap: Lap) -> Beside:
    """What a lap with both says."""
    ends = lap.products[-1][1], lap.calls[-1][1]
    product, call = (min(ends) / done(marks, min(ends)) for marks in lap)
    return Beside(product, call, max(ends))


def each_s(found: Sequence[Marks]) -> float:
    """Seconds of one of several alike: the median over the laps."""
    return median(marks[-1][1] / marks[-1][0] for marks in found)


def library(side: Side, product_s: float, counts: tuple[int, int]) -> dict[str, Any]:
    """What a row has of a library; no times where its results are wrong."""
    if side.wrong:
        return {**side.about, "wrong": side.wrong}
    alone, found = each_s([lap.calls for lap in side.alone]), [beside(lap) for lap in side.beside]
    product, call, total = map(median, zip(*found, strict=True))
    apart = counts[0] * product_s + counts[1] * alone
    return {
        **side.about, "wrong": 0, "alone_us": alone * MICRO, "beside_us": call * MICRO, "slowdown": call / alone,
        "product_beside_us": product * MICRO, "product_slowdown": product / product_s, "total_us": total * MICRO,
        "total_spread_us": [least(one.total_s for one in found) * MICRO for least in (min, max)],
        "one_after_another_us": apart * MICRO,
    }  # fmt: skip


def row(products: Sequence[Lap], sides: Mapping[str, Side], **about: Any) -> dict[str, Any]:
    """A row: of the products alone, and of each library.

    Args:
        about: what was measured: sizes, type, CTAs.
    """
    product_s = each_s([lap.products for lap in products])
    counts = products[0].products[-1][0], next(iter(sides.values())).alone[0].calls[-1][0]
    found = {name: library(side, product_s, counts) for name, side in sides.items()}
    return {**about, "products": counts[0], "calls": counts[1], "product_us": product_s * MICRO, "libraries": found}


def shown(found: Mapping[str, Any]) -> str:
    """A row as a line: slowdown of the product and of the AllReduce, and the total."""
    ctas = "default" if found["max_ctas"] is None else f"{found['max_ctas']} CTAs"
    what = (
        f"{found['edge']}^3 {found['dtype']} {found['bytes'] >> 20} MiB, {ctas}: product {found['product_us']:.0f} us"
    )
    return "; ".join([what, *(f"{name} {_side_text(one)}" for name, one in found["libraries"].items())])


def _side_text(one: Mapping[str, Any]) -> str:
    if one["wrong"]:
        return f"{one['wrong']} wrong"
    slower = f"x {one['product_slowdown']:.2f}, call {one['alone_us']:.0f} us x {one['slowdown']:.2f}"
    return f"{slower}, total {one['total_us'] / 1e3:.2f} of {one['one_after_another_us'] / 1e3:.2f} ms"
