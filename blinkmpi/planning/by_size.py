"""The fastest scheme and chunk for vectors of each size, by the cost model (Blink section 3.2.1)."""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from ..program.call import call_of_bytes
from ..program.cost_model import price
from ..program.estimate import Estimate
from ..program.lower import lower
from ..topology.model import Topology
from ..trees.deadline import NEVER, Deadline
from ..trees.graph.fabric import Kept, fabric
from ..trees.problem import BACKWARDS
from ..trees.tree import Packing
from .slots import Choice

KIB = 1 << 10
SIZES = tuple(4 * KIB << step for step in range(0, 20, 2))  # 4 KiB to 1 GiB
WORTH = 0.99  # of the time of the choice for the next larger size: below, another one is taken
MOST_EDGES = 60_000  # of a packing that is estimated
MANY_RANKS, FAR_LESS = 16, 4
CLOSE, PLAYED_EDGES = 1.5, 600


Slots = Callable[[Estimate], Sequence[tuple[int, int]]]


class _Contender(NamedTuple):
    packing: Packing
    estimate: Estimate
    slots: Sequence[tuple[int, int]]
    more: float = 0.0  # seconds that the simulator predicts above the estimate

    @property
    def scheme(self) -> str:
        """Its scheme."""
        return self.packing.scheme

    def seconds(self, nbytes: int, choice: Choice) -> float:
        """Seconds with the slots of a choice."""
        return self.estimate.seconds(nbytes, choice.chunk_bytes, choice.depth) + self.more

    def best(self, nbytes: int) -> tuple[float, Choice]:
        """The least seconds, and the slots that give them; the smallest of equals."""
        choices = [Choice(0, self.scheme, chunk, depth, chunk) for chunk, depth in self.slots]
        return min((self.seconds(nbytes, choice), choice) for choice in choices)


Offered = tuple[tuple[str, Fraction, int, int], ...]  # packings: scheme, rate, trees, depth
_FASTEST: Kept[tuple[str, int, Offered], tuple[Choice, ...]] = Kept()


def fastest_once(
    packings: Sequence[Packing], topology: Topology, slots: Slots, otherwise: tuple[int, int]
) -> tuple[Choice, ...]:
    """As :func:`fastest`, once for packings that are alike.

    Where links are equally fast both ways, a reduce takes the choices of a broadcast; not between nodes, where one rank
    sends its messages one after another.
    """
    links = fabric(topology, topology.kinds())
    collective, root = packings[0].collective, packings[0].root
    alike = BACKWARDS.get(collective, collective) if links.even and len(topology.nodes) == 1 else collective
    key = alike, root, tuple((p.scheme, p.rate, len(p.trees), p.depth) for p in packings)
    return _FASTEST.once(links, key, lambda: tuple(fastest(packings, topology, slots, otherwise)))


def fastest(
    packings: Sequence[Packing],
    topology: Topology,
    slots: Slots,
    otherwise: tuple[int, int],
    deadline: Deadline = NEVER,
) -> list[Choice]:
    """The choices for vectors of all sizes, those for the largest first; the last one is from 0 bytes on.

    Args:
        packings: for one collective and root, one of each scheme.
        slots: the slots that a packing may have, as bytes and number, ascending.
        otherwise: the slots where nothing is estimated, as time for planning is over or the packings are too large.
    """
    best = max(packings, key=lambda p: p.rate)  # the first of equals
    able = [p for p in contenders(packings) if sum(len(tree.edges) for tree in p.trees) <= MOST_EDGES]
    if max((p.rate for p in able), default=0) < best.rate or deadline.late():
        return [Choice(0, best.scheme, *otherwise)]
    estimates = [Estimate(p, topology) for p in able]
    field = _played([_Contender(p, e, slots(e)) for p, e in zip(able, estimates, strict=True)], topology)
    found: list[Choice] = []
    for nbytes in reversed(SIZES):
        seconds, choice = min((one.best(nbytes) for one in field.values()), key=lambda offer: offer[0])
        if not found:
            found.append(choice)
        elif seconds < WORTH * field[found[-1].scheme].seconds(nbytes, found[-1]):
            found[-1] = found[-1]._replace(min_bytes=nbytes * 2)
            found.append(choice)
    return found


def _played(some: Sequence[_Contender], topology: Topology) -> dict[str, _Contender]:
    """By scheme; those that are close to one another for the shortest vectors with what the simulator says of these.

    A vector of one chunk for each tree is played in no time, if the trees are few.
    """
    shortest = SIZES[0]
    least = min(one.best(shortest)[0] for one in some)
    close = [one for one in some if one.best(shortest)[0] < CLOSE * least]
    small = all(sum(len(tree.edges) for tree in one.packing.trees) <= PLAYED_EDGES for one in close)
    field = {one.scheme: one for one in some}
    for one in close if len(close) > 1 and small else ():
        seconds, choice = one.best(shortest)
        p = one.packing
        call = call_of_bytes(p.collective, p.n, max(shortest, 4 * p.n), root=p.root)
        program = lower(p, call, chunk_bytes=choice.chunk_bytes, depth=choice.depth)
        field[one.scheme] = one._replace(more=price(program, p, topology).seconds - seconds)
    return field


def contenders(packings: Iterable[Packing]) -> list[Packing]:
    """The packings that no other one, on the same kinds of links, beats in rate, depth and number of trees.

    Between many ranks of several nodes, a packing of a tree for each rank with far less rate than another one sends far
    more messages from node to node, and is slower at every size.
    """
    kept: list[Packing] = []
    for p in sorted(packings, key=lambda p: (-p.rate, p.depth, len(p.trees))):
        many = p.n > MANY_RANKS and len(p.trees) >= p.n and "net" in p.links.split("+")
        crowded = many and kept and p.rate < kept[0].rate / FAR_LESS
        same = [q for q in kept if q.links == p.links]
        if not crowded and not any(q.depth <= p.depth and len(q.trees) <= len(p.trees) for q in same):
            kept.append(p)
    return kept
