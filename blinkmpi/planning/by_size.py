"""The fastest scheme and chunk for vectors of each size, by the cost model (Blink section 3.2.1)."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..program.estimate import Estimate
from ..topology.model import Topology
from ..trees.deadline import late
from ..trees.tree import Packing

KIB = 1 << 10
SIZES = tuple(4 * KIB << step for step in range(0, 20, 2))  # 4 KiB to 1 GiB
WORTH = 0.99  # of the time of the choice for the next larger size: below, another one is taken
MOST_EDGES = 60_000  # of a packing that is estimated
MANY_RANKS, FAR_LESS = 16, 4


class Choice(NamedTuple):
    """From so many bytes on, the scheme, and the bytes and number of its slots; chunks of at least so many bytes."""

    min_bytes: int
    scheme: str
    chunk_bytes: int
    depth: int
    least_chunk_bytes: int = 0


Slots = Callable[[Estimate], Sequence[tuple[int, int]]]


class _Contender(NamedTuple):
    scheme: str
    estimate: Estimate
    slots: Sequence[tuple[int, int]]

    def seconds(self, nbytes: int, choice: Choice) -> float:
        """Seconds with the slots of a choice."""
        return self.estimate.seconds(nbytes, choice.chunk_bytes, choice.depth)

    def best(self, nbytes: int) -> tuple[float, Choice]:
        """The least seconds, and the slots that give them; the smallest of equals."""
        choices = [Choice(0, self.scheme, chunk, depth, chunk) for chunk, depth in self.slots]
        return min((self.seconds(nbytes, choice), choice) for choice in choices)


def fastest(packings: Sequence[Packing], topology: Topology, slots: Slots, otherwise: tuple[int, int]) -> list[Choice]:
    """The choices for vectors of all sizes, those for the largest first; the last one is from 0 bytes on.

    Args:
        packings: for one collective and root, one of each scheme.
        slots: the slots that a packing may have, as bytes and number, ascending.
        otherwise: the slots where nothing is estimated, as time for planning is over or the packings are too large.
    """
    able = [p for p in contenders(packings) if sum(len(tree.edges) for tree in p.trees) <= MOST_EDGES]
    if not able or late():
        best = max(packings, key=lambda p: p.rate)  # the first of equals
        return [Choice(0, best.scheme, *otherwise)]
    estimates = [Estimate(p, topology) for p in able]
    field = {p.scheme: _Contender(p.scheme, e, slots(e)) for p, e in zip(able, estimates, strict=True)}
    found: list[Choice] = []
    for nbytes in reversed(SIZES):
        seconds, choice = min((one.best(nbytes) for one in field.values()), key=lambda offer: offer[0])
        if not found:
            found.append(choice)
        elif seconds < WORTH * field[found[-1].scheme].seconds(nbytes, found[-1]):
            found[-1] = found[-1]._replace(min_bytes=nbytes * 2)
            found.append(choice)
    return found


def contenders(packings: Iterable[Packing]) -> list[Packing]:
    """The packings that no other one, on the same kinds of links, beats in rate, depth and number of trees.

    Between many ranks of several nodes, a packing of far less rate than another one sends far more messages there, and
    is slower at every size.
    """
    kept: list[Packing] = []
    for p in sorted(packings, key=lambda p: (-p.rate, p.depth, len(p.trees))):
        crowded = p.n > MANY_RANKS and "net" in p.links.split("+") and kept and p.rate < kept[0].rate / FAR_LESS
        same = [q for q in kept if q.links == p.links]
        if not crowded and not any(q.depth <= p.depth and len(q.trees) <= len(p.trees) for q in same):
            kept.append(p)
    return kept
