"""Make packings of spanning trees (TreeGen): ``pack`` chooses the links, tries the methods, returns the best, verified.

It takes NVLink or xGMI where they join the ranks, the shared memory of CPU ranks, else all links. It tries the methods
that fit until one meets the bound. ``METHODS`` says which module is which method.
"""

from fractions import Fraction
from typing import cast

from msgspec.structs import replace

from ..errors import ArgumentError, NoPackingError
from ..topology.model import Topology
from .blink import few, groups, hybrid, ilp, mwu
from .bounds.certify import prices_certificate, trivial
from .bounds.verify import verify
from .cluster import assembly
from .deadline import late, others_wait, within
from .exact import all_pairs, arborescences_by_flow, column_generation, edmonds, symmetric
from .graph.fabric import choose_links, shared_memory
from .graph.turning import turned, turning
from .patterns import chains, rings, shallow, stars
from .patterns.shared_memory import CHAINED, share_memory, star_tree
from .problem import BACKWARDS, OUT_OF_TIME, Method, MethodOptions, Problem, Solution
from .tree import COLLECTIVES, ROOTED, Certificate, Collective, Packing, Tree


def _fits_chain(problem: Problem) -> int:
    if problem.by_paths:
        return 0
    f = problem.oriented
    if problem.n > stars.MANY_RANKS:
        return LAST
    quick = (m for name, m in METHODS.items() if m.auto and name != "chain" and not _costly(problem, name))
    last_resort = not any(m.fits(problem) for m in quick)
    return LAST if last_resort or len(f.hops) == f.n * (f.n - 1) else 0


COSTLY_RANKS = 64  # beyond, what comes this close to the bound is not searched further
CLOSE = Fraction(98, 100)
LAST = 9
MOST_ALL_TO_ALL = 128  # ranks, each with a path to every other one
UNPACKED = "so many ranks have no paths of their own for it, and a plan takes those of all scatters"
# All methods for links: scheme, description, and the module that plans.
METHODS: dict[str, Method] = {
    "cluster": Method("cluster", "whole boxes exchange over their ports, trees inside each box do the rest",
                      assembly.fits, assembly.plan),
    "symmetric": Method("symmetric", "shallow templates, turned to every rank", symmetric.fits, symmetric.plan),
    "exact": Method("trees", "trees grown to the capacity of the links", edmonds.fits, edmonds.plan,
                    costly=9),
    "onehop": Method("onehop", "stars, as every rank reaches every other in one hop", stars.fits, stars.plan),
    "chain": Method("chain", "chains in depth-first order, which cross a switch link at most once each way",
                    _fits_chain, chains.plan),
    "flows": Method("trees", "trees grown to the capacity of the links, a maximum flow for each edge",
                    arborescences_by_flow.fits, arborescences_by_flow.plan, costly=1),
    "columns": Method("columns", "a linear program over trees whose edges are cheapest paths",
                      column_generation.fits, column_generation.plan, costly=1),
    "pairs": Method("pairs", "a linear program over pairs of trees, one to a root and another from it",
                    column_generation.fits_pairs, column_generation.plan_pairs, costly=1),
    "paths": Method("paths", "a linear program over paths between all pairs of ranks",
                    all_pairs.fits, all_pairs.plan, costly=1),
    # Only if asked for by name: Blink's own stages, limits on trees, and baselines.
    "mwu": Method("mwu", "trees of multiplicative weights", mwu.fits, mwu.plan, auto=False),
    "mwu+ilp": Method("mwu+ilp", "trees of multiplicative weights, thinned out", mwu.fits, ilp.plan, auto=False),
    "few": Method("few", "few or shallow trees", mwu.fits, few.plan, auto=False),
    "shallow": Method("shallow", "trees of least depth", shallow.fits, shallow.plan, auto=False),
    "rings": Method("rings", "rings, as NCCL builds them", rings.fits, rings.plan, auto=False),
    "groups": Method("groups", "fully connected groups, one after another", groups.fits, groups.plan, auto=False),
    "hybrid": Method("hybrid", "two kinds of links at once", hybrid.fits,
                     lambda t: hybrid.plan(t, lambda part: _on_links(part, "auto")), auto=False),
}  # fmt: skip
Arguments = tuple[str, str, int, MethodOptions]  # method, collective, root
ProvedTrees = tuple[tuple[Tree, ...], Fraction, Certificate]  # with their rate
MEMORY_WHY = {
    "chain": METHODS["chain"].why,
    "direct": "every rank works on its share and reads the others', in few steps and the order of the ranks",
}


def pack(
    topology: Topology, collective: str, *, root: int = 0, method: str = "auto", options: MethodOptions | None = None,
    seconds: float | None = None,
) -> Packing:  # fmt: skip
    """Plan ``collective`` (one of ``tree.COLLECTIVES``) on this machine.

    One rank gets the trivial packing: a tree without edges of weight 1, and rate and bound 1 MB/s, which stand for
    "no byte travels"; a barrier has the same numbers on a real tree. A collective without a root has ``root`` -1.

    >>> from blinkmpi.topology import machine
    >>> packing = pack(machine("dgx-1v").subset([1, 4, 5, 6]), "allreduce")
    >>> len(packing.trees), packing.depth, packing.rate, packing.optimal
    (2, 2, Fraction(50000, 1), True)

    Args:
        options: limits and settings of the methods that are asked for by name.
        seconds: after which a search ends with the best that it has found, whose gap to the bound is stated; by default
            what is left of a plan's time, else ``deadline.SECONDS``.

    Raises:
        ArgumentError: for an unknown collective or method, a root that is no rank, or an impossible option.
        NoPackingError: where the method that was asked for finds nothing, with the reason.
        TopologyError: if no links join the ranks, or the topology is not one.
    """
    _check_call(topology, collective, root)
    memory = shared_memory(topology)
    if collective == "alltoall" and topology.n > MOST_ALL_TO_ALL:
        raise _nothing(collective, topology, method, [UNPACKED])
    if topology.n == 1 or collective == "barrier":
        plan = _without_bytes(topology, collective, root, method, memory)
    elif memory is not None:
        names = ("direct", "chain") if collective in CHAINED else ("direct",)
        name = _checked(method, names, collective, topology) or names[0]
        proved = share_memory(topology, memory, collective, root, name)
        plan = _packing(topology, collective, root, name, "memory", proved, MEMORY_WHY[name])
    else:
        options = (options or MethodOptions()).check()
        with within(seconds):
            plan = _on_links(Problem(choose_links(topology, collective, root), collective, root, options), method)
    return verify(plan, topology)


def methods(topology: Topology, collective: str, *, root: int = 0) -> tuple[str, ...]:
    """The methods that ``auto`` chooses from for ``collective`` on this machine, its own choice first.

    Some may find nothing: :func:`pack` then raises NoPackingError.
    """
    _check_call(topology, collective, root)
    memory = shared_memory(topology)
    if collective == "alltoall" and topology.n > MOST_ALL_TO_ALL:
        return ()
    if topology.n == 1 or collective == "barrier":
        return ("direct",) if memory is not None else ("exact",)
    if memory is not None:
        return ("direct", "chain") if collective in CHAINED else ("direct",)
    problem = Problem(choose_links(topology, collective, root), collective, root)
    names = _candidates(problem)
    if len(names) < 2:
        return names
    chosen = pack(topology, collective, root=root).scheme
    names = tuple(name for name in names if METHODS[name].scheme == chosen or not _costly(problem, name))
    return tuple(sorted(names, key=lambda name: METHODS[name].scheme != chosen))


def extra_methods(topology: Topology, collective: str, *, root: int = 0) -> tuple[str, ...]:
    """Further methods that :func:`pack` accepts by name: slower ones, and baselines."""
    _check_call(topology, collective, root)
    if topology.n == 1 or collective == "barrier" or shared_memory(topology) is not None:
        return ()
    problem = Problem(choose_links(topology, collective, root), collective, root)
    return tuple(name for name, m in METHODS.items() if not m.auto and _turn(problem, name))


def _on_links(problem: Problem, method: str) -> Packing:
    """The best of the candidates, or the method asked for; stops at the first that meets the bound."""
    best: tuple[str, Solution] | None = None
    why: list[str] = []
    wanted = _wanted(problem, method)
    waiting = sum(_costly(problem, name) for name in wanted)
    for name in sorted(wanted, key=lambda name: _costly(problem, name)) if late() else wanted:
        close = best is not None and best[1].rate >= CLOSE * problem.bound
        if _costly(problem, name):
            waiting -= 1
            if best is not None and (late() or (problem.n > COSTLY_RANKS and close)):
                continue
        with others_wait(waiting > 0):
            found = _planned(problem, name)
        if isinstance(found, str):
            why.append(found)
            continue
        if best is None or found.rate > best[1].rate:
            best = name, found
        if problem.met(found.rate) if found.fabric is None else found.rate == problem.bound:
            break
    if best is None:
        raise _nothing(problem.collective, problem.fabric.topology, method, why or [UNPACKED])
    return finished(problem, *best)


def _nothing(collective: str, t: Topology, method: str, why: list[str]) -> NoPackingError:
    reasons = "; ".join(why)
    error = NoPackingError(f"{collective} on {t.name}: method {method!r} finds nothing ({reasons}); choose another")
    error.why = reasons
    return error


def _planned(problem: Problem, name: str) -> Solution | str:
    """What a method finds, once for a problem."""
    memo: dict[Arguments, Solution | str] = problem.fabric.memo.setdefault("planned", {})
    key = name, problem.collective, problem.root, problem.options
    if key in memo:
        return memo[key]
    like = _by_symmetry(problem, name) if _costly(problem, name) or name == "cluster" else None
    found = like or METHODS[name].plan(problem)
    cut, met = (found == OUT_OF_TIME, False) if isinstance(found, str) else (found.cut, problem.met(found.rate))
    if met or not (cut or late()):  # else more time may find a better one
        memo[key] = found
    return found


def _by_symmetry(problem: Problem, name: str) -> Solution | None:
    """What the method finds for a like problem, if that is the best for this one, too, or all that time allows.

    A reduce is a broadcast backwards where links are equally fast both ways, and so on. Roots that a symmetry of the
    machine moves onto one another have like trees.
    """
    f, root = problem.fabric, problem.root
    collective = BACKWARDS.get(problem.collective, problem.collective) if f.even else problem.collective
    turns = ((r, turning(f, r, root)) for r in range(root if problem.collective in ROOTED else 0))
    start, image = next(((r, image) for r, image in turns if image), (root, None))
    if (collective, start) == (problem.collective, root):
        return None
    other = Problem(f, collective, start, problem.options)
    found = _planned(other, name)
    if isinstance(found, str) or found.fabric is not None:
        return None
    if other.certificate.kind == "prices":
        moved = {(u, v): price for u, v, price in other.certificate.parts}
        if image is not None:
            moved = {(image[u], image[v]): price for (u, v), price in moved.items()}
        if collective != problem.collective:
            moved = {arc[::-1]: price for arc, price in moved.items()}
        proof = prices_certificate(f, problem.collective, root, moved)
        if proof is not None:
            problem.tighten(proof)
    if not problem.met(found.rate) and not late():
        return None
    return found if image is None else found._replace(trees=turned(found.trees, image))


def finished(problem: Problem, name: str, found: Solution) -> Packing:
    """The solution of method ``name`` as a packing, with the bound of the links that it used; not yet verified."""
    used = _used(problem, found)
    links, why = "+".join(used.fabric.kinds), found.why or METHODS[name].why
    proved = found.trees, found.rate, used.proof(found.rate)
    packing = _packing(used.fabric.topology, problem.collective, problem.root, name, links, proved, why)
    return replace(packing, scheme=found.scheme) if found.scheme else packing


def _used(problem: Problem, found: Solution) -> Problem:
    """The problem on the links that a solution uses."""
    return problem if found.fabric is None else Problem(found.fabric, problem.collective, problem.root)


def _candidates(problem: Problem) -> tuple[str, ...]:
    """Methods that ``auto`` may take for the problem, in the order in which to try them."""
    turns = {name: _turn(problem, name) for name, m in METHODS.items() if m.auto}
    return tuple(sorted((name for name, turn in turns.items() if turn), key=lambda name: turns[name]))


def _turn(problem: Problem, name: str) -> int:
    """When to try a method; 0 if it cannot plan the problem."""
    if problem.collective == "alltoall" and name not in ("onehop", "paths", "hybrid"):
        return 0
    return METHODS[name].fits(problem) if name == "pairs" or not problem.pairs_only else 0


def _costly(problem: Problem, name: str) -> bool:
    """Whether a method may take seconds for trees on so many ranks; paths of a flow are found soon."""
    return 0 < METHODS[name].costly <= problem.n and not problem.by_paths


def _wanted(problem: Problem, method: str) -> tuple[str, ...]:
    """All candidates for ``auto``, else the one method asked for."""
    if method == "auto":
        return _candidates(problem)
    able = tuple(name for name in METHODS if _turn(problem, name))
    return (_checked(method, able, problem.collective, problem.fabric.topology),)


def _without_bytes(t: Topology, collective: str, root: int, method: str, memory: int | None) -> Packing:
    """The packing for one rank alone, or for a barrier: one tree, no rate."""
    name = "exact" if memory is None else "direct"
    _checked(method, (name,), collective, t)
    links, tree, why = "", Tree(0, (), Fraction(1)), "one rank"
    if t.n > 1:
        why = "a barrier moves no bytes"
        if memory is not None:
            links, tree = "memory", star_tree(t.n, memory)
        else:
            fabric = choose_links(t, collective, 0)
            links, tree = "+".join(fabric.kinds), chains.shallow(fabric, 0)
    return _packing(t, collective, root, name, links, ((tree,), Fraction(1), trivial(why)), why)


def _packing(t: Topology, collective: str, root: int, name: str, links: str, proved: ProvedTrees, why: str) -> Packing:
    trees, rate, certificate = proved
    bound = certificate.capacity_mbps / certificate.divisor
    reason = f"{name}: {why}"
    if certificate.kind != "trivial":
        reason += "; " + ("meets the bound" if rate == bound else f"{float(rate / bound):.1%} of the bound")
        reason += ", when the time for planning (BLINKMPI_PLAN_SECONDS) was over" if rate < bound and late() else ""
    return Packing(
        collective=cast(Collective, collective), root=root if collective in ROOTED else -1, n=t.n,
        scheme=METHODS[name].scheme if name in METHODS else name, links=links, trees=trees, rate=rate, bound=bound,
        certificate=certificate, multicast=links == "memory", reason=reason,
    )  # fmt: skip


def _check_call(t: Topology, collective: str, root: int) -> None:
    if not t.__dict__.get("_checked"):
        t.check()
        t.__dict__["_checked"] = True
    if collective not in COLLECTIVES:
        raise ArgumentError(f"collective {collective!r}: expected one of {', '.join(COLLECTIVES)}; choose one of these")
    if not 0 <= root < t.n:
        raise ArgumentError(f"root {root}: {t.name} has ranks 0..{t.n - 1}; choose one of these")


def _checked(method: str, names: tuple[str, ...], collective: str, t: Topology) -> str:
    """``method`` if it is one of ``names``, or an empty text for ``auto``."""
    if method == "auto":
        return ""
    if method not in names:
        raise ArgumentError(
            f"method {method!r} cannot plan {collective} on {t.name}: expected auto, {', '.join(names)}; "
            "choose one of these"
        )
    return method
