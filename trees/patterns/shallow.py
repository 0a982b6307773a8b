"""Method ``shallow``: the best trees of at most so many hops, for vectors whose time is mostly latency.

Where a graph has few such trees for a collective from one root, or an AllReduce, a linear program takes the best of
all. For the others (with option ``quick`` for those with a tree or paths from each rank, without switches) those of
:mod:`~..exact.column_generation` and :mod:`~..exact.all_pairs` find by its price what is missing, on graphs where the
cheapest such tree can be found. Elsewhere each root has one tree of least depth. Blink's packings look at rates alone;
section 3.2.1 of the paper gives up rate for fewer trees, this for depth.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice

from msgspec.structs import replace

from ...util.text import plural
from ..answer import SHALLOW
from ..exact import all_pairs, column_generation
from ..exact.enumeration import all_arborescences
from ..exact.weights import best_weights, placed, reweighted
from ..graph.fabric import Kept
from ..graph.loads import link_loads, scaled
from ..graph.logical import Capacities, SpanningTree
from ..graph.shallow_arborescence import can_search
from ..problem import BACKWARDS, MANY_RANKS, OUT_OF_TIME, Problem, Solution
from ..tree import PER_RANK, ROOTED, Certificate, Tree
from . import chains
from .soonest import soonest

MOST_TREES, LISTED_RANKS = 4_000, 12  # that the linear program chooses from; beyond so many ranks they are not listed
MOST_RANKS = 32  # with a tree from each rank; beyond, plans would grow by more than they gain
MOST_SOON = 512  # ranks of a plan with the tree whose messages arrive soonest: finding it takes a second there
FROM_EACH = (*sorted(PER_RANK), "alltoall")
SPANNING = frozenset({"broadcast", "reduce"})
LOSS = Fraction(1, 20)  # of the rate, for fewer trees
_PLANNED: Kept[tuple[str, int, int | None, bool], Solution | str] = Kept()


def fits(problem: Problem) -> bool:
    """All collectives; to so many ranks where each has a tree of its own, or the trees are paths."""
    return problem.n <= MOST_RANKS or not (problem.by_paths or problem.collective in FROM_EACH)


def plan(problem: Problem) -> Solution | str:
    """Trees of at most ``max_depth`` hops, by default the least depth that there is."""
    f, collective = problem.fabric, problem.collective
    alike = BACKWARDS.get(collective, collective) if f.even and not problem.by_paths else collective
    key, known = (alike, problem.root, problem.options.max_depth, problem.options.quick), _PLANNED.of(f)
    found = known[key] if key in known else _plan(problem)
    if not problem.deadline.late():
        known[key] = found
    return found


def _plan(problem: Problem) -> Solution | str:
    if problem.options.quick and problem.n > MANY_RANKS:
        return _soonest(problem)
    least = least_depth(problem)
    depth = problem.options.max_depth or least
    if depth < least:
        return f"no trees of at most {depth} hops reach all ranks"
    shapes = _all_trees(problem, depth)
    if shapes:
        caps = problem.capacities
        weights = _fewer(caps, shapes, best_weights(caps, shapes))
        trees, rate = placed(caps, shapes, weights)
        why = f"the best {plural(len(trees), 'tree')} of at most {plural(depth, 'hop')}"
        return Solution(trees, rate, why, scheme=_scheme_of(depth))
    f = problem.fabric  # switches: the estimate by which plans choose is a fifth off for trees that share their links
    soon = problem.collective in FROM_EACH and problem.n <= LISTED_RANKS and len(f.vertices) == f.n
    priced = best(problem, depth) if soon or not problem.options.quick else None
    if priced is not None:
        return priced[0]
    if problem.by_paths or problem.collective == "alltoall":
        return "plans leave out paths of few hops" if problem.options.quick else OUT_OF_TIME
    if depth > least:
        return f"too many trees of at most {depth} hops to choose from"
    star = _least_trees(problem)
    trees, rate = scaled(star, link_loads(problem.collective, star), problem.fabric.arcs)
    return Solution(trees, rate, f"trees of {least} hops, the least depth", scheme=_scheme_of(least))


def _soonest(problem: Problem) -> Solution | str:
    """For plans of large machines, where the least depth may be one of a star, whose root has all to do."""
    if problem.options.max_depth is not None or problem.n > MOST_SOON:
        return f"plans have one such tree beyond {MANY_RANKS} ranks, and none beyond {MOST_SOON}"
    tree = soonest(problem.oriented, max(problem.root, 0))
    trees, rate = scaled([tree], link_loads(problem.collective, [tree]), problem.fabric.arcs)
    return Solution(trees, rate, "the tree whose messages arrive soonest", scheme=_scheme_of(tree.depth))


def best(problem: Problem, depth: int) -> tuple[Solution, Certificate | None] | None:
    """The packing of the linear program over all trees of at most ``depth`` hops, and a bound of such trees if one was
    found; some tree must be that shallow.

    None where there are too many of them to price, or no time is left.
    """
    by_paths = problem.by_paths or problem.collective == "alltoall"
    if problem.deadline.late() or not (by_paths or can_search(problem.n, depth)):
        return None
    priced = all_pairs.plan_shallow(problem, depth) if by_paths else column_generation.plan_shallow(problem, depth)
    if priced is None:
        return None
    found, proof = priced
    what = "paths" if by_paths else plural(len(found.trees), "tree")
    proved = ", which no such ones exceed" if proof is not None and proof.bound == found.rate else ""
    why = f"the best {what} found of at most {plural(depth, 'hop')}{proved}"
    return found._replace(why=why, scheme=_scheme_of(depth)), proof


def least_depth(problem: Problem) -> int:
    """Hops of the shallowest trees, or of the longest of the shortest paths."""
    return max(tree.depth for tree in _least_trees(problem))


def _scheme_of(depth: int) -> str:
    """The name of the scheme of trees of at most this many hops."""
    return f"{SHALLOW}{depth}"


def _least_trees(problem: Problem) -> list[Tree]:
    """One tree of least depth for each root, of equal weights; for an AllReduce from the best root alone."""
    f, n = problem.oriented, problem.n
    if problem.collective in FROM_EACH:
        return [replace(chains.shallow(f, root), weight=Fraction(1, n)) for root in range(n)]
    roots = range(n) if problem.collective == "allreduce" else (problem.root,)
    return [min((chains.shallow(f, root) for root in roots), key=lambda tree: (tree.depth, tree.root))]


def _all_trees(problem: Problem, depth: int) -> list[SpanningTree]:
    """All trees from one root, or of an AllReduce, of at most this depth; none where there are too many of them."""
    if problem.collective in (*FROM_EACH, *ROOTED - SPANNING) or problem.logical is None or problem.n > LISTED_RANKS:
        return []
    found = list(islice(_distinct(problem.capacities, depth), MOST_TREES + 1))
    return found if len(found) <= MOST_TREES else []


def _distinct(caps: Capacities, depth: int) -> Iterator[SpanningTree]:
    """Trees away from the root; for an AllReduce from every root, each undirected tree once."""
    arcs = list(caps.number)
    if caps.root >= 0:
        yield from all_arborescences(arcs, caps.n, caps.root, depth)
        return
    known: set[frozenset[frozenset[int]]] = set()
    for root in range(caps.n):
        for shape in all_arborescences(arcs, caps.n, root, depth):
            edges = frozenset(map(frozenset, shape.arcs))
            if edges not in known:
                known.add(edges)
                yield shape


def _fewer(caps: Capacities, shapes: Sequence[SpanningTree], best: dict[int, Fraction]) -> dict[int, Fraction]:
    """Without the lightest trees, as long as the rest can carry nearly as much."""
    rate = sum(best.values())
    while len(best) > 1:
        lightest = min(best, key=lambda i: (best[i], -i))
        fewer = reweighted(caps, shapes, [i for i in sorted(best) if i != lightest])
        if sum(fewer.values()) < (1 - LOSS) * rate:
            break
        best = fewer
    return best
