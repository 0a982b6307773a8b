"""Methods ``columns`` and ``pairs``: column generation, a linear program over trees priced by cheapest arborescences.

The edges of a tree are the cheapest paths through switches, so no switch is split, links may be unequal both ways, and
switches may be wired to switches. Only the basis comes from the solver's floats: weights and prices are solved again in
integers (:mod:`.basis`), and the prices become the certificate where cuts are not tight (:mod:`~..bounds.prices`).

``pairs`` is for an AllReduce on links of unequal directions: its columns are a tree to a root and another one from it.
"""

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..bounds.certify import best_of_prices
from ..bounds.prices import CheapestPaths, cost_of, trees_at
from ..graph.arborescence import cheapest_arborescence
from ..graph.fabric import Arc, Ints, Kept, Path
from ..graph.loads import link_loads
from ..graph.logical import SpanningTree, ordered, recentre
from ..problem import Problem, Solution
from ..tree import AGAINST, ALONG, PER_RANK, Certificate, Edge, Tree
from .basis import Floats, exact_basis, exact_prices, lowered

MOST_RANKS = 64
ROUNDS = 300
WARM_ROUNDS = 6
MOST_COLUMNS = 6  # for each row of the program
EPSILON = 1e-9
VIOLATION = 1e-9  # of the bound
GRAIN = 10**6
HUGE = 1e100  # a price that the trees of a few rounds may not exceed
INEXACT = "the linear program has no exact solution within the links"


class Column(NamedTuple):
    """A tree: its paths in order, how often it uses each arc (by number), and the paths of another tree to its root."""

    root: int
    paths: tuple[Path, ...]
    arcs: tuple[int, ...]
    up: tuple[Path, ...] = ()


class MasterProblem:
    """The trees found so far and the linear program over them.

    Args:
        pairs: for an AllReduce: one tree up and another one down, with the same root.
        depth: trees of at most so many hops; 0: of any.
    """

    def __init__(self, problem: Problem, *, pairs: bool = False, depth: int = 0) -> None:
        self.problem, self.pairs, self.depth = problem, pairs, depth
        self.f = problem.fabric if pairs else problem.oriented
        self.both = problem.collective in ALONG and problem.collective in AGAINST
        self.per_rank = problem.collective in PER_RANK
        self.number = {arc: i for i, arc in enumerate(self.f.arcs)}
        self.capacity = np.array([c // self.f.unit for c in self.f.arcs.values()], np.int64)
        self.roots = list(range(problem.n)) if self.per_rank else [0 if self.both else problem.root]
        self.columns: list[Column] = []
        self._known: set[Column] = set()

    def price(self, y: Floats) -> tuple[int, float]:
        """Add the cheapest tree of every root; return how many were new, and the cost of all of them."""
        metric, new, total = CheapestPaths(self.f, y, both_ways=self.both and not self.pairs), 0, 0.0
        if self.pairs:
            column, total = self._pair(metric)
            return self._add(column), total
        tree = trees_at(metric.cost, self.depth)
        if self.both and self.depth:  # the cheapest tree may have any root
            trees = {root: tree(root) for root in range(self.problem.n)}
            costs = {root: cost_of(metric.cost, parent, root) for root, parent in trees.items()}
            best = min(costs, key=costs.__getitem__)
            return self._add(self._column(metric, best, trees[best])), costs[best]
        for root in self.roots:
            parent = tree(root)
            total += cost_of(metric.cost, parent, root)
            new += self._add(self._column(metric, root, parent))
        return new, total

    def _column(self, metric: CheapestPaths, root: int, parent: list[int]) -> Column:
        hops = ordered(root, parent)
        paths = {(u, v): metric.path(u, v) for u, v in hops}
        if self.both:
            paths |= {(v, u): path[::-1] for (u, v), path in paths.items()}
            root, hops = recentre(SpanningTree(root, hops))
        used: list[int] = []
        for hop in hops:
            used += [self.number[arc] for arc in pairwise(paths[hop])]
            if self.both:
                used += [self.number[arc] for arc in pairwise(paths[hop][::-1])]
        return Column(root, tuple(paths[hop] for hop in hops), tuple(sorted(used)))

    def _pair(self, metric: CheapestPaths) -> tuple[Column, float]:
        """The cheapest pair of a tree up and a tree down with the same root."""
        best: tuple[float, int, list[int], list[int]] | None = None
        towards = np.ascontiguousarray(metric.cost.T)
        for root in range(self.problem.n):
            if best is not None and self.problem.deadline.late():
                break
            down, up = cheapest_arborescence(metric.cost, root), cheapest_arborescence(towards, root)
            total = cost_of(metric.cost, down, root) + cost_of(towards, up, root)
            if best is None or total < best[0]:
                best = total, root, down, up
        assert best is not None
        total, root, down, up = best
        paths = tuple(metric.path(u, v) for u, v in ordered(root, down))
        rising = tuple(metric.path(v, u) for u, v in reversed(ordered(root, up)))
        used = sorted(self.number[arc] for path in (*paths, *rising) for arc in pairwise(path))
        return Column(root, paths, tuple(used), rising), total

    def _add(self, column: Column) -> int:
        if column in self._known:
            return 0
        self._known.add(column)
        self.columns.append(column)
        return 1

    def forget(self, y: Floats, duals: Floats) -> None:
        """Drop trees whose reduced cost is high, so that the program stays small."""
        most = MOST_COLUMNS * (len(self.capacity) + len(self.roots))
        if len(self.columns) <= most:
            return
        at = {r: i for i, r in enumerate(self.roots)}
        each = [float(duals[at[c.root] if self.per_rank else 0] or 1) for c in self.columns]
        cost = [float(y[list(c.arcs)].sum()) / value for c, value in zip(self.columns, each, strict=True)]
        kept = sorted(range(len(cost)), key=lambda j: (cost[j], -j))[: most * 2 // 3]
        self.columns = [self.columns[j] for j in sorted(kept)]
        self._known = set(self.columns)

    def matrix(self, columns: Sequence[Column]) -> Ints:
        """How often each column uses each arc."""
        uses = np.zeros((len(self.f.arcs), len(columns)), np.int64)
        for j, column in enumerate(columns):
            np.add.at(uses[:, j], list(column.arcs), 1)
        return uses

    def owners(self, columns: Sequence[Column]) -> Ints:
        """Which of the roots each column belongs to, one row a root."""
        at = {r: i for i, r in enumerate(self.roots)}
        rows = np.zeros((len(self.roots), len(columns)), np.int64)
        for j, column in enumerate(columns):
            rows[at[column.root] if self.per_rank else 0, j] = 1
        return rows

    def solve(self) -> tuple[Floats, Floats, Floats]:
        """Solve the program in floats: weights of the columns and the objective, dual prices of arcs and of roots.

        The objective is the weight of every root's trees: one root's, or the same for all.
        """
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix, hstack, vstack

        uses = csr_matrix(self.matrix(self.columns).astype(float))
        owners = csr_matrix(self.owners(self.columns).astype(float))
        k = len(self.roots)
        top = hstack([uses, csr_matrix((len(self.capacity), 1))])
        rows: Any = vstack([top, hstack([-owners, csr_matrix(np.ones((k, 1)))])], format="csr")
        right: Floats = np.concatenate([self.capacity.astype(float), np.zeros(k)])
        objective = np.zeros(len(self.columns) + 1, np.float64)
        objective[-1] = -1
        found = linprog(objective, A_ub=rows, b_ub=right, method="highs")
        marginal = -np.asarray(found.ineqlin.marginals)
        return np.asarray(found.x), marginal[: len(self.capacity)], marginal[len(self.capacity) :]


_PAIRS: Kept[None, tuple[MasterProblem, Floats, Floats]] = Kept()


def fits(problem: Problem) -> bool:
    """Collectives of spanning trees, up to the size that linear programs solve in seconds."""
    return 1 < problem.n <= MOST_RANKS and not problem.by_paths


def fits_pairs(problem: Problem) -> bool:
    """An AllReduce on links of unequal directions, up to the same size; on any where trees there do not lead back."""
    sized = fits(problem) or problem.pairs_only  # which no other method plans
    return problem.collective == "allreduce" and sized and not problem.fabric.even


def plan_pairs(problem: Problem) -> Solution | str:
    """The best packing of pairs of trees, and the bound of AllReduce with it."""
    master, weights, y = _pairs(problem)
    trees = _weighted(master, weights, y)
    if not trees:
        return INEXACT
    return Solution(trees, sum((t.weight for t in trees), Fraction(0)))


def _pairs(problem: Problem) -> tuple[MasterProblem, Floats, Floats]:
    """The linear program over pairs of trees, solved; its prices are taken as the bound."""
    memo = _PAIRS.of(problem.fabric)
    if None in memo:
        return memo[None]
    found = _solved(MasterProblem(problem, pairs=True))
    _tighten(*found)
    if not problem.deadline.late():
        memo[None] = found
    return found


def plan(problem: Problem) -> Solution | str:
    """The best packing of the linear program, exact where its basis can be solved again in integers."""
    master, weights, y = _solved(MasterProblem(problem))
    trees = _weighted(master, weights, y)
    if not trees:
        return INEXACT
    rate = sum((t.weight for t in trees), Fraction(0))
    _tighten(master, weights, y)
    if master.both and not problem.met(rate) and not problem.deadline.late():
        _pairs(problem)
    return Solution(trees, rate)


def plan_shallow(problem: Problem, depth: int) -> tuple[Solution, Certificate | None] | None:
    """The best packing of trees of at most so many hops, and the bound of such trees; None if none is found in time.

    Some tree must be that shallow, and the ranks few enough for :func:`.can_search`. An AllReduce's trees are used both
    ways; where links differ in their directions, the bound, which is for pairs of trees, may be higher.
    """
    master, weights, y = _solved(MasterProblem(problem, depth=depth))
    trees = _weighted(master, weights, y)
    if not trees:
        return None
    rate = sum((t.weight for t in trees), Fraction(0))
    tries: Iterable[dict[Arc, int | Fraction]] = _exact_prices(master, weights, y)
    f = problem.fabric
    if master.both and f.even:  # both directions of a link are one resource
        tries = ({(u, v): y.get((u, v), 0) + y.get((v, u), 0) for u, v in f.arcs} for y in tries)
    proof = best_of_prices(f, problem.collective, problem.root, tries, rate, depth)
    return Solution(trees, rate, cut=problem.deadline.late()), proof


def _tighten(master: MasterProblem, weights: Floats, y: Floats) -> None:
    """Use the bound of the prices."""
    problem = master.problem
    rate = Fraction(float(weights[-1])) * master.f.unit * len(master.roots)
    for prices in _exact_prices(master, weights, y):
        problem.tighten_by(prices)
        if problem.bound <= rate * (1 + Fraction(VIOLATION)):
            break


def _exact_prices(master: MasterProblem, weights: Floats, y: Floats) -> Iterator[dict[Arc, int | Fraction]]:
    """Prices of links that bound the rate, first those that the equations of the trees in use make exact."""
    problem, arcs = master.problem, list(master.f.arcs)
    columns = [master.columns[j] for j in np.flatnonzero(weights[:-1] > EPSILON * weights[-1])]
    paid = np.flatnonzero(y > EPSILON * y.max())
    if not len(paid):
        return
    owners = master.owners(columns)
    equations = np.vstack([master.matrix(columns)[paid], -owners]).T
    norm = np.repeat([0, 1], [len(paid), len(owners)])
    turned = problem.collective in AGAINST and not master.both
    priced = [arcs[i][::-1] if turned else arcs[i] for i in paid.tolist()]
    for prices in exact_prices(equations, norm, y[paid], late=problem.deadline.late()):
        yield dict(zip(priced, prices, strict=False))


def _solved(master: MasterProblem) -> tuple[MasterProblem, Floats, Floats]:
    """Solve the program to its optimum; returns weights and prices."""
    y = 1.0 / master.capacity
    for _ in range(WARM_ROUNDS):  # multiplicative weights give a pool to begin with
        if master.columns and master.problem.deadline.late():
            break
        before = len(master.columns)
        master.price(y)
        for column in master.columns[before:]:
            arcs = list(column.arcs)
            np.multiply.at(y, arcs, 1 + 0.5 * master.capacity.min() / master.capacity[arcs])
            if y.max() > HUGE:  # only ratios count
                y /= y.max()
    weights, y, _ = _converge(master, y)
    return master, weights, y


def _converge(master: MasterProblem, best: Floats) -> tuple[Floats, Floats, Floats]:
    """Alternate solving and pricing until the bound of the prices is met.

    Trees are priced half-way between the program's prices and the best seen so far (Wentges 1997), which keeps the
    prices from swinging between corners.
    """
    bound, centre = np.inf, best
    found = master.solve()
    for _ in range(ROUNDS):
        weights, y, _ = found
        y, new = np.maximum(y, 0.0), 0
        for point in ((y + centre) / 2, y):
            fresh, cost = master.price(point)
            new += fresh
            if cost > 0 and float(master.capacity @ point) / cost < bound:
                bound, centre = float(master.capacity @ point) / cost, point / cost
            if new:
                break
        if not new or weights[-1] >= bound * (1 - VIOLATION) or master.problem.deadline.late():
            break
        master.forget(y, found[2])
        found = master.solve()
    return found


def _weighted(master: MasterProblem, weights: Floats, y: Floats) -> tuple[Tree, ...]:
    """Trees with the weights of the basis, solved exactly; rounded down a little where it has no such solution."""
    support = np.flatnonzero(weights[:-1] > EPSILON * weights[-1])
    columns = [master.columns[j] for j in support]
    owners, exact = master.owners(columns), None
    if not master.problem.deadline.late():
        roots = len(owners)  # each with as much as the rate, or more
        links = np.column_stack([master.matrix(columns), np.zeros(len(master.capacity), np.int64)])
        rows = np.vstack([links, np.column_stack([-owners, np.ones(roots, np.int64)])])
        right = np.concatenate([master.capacity, np.zeros(roots, np.int64)])
        exact = exact_basis(rows, right, np.append(weights[support], weights[-1]), prices=y)
    values = lowered(weights[support], GRAIN) if exact is None else exact[:-1]
    return _trees(master, columns, _even(owners, values))


def _even(owners: Ints, weights: Sequence[Fraction]) -> list[Fraction]:
    """Lower the weights of roots that have more than another, so that all roots have the same."""
    least = min(sum((weights[j] for j in np.flatnonzero(row).tolist()), Fraction(0)) for row in owners)
    result = [Fraction(0)] * len(weights)
    for row in owners:
        rest = least
        for j in np.flatnonzero(row).tolist():
            result[j] = min(rest, weights[j])
            rest -= result[j]
    return result


def _trees(master: MasterProblem, columns: Sequence[Column], weights: Sequence[Fraction]) -> tuple[Tree, ...]:
    trees = [
        Tree(c.root, _edges(c.paths), w * master.f.unit, _edges(c.up))
        for c, w in zip(columns, weights, strict=True)
        if w
    ]
    kind = "allreduce" if master.pairs else "broadcast"
    assert all(load <= master.f.arcs[arc] for arc, load in link_loads(kind, trees).items())
    return tuple(sorted(trees, key=lambda t: (t.root, -t.weight, [e.path for e in (*t.edges, *t.up)])))


def _edges(paths: Sequence[Path]) -> tuple[Edge, ...]:
    return tuple(Edge(path[0], path[-1], path) for path in paths)
