"""Packings on links: the table of methods, which of them may plan a problem, and in what order they are tried.

``METHODS`` says which module is which method, ``ORDER`` what the automatic choice tries first.
"""

from collections.abc import Callable
from fractions import Fraction

from .answer import TIERS, UNPACKED, checked, nothing, packing_of
from .baselines import few, ilp, mwu, rings
from .cluster import assembly, hierarchy
from .exact import all_pairs, arborescences_by_flow, column_generation, edmonds, symmetric
from .graph.automorphism import automorphism, moved_by
from .graph.fabric import Arc, Kept
from .patterns import chains, hybrid, shallow, stars
from .problem import BACKWARDS, MANY_RANKS, OUT_OF_TIME, Method, MethodOptions, Problem, Solution
from .tree import ROOTED, Packing


def _fits_onehop(problem: Problem) -> bool:
    return stars.fits(problem) or stars.fits_slow_links(problem)


def _fits_symmetric(problem: Problem) -> bool:
    return symmetric.fits(problem) or symmetric.fits_templates(problem)


def _fits_chain(problem: Problem) -> bool:
    """Many ranks, or all joined to all, or where no other quick method fits."""
    if problem.by_paths:
        return False
    if problem.n > stars.MANY_RANKS or len(problem.oriented.hops) == problem.n * (problem.n - 1):
        return True
    others = (METHODS[name] for name in AUTOMATIC if name != "chain")
    return not any(m.fits(problem) for m in others if not m.is_costly(problem))


# All methods for links: scheme, description, and the module that plans.
METHODS: dict[str, Method] = {
    TIERS: Method(TIERS, "boxes send to whole groups of boxes, tier by tier of the network",
                    hierarchy.fits, hierarchy.plan),
    "cluster": Method("cluster", "whole boxes exchange over their ports, trees inside each box do the rest",
                      assembly.fits, assembly.plan),
    "symmetric": Method("symmetric", "shallow templates, turned to every rank", _fits_symmetric, symmetric.plan),
    "exact": Method("trees", "trees grown to the capacity of the links", edmonds.fits, edmonds.plan, costly=9),
    "onehop": Method("onehop", "stars, as every rank reaches every other in one hop", _fits_onehop, stars.plan,
                     all_to_all=True),
    "chain": Method("chain", "chains in depth-first order, which cross a switch link at most once each way",
                    _fits_chain, chains.plan),
    "flows": Method("trees", "trees grown to the capacity of the links, a maximum flow for each edge",
                    arborescences_by_flow.fits, arborescences_by_flow.plan, costly=1),
    "columns": Method("columns", "a linear program over trees whose edges are cheapest paths",
                      column_generation.fits, column_generation.plan, costly=1),
    "pairs": Method("pairs", "a linear program over pairs of trees, one to a root and another from it",
                    column_generation.fits_pairs, column_generation.plan_pairs, costly=1, by_pairs=True),
    "paths": Method("paths", "a linear program over paths between all pairs of ranks",
                    all_pairs.fits, all_pairs.plan, costly=1, all_to_all=True),
    # Only if asked for by name: limits on trees, two kinds of links, Blink's own stages, and baselines.
    "mwu": Method("mwu", "trees of multiplicative weights", mwu.fits, mwu.plan),
    "mwu+ilp": Method("mwu+ilp", "trees of multiplicative weights, thinned out", mwu.fits, ilp.plan),
    "few": Method("few", "few or shallow trees", mwu.fits, few.plan),
    "shallow": Method("shallow", "trees of least depth", shallow.fits, shallow.plan, all_to_all=True),
    "rings": Method("rings", "rings, as NCCL builds them", rings.fits, rings.plan),
    "hybrid": Method("hybrid", "two kinds of links at once", hybrid.fits,
                     lambda t: hybrid.plan(t, lambda part: pack_on_links(part, "auto")), all_to_all=True),
}  # fmt: skip
# What ``auto`` tries, in this order: a method where the first of its conditions holds.
ORDER: tuple[tuple[str, Callable[[Problem], bool]], ...] = (
    (TIERS, hierarchy.fits_many),
    ("cluster", assembly.fits),
    ("symmetric", symmetric.fits),
    ("onehop", stars.fits_evenly),
    (TIERS, hierarchy.fits_tiers),
    ("symmetric", symmetric.fits_templates),
    ("exact", edmonds.fits),
    (TIERS, hierarchy.fits),
    ("onehop", stars.fits),
    ("flows", arborescences_by_flow.fits),
    ("columns", column_generation.fits),
    ("paths", all_pairs.fits),
    ("pairs", column_generation.fits_pairs),
    ("onehop", stars.fits_slow_links),
    ("chain", _fits_chain),
)
CHAIN_RANKS = 256  # up to which one chain takes a second, and is tried when time is over
AUTOMATIC = frozenset(name for name, _ in ORDER)
Arguments = tuple[str, str, int, MethodOptions]  # method, collective, root
_PLANNED: Kept[Arguments, Solution | str] = Kept()


def pack_on_links(problem: Problem, method: str) -> Packing:
    """The best of the candidates, or the method asked for; stops at the first that meets the bound."""
    best: tuple[str, Solution] | None = None
    why: list[str] = []
    wanted = _wanted(problem, method)
    costly = {name for name in wanted if METHODS[name].is_costly(problem)}
    waiting = len(costly)
    for name in sorted(wanted, key=lambda name: name in costly) if problem.deadline.late() else wanted:
        if name in costly:
            waiting -= 1
            if best is not None and problem.deadline.late():
                continue
        problem = problem.while_others_wait(waiting > 0)
        found = _planned(problem, name)
        if isinstance(found, str):
            why.append(found)
            continue
        if best is None or found.rate > best[1].rate:
            best = name, found
        if problem.met(found.rate) if found.fabric is None else found.rate == problem.bound:
            break
        late = problem.deadline.late() and not (problem.collective in ROOTED and problem.n <= CHAIN_RANKS)
        if problem.n > MANY_RANKS and (late or problem.close(best[1].rate)):
            break
    if best is None:
        raise nothing(problem.collective, problem.fabric.topology, method, why or [UNPACKED])
    return finished(problem, *best)


def _planned(problem: Problem, name: str) -> Solution | str:
    """What a method finds, once for a problem."""
    memo = _PLANNED.of(problem.fabric)
    key = name, problem.collective, problem.root, problem.options
    if key in memo:
        return memo[key]
    like = _by_symmetry(problem, name) if METHODS[name].is_costly(problem) or name == "cluster" else None
    found = like or METHODS[name].plan(problem)
    cut, met = (found == OUT_OF_TIME, False) if isinstance(found, str) else (found.cut, problem.met(found.rate))
    if met or not (cut or problem.deadline.late()):  # else more time may find a better one
        memo[key] = found
    return found


def _by_symmetry(problem: Problem, name: str) -> Solution | None:
    """What the method finds for a like problem, if that is the best for this one, too, or all that time allows.

    A reduce is a broadcast backwards where links are equally fast both ways, and so on. Roots that a symmetry of the
    machine moves onto one another have like trees.
    """
    f, root = problem.fabric, problem.root
    collective = BACKWARDS.get(problem.collective, problem.collective) if f.even else problem.collective
    images = ((r, automorphism(f, r, root)) for r in range(root if problem.collective in ROOTED else 0))
    start, image = next(((r, image) for r, image in images if image), (root, None))
    if (collective, start) == (problem.collective, root):
        return None
    other = Problem(f, collective, start, problem.options, problem.deadline)
    found = _planned(other, name)
    if isinstance(found, str) or found.fabric is not None:
        return None
    if other.certificate.kind == "prices":
        moved: dict[Arc, int | Fraction] = {(u, v): price for u, v, price in other.certificate.parts}
        if image is not None:
            moved = {(image[u], image[v]): price for (u, v), price in moved.items()}
        if collective != problem.collective:
            moved = {arc[::-1]: price for arc, price in moved.items()}
        problem.tighten_by(moved)
    if not problem.met(found.rate) and not problem.deadline.late():
        return None
    return found if image is None else found._replace(trees=moved_by(found.trees, image))


def finished(problem: Problem, name: str, found: Solution) -> Packing:
    """The solution of method ``name`` as a packing, with the bound of the links that it used; not yet verified."""
    used = problem if found.fabric is None else problem.on(found.fabric)
    links, why = "+".join(used.fabric.kinds), found.why or METHODS[name].why
    proved = found.trees, found.rate, used.proof(found.rate)
    scheme = found.scheme or METHODS[name].scheme
    late = problem.deadline.late()
    return packing_of(
        used.fabric.topology, problem.collective, problem.root, name, links, proved, why, scheme, late=late
    )


def candidates(problem: Problem) -> tuple[str, ...]:
    """Methods that ``auto`` may take for the problem, in the order in which to try them."""
    able = {name for name in AUTOMATIC if METHODS[name].can(problem)}
    return tuple(dict.fromkeys(name for name, fits in ORDER if name in able and fits(problem)))


def _wanted(problem: Problem, method: str) -> tuple[str, ...]:
    """All candidates for ``auto``, else the one method asked for."""
    if method == "auto":
        return candidates(problem)
    able = tuple(name for name, m in METHODS.items() if m.can(problem))
    return (checked(method, able, problem.collective, problem.fabric.topology),)
