"""Values with their elements as the channels and stages of a Program."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..program.ir import Channel, Stage
from .flow import Goal


class StageValue(NamedTuple):
    """A value that is worked out on ``rank``: of other values (from 0 on), and of chunk ``~i`` of the rank's input.

    ``stored`` is the chunk of the rank's output that it is, or -1.
    """

    rank: int
    operands: tuple[int, ...]
    stored: int = -1

    @property
    def is_input(self) -> bool:
        """Whether it is a chunk of the input as it is."""
        return len(self.operands) == 1 and self.operands[0] < 0


Values = list[StageValue]  # each after those that it is made of


class JoinedValues(NamedTuple):
    """Values that channels join, on a span of ``length`` elements.

    ``reads`` are the places where they read the input, and ``stores`` those of the output, in the values' order.
    """

    values: Values
    length: int
    reads: tuple[int, ...]
    stores: tuple[int, ...]

    @property
    def start(self) -> tuple[int, ...]:
        """What runs of one shape are sorted by, so that neighbours follow one another."""
        return (*self.reads, *self.stores)

    def then(self, other: "JoinedValues") -> "JoinedValues | None":
        """Both as one, if the other begins where this one ends, everywhere."""
        behind = (b == a + self.length for a, b in zip(self.start, other.start, strict=True))
        return self._replace(length=self.length + other.length) if all(behind) else None


class Emitter:
    """Collects channels and stages.

    Args:
        multicast: whether all readers of a value read one slot.
    """

    def __init__(self, goal: Goal, *, multicast: bool) -> None:
        self.channels: list[Channel] = []
        self.stages: list[Stage] = []
        self._goal, self._multicast = goal, multicast
        self._reduces = goal.reduces

    def add(self, number: int, run: JoinedValues) -> None:
        """The stages of a run, as tree ``number``."""
        values, reads, stores = run.values, iter(run.reads), iter(run.stores)
        folded: list[int] = []  # how many inputs each value is folded of
        for value in values:
            folded.append(sum(folded[o] if o >= 0 else 1 for o in value.operands))
        users: list[list[int]] = [[] for _ in values]
        for i, value in enumerate(values):
            for o in value.operands:
                if o >= 0:
                    users[o].append(i)
        incoming: dict[tuple[int, int], int] = {}  # channels by writer and reader
        for i, value in enumerate(values):
            way = self._way(value, folded[i])
            partial = self._reduces and way == "up"
            outs = []
            for readers in self._shared(values, users[i]):
                incoming |= {(i, reader): len(self.channels) for reader in readers}
                outs.append(len(self.channels))
                ranks = tuple(sorted(values[reader].rank for reader in readers))
                self.channels.append(Channel(number, value.rank, ranks, partial, partial and value.is_input))
            ins = tuple(incoming[o, i] for o in value.operands if o >= 0)
            fold = tuple(ins.index(incoming[o, i]) if o >= 0 else -1 for o in value.operands)
            local = next(reads) if -1 in fold else None
            store = next(stores) if value.stored >= 0 else None
            self.stages.append(
                Stage(value.rank, number, way, run.length, local, ins, fold, store, tuple(outs), way == "turn")
            )

    def _way(self, value: StageValue, folded: int) -> Literal["up", "turn", "down"]:
        """By value: an incomplete fold goes up, the one that completes it turns, what only moves goes down."""
        if not self._reduces:
            return "down"
        if self._goal.collective in ("scan", "exscan", "custom") or folded < self._goal.n:
            return "up"
        return "turn" if len(value.operands) > 1 or value.is_input else "down"

    def _shared(self, values: Values, users: Sequence[int]) -> list[list[int]]:
        """The users of a value by the channel that they read: each its own, or those of different ranks one."""
        if not self._multicast:
            return [[user] for user in users]
        of_rank: dict[int, list[int]] = defaultdict(list)
        for user in users:
            of_rank[values[user].rank].append(user)
        most = max(map(len, of_rank.values()), default=0)
        return [[own[turn] for own in of_rank.values() if turn < len(own)] for turn in range(most)]
