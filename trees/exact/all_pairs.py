"""Method ``paths``: an alltoall as a maximum concurrent flow between all ranks, by a linear program over paths.

Ranks and switches pass bytes on. A few rounds of multiplicative weights draw the first paths; then the prices of the
program ask for cheaper ones until there are none, and prove the bound. A second program takes short paths on fast links
at that rate. Where symmetries move a rank onto others, its paths serve those too, and the links that they move onto one
another are one row. Only the basis comes from the solver's floats: shares and prices are solved again in integers
(:mod:`.basis`).
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np

from ..bounds.certify import best_of_prices
from ..bounds.prices import CheapestPaths
from ..graph.automorphism import moved_by
from ..graph.fabric import Arc, Path
from ..graph.loads import link_loads, scaled
from ..graph.logical import hops_of
from ..graph.symmetry import none, symmetry
from ..problem import Problem, Solution
from ..tree import AGAINST, ROOTED, Certificate, Tree
from .basis import Floats, exact_basis, exact_prices

MOST_PAIRS = 64 * 63  # whose linear program takes seconds; symmetries leave fewer
FEW_PAIRS = 1024  # the second program is solved for so many
MANY_ROWS = 1000  # from here on, interior points are faster than the simplex
DRAWS = 5
STEP = 0.7  # the logarithm by which the fullest links' price grows from one draw to the next
ROUNDS = 100
EPSILON = 1e-9
TINY = 1e-6  # a smaller part of the largest weight is none; as a part of the mean price, it is what work costs
MOST_EXACT = 400  # equations that are solved in integers
GRAIN = 10**9  # of shares that are rounded


class Optimum(NamedTuple):
    """A solved program: weights of the paths, the rate of every pair, prices of the classes, duals of the pairs."""

    weights: Floats
    rate: float
    prices: Floats
    duals: Floats


class Shares(NamedTuple):
    """The paths in use: the heaviest of every pair, further ones with the number of their pair, and their shares."""

    first: list[Path]
    more: list[Path]
    pair: list[int]
    amounts: list[float]  # of ``more``: parts of what the pair exchanges


class PathProgram:
    """The paths found so far, from the ranks that stand for all or from a root, and the linear program over them.

    Args:
        depth: paths of at most so many hops from rank to rank; 0: of any.
    """

    def __init__(self, problem: Problem, depth: int) -> None:
        self.f, self.depth, self.deadline, f = problem.oriented, depth, problem.deadline, problem.oriented
        rooted, self.against = problem.collective in ROOTED, problem.collective in AGAINST
        self.symmetry = none(f, problem.root) if rooted else symmetry(f)
        ends = ((s, t) for s in self.symmetry.sources for t in range(f.n) if t != s)
        self.pairs = {pair: i for i, pair in enumerate(ends)}
        capacity = {k: f.arcs[arc] // f.unit for arc, k in self.symmetry.class_of.items()}
        self.capacity = np.array([capacity[k] for k in range(len(capacity))], np.int64)
        fastest = max(f.arcs.values())
        self.work = {(u, v): fastest / c + (v < f.n) for (u, v), c in f.arcs.items()}  # 1 for the step at a rank
        self.paths: dict[Path, int] = {}

    def cheapest(self, prices: Floats) -> list[Path]:
        """The cheapest path of every pair, of equally cheap ones that of least work."""
        by_link = np.array([(prices * self.symmetry.times)[self.symmetry.class_of[arc]] for arc in self.f.arcs])
        work = np.array([self.work[arc] for arc in self.f.arcs])
        metric = CheapestPaths(self.f, by_link + TINY * by_link.mean() * work / work.max(), relay=True,
                               depth=self.depth)  # fmt: skip
        return [metric.path(s, t) for s, t in self.pairs]

    def add(self, paths: Sequence[Path]) -> int:
        """Take paths into the program; return how many are new."""
        before = len(self.paths)
        for path in paths:
            self.paths.setdefault(path, len(self.paths))
        return len(self.paths) - before

    def rows(self, paths: Sequence[Path]) -> Any:
        """What a path and its images put on one link of each class, as a sparse matrix."""
        from scipy.sparse import csr_matrix

        used = [self.symmetry.class_of[arc] for path in paths for arc in pairwise(path)]
        columns = np.repeat(np.arange(len(paths)), [len(path) - 1 for path in paths])
        return csr_matrix((self.symmetry.times[used], (used, columns)), shape=(len(self.capacity), len(paths)))

    def draw(self) -> tuple[Floats, Floats]:
        """Find paths at prices that follow their loads: how often each was found, and the last prices."""
        prices = 1.0 / self.capacity
        found: list[Path] = []
        for _ in range(DRAWS):
            paths = self.cheapest(prices)
            found += paths
            self.add(paths)
            if self.deadline.late():
                break
            load = self.rows(paths).sum(axis=1).A1 / self.capacity
            prices = prices * np.exp(STEP * load / load.max())
        times = np.bincount([self.paths[path] for path in found], minlength=len(self.paths))
        return times.astype(float), prices

    def solve(self, *, rate: float = 0.0) -> Optimum | None:
        """The best rate of these paths, or the least work at a given ``rate``; None where time does not allow."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix, hstack

        end = self.deadline.left_on_the_clock()
        count, paths = len(self.pairs), list(self.paths)
        loads = hstack([self.rows(paths), csr_matrix((len(self.capacity), 1))], format="csr")
        own = [self.pairs[path[0], path[-1]] for path in paths]
        sums = csr_matrix((np.ones(len(paths)), (own, range(len(paths)))), shape=(count, len(paths)))
        objective = np.array([self._work(path) if rate else 0.0 for path in paths] + [0.0 if rate else -1.0])
        found = linprog(
            objective, A_ub=loads, b_ub=self.capacity.astype(float),
            A_eq=hstack([sums, csr_matrix(-np.ones((count, 1)))], format="csr"), b_eq=np.zeros(count),
            bounds=[(0, None)] * len(paths) + [(rate, None)],
            method="highs-ipm" if count + len(self.capacity) > MANY_ROWS else "highs-ds",
            options={} if end == inf else {"time_limit": max(end, EPSILON)},  # by its own clock
        )  # fmt: skip
        if found.status != 0:
            return None
        x: Floats = np.asarray(found.x)
        prices, duals = -np.asarray(found.ineqlin.marginals), np.asarray(found.eqlin.marginals)
        return Optimum(x[:-1], float(x[-1]), prices, duals)

    def _work(self, path: Path) -> float:
        """How long a path keeps its links busy, and a step for each rank that it comes to."""
        return sum(self.work[arc] for arc in pairwise(path))


def fits(problem: Problem) -> bool:
    """An alltoall, up to the size that a linear program solves in seconds."""
    if problem.collective != "alltoall" or problem.n < 2:
        return False
    return len(symmetry(problem.fabric).sources) * (problem.n - 1) <= MOST_PAIRS


def plan(problem: Problem) -> Solution:
    """The best paths of the linear program, exact where its basis can be solved again in integers."""
    found, tries = _solved(problem, 0)
    for prices in tries:
        problem.tighten_by(prices)
    return found


def plan_shallow(problem: Problem, depth: int) -> tuple[Solution, Certificate | None]:
    """The best paths of at most so many hops from rank to rank, and the bound of such paths.

    For Gather and Scatter, too. So many hops must join every pair.
    """
    found, tries = _solved(problem, depth)
    proof = best_of_prices(problem.fabric, problem.collective, problem.root, tries, found.rate, depth)
    if proof is not None and problem.collective == "alltoall":  # these prices may bound all paths as well
        problem.tighten_by({(u, v): price for u, v, price in proof.parts})
    return found, proof


def _solved(problem: Problem, depth: int) -> tuple[Solution, Iterator[dict[Arc, int | Fraction]]]:
    """The paths of the linear program, and prices that bound their rate."""
    master = PathProgram(problem, depth)
    weights, prices = master.draw()
    best, cut = None, False
    for _ in range(ROUNDS):
        found = None if problem.deadline.late() else master.solve()
        if found is None:
            cut = True
            break
        best, weights, prices = found, found.weights, found.prices
        paths = master.cheapest(prices)
        cost = master.rows(paths).T @ prices
        missing = [path for path, c, most in zip(paths, cost, found.duals, strict=True) if c < most - EPSILON]
        if not master.add(missing):
            break
    if best is not None and len(master.pairs) <= FEW_PAIRS and not problem.deadline.late():
        shortest = master.solve(rate=best.rate * (1 - EPSILON))
        weights = weights if shortest is None else shortest.weights
    shares = _shares(master, weights)
    return Solution(*_packed(master, shares, _amounts(master, shares)), cut=cut), _exact_prices(master, shares, prices)


def _shares(master: PathProgram, weights: Floats) -> Shares:
    ways: list[list[tuple[float, Path]]] = [[] for _ in master.pairs]
    for path, weight in zip(master.paths, weights.tolist(), strict=False):  # the last paths may have come too late
        if weight > TINY * weights.max():
            ways[master.pairs[path[0], path[-1]]].append((weight, path))
    for some in ways:
        some.sort(key=lambda way: (-way[0], len(way[1]), way[1]))
    more = [(i, w / sum(weight for weight, _ in some), path) for i, some in enumerate(ways) for w, path in some[1:]]
    first = [some[0][1] for some in ways]
    return Shares(first, [path for _, _, path in more], [i for i, _, _ in more], [amount for _, amount, _ in more])


def _amounts(master: PathProgram, shares: Shares) -> list[Fraction]:
    """The shares of further paths, exactly as the full links say, else rounded."""
    rounded = [Fraction(int(amount * GRAIN), GRAIN) for amount in shares.amounts]
    if master.deadline.late() or not rounded:
        return rounded
    first, more = master.rows(shares.first), master.rows(shares.more)
    whole = first.sum(axis=1).A1  # with the shares below, what a rate of 1 puts on the links
    change = more.toarray() - first[:, shares.pair].toarray()
    # change x + whole <= capacity / rate: the unknowns are x and 1 / rate
    amounts = np.array(shares.amounts)
    unknown = np.append(amounts, ((whole + change @ amounts) / master.capacity).max())
    exact = exact_basis(np.column_stack([change, -master.capacity]).astype(np.int64), -whole.astype(np.int64), unknown,
                        most=MOST_EXACT)  # fmt: skip
    return rounded if exact is None or max(_sums(shares, exact)) > 1 else exact[:-1]


def _sums(shares: Shares, amounts: Sequence[Fraction]) -> list[Fraction]:
    """What the further paths of each pair carry together."""
    sums = [Fraction(0)] * len(shares.first)
    for pair, amount in zip(shares.pair, amounts, strict=False):
        sums[pair] += amount
    return sums


def _packed(master: PathProgram, shares: Shares, amounts: Sequence[Fraction]) -> tuple[tuple[Tree, ...], Fraction]:
    """The paths, and where the symmetries move them, at the best rate that the links carry."""
    n = master.f.n
    rest = [1 - total for total in _sums(shares, amounts)]
    used = [*zip(shares.first, rest, strict=True), *zip(shares.more, amounts, strict=True)]
    one = [Tree(path[0], hops_of(path, n), share / n) for path, share in used if share]
    trees = [tree for image in master.symmetry.images for tree in moved_by(one, image)]
    trees.sort(key=lambda t: (t.root, t.edges[-1].dst, -t.weight, [e.path for e in t.edges]))
    return scaled(trees, link_loads("alltoall", trees), master.f.arcs)


def _exact_prices(master: PathProgram, shares: Shares, prices: Floats) -> Iterator[dict[Arc, int | Fraction]]:
    """Prices of links: exact, as all paths of a pair cost the same, then rounded."""
    paid = np.flatnonzero(prices > EPSILON * prices.max())
    late = master.deadline.late() or len(shares.more) > MOST_EXACT
    change = np.zeros((0, len(paid)), np.int64)
    if not late:
        further, first = master.rows(shares.more), master.rows(shares.first)[:, shares.pair]
        change = np.unique((further - first).toarray()[paid].T.astype(np.int64), axis=0)
    for some in exact_prices(change, np.ones(len(paid), np.int64), prices[paid], late=late):
        by_class = {k: value * int(master.symmetry.times[k]) for k, value in zip(paid.tolist(), some, strict=True)}
        priced = ((arc, by_class[k]) for arc, k in master.symmetry.class_of.items() if k in by_class)
        yield {arc[::-1] if master.against else arc: value for arc, value in priced}
