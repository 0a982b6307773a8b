"""``Flow``: what an algorithm computes, by value: which chunks are folded on which rank, and where the results end.

Whatever an algorithm is written in becomes a flow: a program in Python (:mod:`.trace`) or a file of MSCCL's
(:mod:`.xml`). A flow has no buffers, only values, so nothing can be overwritten or read too early; :meth:`Flow.prove`
says whether it computes its collective, and :mod:`.lower` makes a Program of it.

A **reference** is an integer: ``i >= 0`` is the value of ``nodes[i]``, on whatever rank it is, and ``~i`` (below 0) is
chunk ``i`` of the send buffer of the rank at which the reference is used. A value that is used on another rank is sent
there. Pure data.
"""

from collections.abc import Sequence
from functools import cache, cached_property
from math import isqrt

from ..errors import PlanError
from ..program.call import BLOCKED, REDUCTIONS, Call
from ..trees.tree import ROOTED
from ..util.codec import Value
from ..util.text import plural

Contribution = tuple[int, int]  # (rank, chunk of its send buffer)
MOST_CONTRIBUTIONS = 1 << 24  # to the outputs of all ranks
SOME_FOLDED = 1 << 22  # contributions to all values, each time that they are folded, where results have fewer


class Goal(Value, frozen=True):
    """What a collective gives and wants, in chunks.

    Args:
        collective: one of ours, or ``custom``.
        n: ranks.
        chunks: pieces of equal length of the vector, or of each block where a call has blocks.
        root: or -1.
        given: chunks of each rank's send buffer.
        wanted: for each rank and each chunk of its receive buffer, what must be folded there, in ascending order; none
            where nothing need be written.
    """

    collective: str
    n: int
    chunks: int
    root: int
    given: tuple[int, ...]
    wanted: tuple[tuple[tuple[Contribution, ...], ...], ...]

    @property
    def reduces(self) -> bool:
        """Whether chunks of several ranks are folded."""
        if self.collective == "custom":
            return any(len(want) > 1 for outputs in self.wanted for want in outputs)
        return self.collective in REDUCTIONS

    def checked(self) -> "Goal":
        """Return the goal if its contributions are there.

        Raises:
            PlanError: naming rank and chunk.
        """
        if len(self.given) != self.n or len(self.wanted) != self.n or min(self.given, default=-1) < 0:
            raise PlanError(f"{self.collective} of {self.n} ranks: given {len(self.given)} and wanted "
                            f"{len(self.wanted)}; expected one of each rank, of at least 0 chunks")  # fmt: skip
        if sum(self.given) > MOST_CONTRIBUTIONS:
            raise PlanError(f"{sum(self.given)} chunks are given; expected at most {MOST_CONTRIBUTIONS}")
        for rank, outputs in enumerate(self.wanted):
            for i, want in enumerate(outputs):
                for source, part in want:
                    if not 0 <= source < self.n or not 0 <= part < self.given[source]:
                        raise PlanError(f"rank {rank} wants chunk {part} of rank {source} in chunk {i} of its output; "
                                        f"expected one of the {self.n} ranks' chunks")  # fmt: skip
                if len(want) > len({*want}):
                    twice = next(one for one in want if want.count(one) > 1)
                    raise PlanError(f"rank {rank} wants chunk {twice[1]} of rank {twice[0]} twice in chunk {i} of its "
                                    "output; name every contribution once")  # fmt: skip
        return self


class Node(Value, frozen=True):
    """A value: its operands folded on ``rank``, in this order; one operand is a copy of a value, mostly from elsewhere.

    ``where`` is the place in the user's program, ``ring.py:7``, for messages.
    """

    rank: int
    operands: tuple[int, ...]
    where: str = ""


class Flow(Value, frozen=True, dict=True):
    """Values, each after those that it is made of, and the references that the chunks of the receive buffers get.

    ``outputs[rank][chunk]`` is None where nothing is written.
    """

    goal: Goal
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[int | None, ...], ...]

    @cached_property
    def contributions(self) -> tuple[frozenset[Contribution], ...]:
        """What is folded in each node.

        Raises:
            PlanError: for a reference to nothing, a contribution that is folded twice, a fold in what reduces nothing.
        """
        goal, found = self.goal.checked(), list[frozenset[Contribution]]()
        reduces = goal.collective in REDUCTIONS or goal.collective == "custom"
        folded, most = 0, self._most_folded()
        for i, node in enumerate(self.nodes):
            if not 0 <= node.rank < goal.n or not node.operands or max(node.operands) >= i:
                raise PlanError(
                    f"{node.where}: value {i} on rank {node.rank} is made of {node.operands}; expected values before "
                    f"it, on one of {goal.n} ranks"
                )
            if len(node.operands) > 1 and not reduces:
                raise PlanError(f"{node.where}: a reduction in {goal.collective}, which reduces nothing")
            value = self._given(node.operands[0], node.rank, node.where, found)
            for reference in node.operands[1:]:
                part = self._given(reference, node.rank, node.where, found)
                if not value.isdisjoint(part):
                    raise PlanError(f"{node.where}: {named(min(value & part))} is folded twice on rank {node.rank}")
                value |= part
                folded += len(value)
                if folded > most:
                    raise PlanError(f"{node.where or f'value {i}'}: more than {most} contributions are folded until "
                                    "here; take fewer ranks or chunks, which may be long")  # fmt: skip
            found.append(value)
        return tuple(found)

    def _most_folded(self) -> int:
        """How many contributions all values may have: as many as each of a chain of ranks would have."""
        goal = self.goal
        chunks = goal.n * goal.chunks if goal.collective != "custom" else sum(len(w) for of in goal.wanted for w in of)
        return min(max(SOME_FOLDED, goal.n * chunks), MOST_CONTRIBUTIONS)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """The nodes that some wanted result needs, ascending."""
        needed = bytearray(len(self.nodes))
        for references, wanted in zip(self.outputs, self.goal.wanted, strict=True):
            for reference, want in zip(references, wanted, strict=True):
                if want and reference is not None and reference >= 0:
                    needed[reference] = 1
        for i in range(len(self.nodes) - 1, -1, -1):
            for operand in self.nodes[i].operands if needed[i] else ():
                if operand >= 0:
                    needed[operand] = 1
        return tuple(i for i, one in enumerate(needed) if one)

    def _given(
        self, reference: int, rank: int, where: str, found: Sequence[frozenset[Contribution]]
    ) -> frozenset[Contribution]:
        if 0 <= reference < len(found):
            return found[reference]
        if reference >= 0:
            raise PlanError(f"{where or 'outputs'}: value {reference}; there are {len(found)}")
        if ~reference >= self.goal.given[rank]:
            raise PlanError(
                f"{where}: chunk {~reference} of rank {rank}'s input; it has {self.goal.given[rank]} chunks"
            )
        return frozenset({(rank, ~reference)})

    def prove(self) -> "Flow":
        """Return the flow if every receive buffer gets what its collective says.

        Raises:
            PlanError: naming the rank, the chunk, what it gets and what it should.
        """
        found = self.contributions
        if [len(o) for o in self.outputs] != [len(w) for w in self.goal.wanted]:
            raise PlanError(
                f"outputs of {[len(o) for o in self.outputs]} chunks; expected {[len(w) for w in self.goal.wanted]}"
            )
        for rank, (references, wanted) in enumerate(zip(self.outputs, self.goal.wanted, strict=True)):
            for chunk, (reference, want) in enumerate(zip(references, wanted, strict=True)):
                if not want:
                    continue
                if reference is None:
                    raise PlanError(
                        f"rank {rank}: nothing writes chunk {chunk} of its output; wanted {several(want)}; copy that "
                        'to "output", or with inplace=True to "input"'
                    )
                where = self.nodes[reference].where if 0 <= reference < len(self.nodes) else ""
                got = self._given(reference, rank, where, found)
                if got != frozenset(want):
                    raise wrong_result(where, rank, chunk, got, want)
        return self


def check_size(n: int, chunks: int) -> None:
    """Raise PlanError for more ranks, or chunks of a vector or a block, than a program may have."""
    if not 1 <= n * n <= MOST_CONTRIBUTIONS:
        raise PlanError(f"{plural(n, 'rank')}; expected 1..{isqrt(MOST_CONTRIBUTIONS)}")
    most = MOST_CONTRIBUTIONS // n**2
    if not 1 <= chunks <= most:
        raise PlanError(f"{plural(chunks, 'chunk')} of {plural(n, 'rank')}; expected 1..{most}, which may be long: "
                        "each is moved in pieces")  # fmt: skip


def wrong_result(
    where: str, rank: int, chunk: int, got: frozenset[Contribution], want: tuple[Contribution, ...], more: str = ""
) -> PlanError:
    """What to raise for a chunk of an output that was written at ``where``, if that is known; ``more`` is a remedy."""
    return PlanError(f"{f'{where}: ' if where else ''}rank {rank}: chunk {chunk} of its output is "
                     f"{several(tuple(sorted(got)))}; wanted {several(want)}{more}")  # fmt: skip


def goal_of(collective: str, n: int, chunks: int, root: int = -1) -> Goal:
    """What a collective of ours gives and wants.

    Raises:
        PlanError: for what is no such collective, or sizes below 1.
    """
    if n < 1 or chunks < 1 or (root in range(n)) != (collective in ROOTED):
        raise PlanError(f"{collective} of {plural(n, 'rank')}, {plural(chunks, 'chunk')}, root {root}: expected a rank "
                        f"as root of {', '.join(sorted(ROOTED))} alone, and at least one of each")  # fmt: skip
    everyone, blocks = range(n), n if collective in BLOCKED else 1

    @cache  # every rank wants the same, or a part of it
    def everything(chunk: int) -> tuple[Contribution, ...]:
        return tuple((r, chunk) for r in everyone)

    def fold(chunk: int, ranks: range) -> tuple[Contribution, ...]:
        return everything(chunk)[ranks.start : ranks.stop]

    def wanted(rank: int) -> list[tuple[Contribution, ...]]:
        there = rank == root
        match collective:
            case "allreduce" | "reduce":
                return [fold(c, everyone) if collective == "allreduce" or there else () for c in range(chunks)]
            case "broadcast":
                return [() if there else ((root, c),) for c in range(chunks)]
            case "allgather" | "gather":
                full = collective == "allgather" or there
                return [((r, c),) if full else () for r in everyone for c in range(chunks)]
            case "scatter":
                return [((root, rank * chunks + c),) for c in range(chunks)]
            case "reduce_scatter":
                return [fold(rank * chunks + c, everyone) for c in range(chunks)]
            case "alltoall":
                return [((r, rank * chunks + c),) for r in everyone for c in range(chunks)]
            case "scan" | "exscan":
                return [fold(c, range(rank + (collective == "scan"))) for c in range(chunks)]
        raise PlanError(f"{collective}: no collective that an algorithm can be written for")

    def given(rank: int) -> int:
        if collective in ("broadcast", "scatter") and rank != root:
            return 0
        return chunks if collective in ("allgather", "gather") else blocks * chunks

    return Goal(
        collective, n, chunks, root, tuple(given(r) for r in everyone), tuple(tuple(wanted(r)) for r in everyone)
    )


def named(contribution: Contribution) -> str:
    rank, chunk = contribution
    return f"rank {rank}'s chunk {chunk}"


def several(contributions: tuple[Contribution, ...], most: int = 4) -> str:
    """A sum of contributions in an error message, which names the first ones alone."""
    if not contributions:
        return "nothing"
    text = " + ".join(map(named, contributions[:most]))
    more = len(contributions) - most
    return f"{text} + {more} more" if more > 0 else text


def custom_call(goal: Goal, name: str, elements: int, dtype: str, op: str) -> Call:
    """The call of a custom collective whose chunks have so many elements; ``op`` counts if it folds."""
    counts = elements, *goal.given, *(len(outputs) for outputs in goal.wanted)
    return Call("custom", goal.n, counts, dtype, op if goal.reduces else "", -1, name)
