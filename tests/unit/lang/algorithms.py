"""Every algorithm of the library, for the numbers of ranks that it is for, and others by chance; shared by tests."""

import random
from collections.abc import Iterator, Sequence

from blinkmpi import lang
from blinkmpi.lang import Algorithm, chunk, library
from blinkmpi.lang.written import Written
from blinkmpi.trees.tree import ROOTED, Collective

NODES = (library.two_step, library.hierarchical, library.islands)  # take ranks in a node, too
WRITTEN = tuple(value for value in vars(library).values() if isinstance(value, Written))


def of_ranks(n: int, *, inner: bool = False) -> Iterator[Algorithm]:
    """All that there are for ``n`` ranks; on nodes of every size, or but for those of one rank and of all (inner)."""
    for written in WRITTEN:
        if written in NODES:
            yield from (written(n, k) for k in range(1 + inner, n + 1 - inner) if n % k == 0)
        elif written.ranks is None or n in written.ranks:
            yield written(n)


COLLECTIVES: tuple[Collective, ...] = (
    "allreduce", "reduce", "broadcast", "allgather", "gather", "scatter", "reduce_scatter", "alltoall", "scan", "exscan"
)  # fmt: skip


def by_chance(collective: Collective, n: int, chunks: int, seed: int, *, at: int = -1) -> Algorithm:
    """An algorithm by chance: every result is folded somewhere, in any order, and goes there by other ranks."""
    rng = random.Random(seed)
    root = at if at >= 0 else rng.randrange(n)

    @lang.algorithm(collective, chunks=chunks, root=root)
    def drawn(_: int) -> None:
        _to_results(lang.goal_of(collective, n, chunks, root if collective in ROOTED else -1).wanted, rng)

    return drawn(n)


def custom_by_chance(n: int, seed: int) -> Algorithm:
    """An algorithm by chance for a collective by chance: results are folds of any chunks, often of those behind the
    chunks of the result before."""
    rng = random.Random(seed)
    given = [rng.randrange(5) for _ in range(n)]
    given[rng.randrange(n)] = 4
    chunks = [(rank, i) for rank, count in enumerate(given) for i in range(count)]
    wanted: list[list[tuple[tuple[int, int], ...]]] = [[] for _ in range(n)]
    for outputs in wanted:
        while rng.random() < 0.7:
            want = tuple(sorted(rng.sample(chunks, min(len(chunks), rng.choice([0, 1, 1, 1, 2, 2, 3, 6])))))
            for _ in range(rng.choice([1, 1, 2, 3])):
                outputs.append(want)
                if rng.random() < 0.7:
                    want = tuple((rank, i + 1) for rank, i in want)
                if not {*want} <= {*chunks}:
                    break
    goal = lang.custom(given=lambda _, rank: given[rank], wanted=lambda _, rank: wanted[rank])
    return lang.algorithm(goal, chunks=1, name="drawn")(lambda _: _to_results(wanted, rng))(n)


def _to_results(wanted: Sequence[Sequence[tuple[tuple[int, int], ...]]], rng: random.Random) -> None:
    """What an algorithm by chance does, for what each rank wants in each chunk of its output."""
    n = len(wanted)
    known: dict[tuple[tuple[int, int], ...], list[lang.Ref]] = {}
    places = [(r, i, want) for r, wants in enumerate(wanted) for i, want in enumerate(wants) if want]
    for r, i, want in rng.sample(places, len(places)):
        if want in known and rng.random() < 0.5:
            at = rng.choice(known[want])
        else:
            order = rng.sample(want, len(want))
            at = chunk(order[0][0], "input", order[0][1])
            at = at.copy(rng.randrange(n) if rng.random() < 0.3 else at.rank, "work")
            for source, part in order[1:]:
                other = chunk(source, "input", part)
                if rng.random() < 0.2:
                    other = other.copy(rng.randrange(n), "on the way")
                if rng.random() < 0.5:
                    at = other.copy(other.rank, "work").reduce(at)
                else:
                    at.reduce(other)
        for _hop in range(rng.choice([0, 0, 1, 2])):
            at = at.copy(rng.randrange(n), "on the way")
        known.setdefault(want, []).append(at)
        at.copy(r, "output", i)
