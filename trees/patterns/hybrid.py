"""Method ``hybrid``: trees on NVLink beside trees on PCIe, the vector split so that both end together (section 3.4).

With rates r and s of the two, they carry r / (r + s) and s / (r + s). The paper's switching cost, the time until the
slow links may start, makes their part smaller: a vector of M bytes ends at T = (M + cost s) / (r + s), and the slow
links carry s (T - cost), or nothing where T <= cost. The default cost is 0, as both kinds of links can be open at once.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import msgspec

from ..graph.fabric import FAST, SLOW, Fabric, fabric
from ..problem import Problem, Solution
from ..tree import Packing, Tree


class VectorSplit(NamedTuple):
    """The bytes of each kind of links, as parts of the vector, and when both are done."""

    fast: Fraction
    slow: Fraction
    seconds: Fraction


def fits(problem: Problem) -> bool:
    """Machines where each of the two kinds of links joins the ranks."""
    return all(f.arcs and f.serves(problem.collective, problem.root) for f in _both(problem))


def _both(problem: Problem) -> tuple[Fabric, Fabric]:
    return fabric(problem.fabric.topology, FAST), fabric(problem.fabric.topology, SLOW)


def plan(problem: Problem, best: Callable[[Problem], Packing]) -> Solution:
    """The best packings of both kinds of links, side by side.

    Args:
        best: plans for one kind alone.
    """
    fast, slow = (best(problem.on(f)) for f in _both(problem))
    options = problem.options
    parts = split(fast.rate, slow.rate, nbytes=options.nbytes, switch_seconds=options.switch_seconds)
    rate = fast.rate / parts.fast  # the fast links work all the time
    slow_trees = weighted(slow.trees, rate * parts.slow / slow.rate)
    trees = tuple(sorted(fast.trees + slow_trees, key=lambda t: t.root))
    why = (
        f"{float(parts.fast):.1%} of the vector on {fast.links} ({fast.scheme}), "
        f"{float(parts.slow):.1%} on {slow.links} ({slow.scheme})"
    )
    if options.switch_seconds:
        late = f"{float(options.switch_seconds) * 1e6:g} us before the slow links start"
        why += f", for {options.nbytes} bytes and {late}"
    used = "+".join((fast.links, slow.links)).split("+")
    return Solution(trees, rate, why, fabric(problem.fabric.topology, used))


def split(fast: Fraction, slow: Fraction, *, nbytes: int = 0, switch_seconds: Fraction = Fraction(0)) -> VectorSplit:
    """The parts of a vector of ``nbytes`` for links of two rates in MB/s; the slow ones start later.

    >>> split(Fraction(3), Fraction(1), nbytes=8_000_000, switch_seconds=Fraction(1))
    VectorSplit(fast=Fraction(27, 32), slow=Fraction(5, 32), seconds=Fraction(9, 4))
    """
    size = Fraction(nbytes, 10**6)  # MB
    if not switch_seconds:
        return VectorSplit(fast / (fast + slow), slow / (fast + slow), size / (fast + slow))
    seconds = (size + switch_seconds * slow) / (fast + slow)
    if seconds <= switch_seconds:
        return VectorSplit(Fraction(1), Fraction(0), size / fast)
    part = slow * (seconds - switch_seconds) / size
    return VectorSplit(1 - part, part, seconds)


def weighted(trees: tuple[Tree, ...], factor: Fraction) -> tuple[Tree, ...]:
    """All weights times ``factor``; none if that is 0."""
    return tuple(msgspec.structs.replace(t, weight=t.weight * factor) for t in trees) if factor else ()
