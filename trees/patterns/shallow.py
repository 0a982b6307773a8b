"""Method ``shallow``: the best trees of at most so many hops, for vectors whose time is mostly latency.

Where a graph has few such trees, a linear program takes the best of all; elsewhere each root has one tree of least
depth. Blink's packings look at rates alone; section 3.2.1 of the paper gives up rate for fewer trees, this for depth.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice

from msgspec.structs import replace

from ...util.text import plural
from ..answer import SHALLOW
from ..exact.enumeration import all_arborescences
from ..exact.weights import best_weights, placed, reweighted
from ..graph.loads import link_loads, scaled
from ..graph.logical import Capacities, SpanningTree
from ..problem import BACKWARDS, Problem, Solution
from ..tree import PER_RANK, Tree
from . import chains

MOST_TREES, LISTED_RANKS = 4_000, 12  # that the linear program chooses from; beyond so many ranks they are not listed
MOST_RANKS = 32  # with a tree from each rank; beyond, plans would grow by more than they gain
LOSS = Fraction(1, 20)  # of the rate, for fewer trees


def fits(problem: Problem) -> bool:
    """Collectives of trees."""
    return not problem.by_paths and (problem.collective not in PER_RANK or problem.n <= MOST_RANKS)


def plan(problem: Problem) -> Solution | str:
    """Trees of at most ``max_depth`` hops, by default the least depth that there is."""
    f, collective = problem.fabric, problem.collective
    alike = BACKWARDS.get(collective, collective) if f.even else collective
    key = SHALLOW, alike, problem.root, problem.options.max_depth
    if key not in f.memo:
        f.memo[key] = _plan(problem)
    found: Solution | str = f.memo[key]
    return found


def _plan(problem: Problem) -> Solution | str:
    star = _least_trees(problem)
    least = max(tree.depth for tree in star)
    depth = problem.options.max_depth or least
    if depth < least:
        return f"no trees of at most {depth} hops reach all ranks"
    shapes = _all_trees(problem, depth)
    if shapes and problem.collective not in PER_RANK:
        caps = problem.capacities
        weights = _fewer(caps, shapes, best_weights(caps, shapes))
        trees, rate = placed(caps, shapes, weights)
        why = f"the best {plural(len(trees), 'tree')} of at most {plural(depth, 'hop')}"
        return Solution(trees, rate, why, scheme=_scheme_of(depth))
    if depth > least:
        return f"too many trees of at most {depth} hops to choose from"
    trees, rate = scaled(star, link_loads(problem.collective, star), problem.fabric.arcs)
    return Solution(trees, rate, f"trees of {least} hops, the least depth", scheme=_scheme_of(least))


def _scheme_of(depth: int) -> str:
    """The name of the scheme of trees of at most this many hops."""
    return f"{SHALLOW}{depth}"


def _least_trees(problem: Problem) -> list[Tree]:
    """One tree of least depth for each root, of equal weights; for an AllReduce from the best root alone."""
    f, n = problem.oriented, problem.n
    if problem.collective in PER_RANK:
        return [replace(chains.shallow(f, root), weight=Fraction(1, n)) for root in range(n)]
    roots = range(n) if problem.collective == "allreduce" else (problem.root,)
    return [min((chains.shallow(f, root) for root in roots), key=lambda tree: (tree.depth, tree.root))]


def _all_trees(problem: Problem, depth: int) -> list[SpanningTree]:
    """All trees that a packing may use of at most this depth, or none where there are too many of them."""
    if problem.logical is None or problem.n > LISTED_RANKS:
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
