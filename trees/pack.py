"""TreeGen's one entry point: which links, which method, and the proof (Blink section 3).

``pack`` takes NVLink or xGMI where they join the ranks, the shared memory of CPU ranks, else PCIe and host links.
It tries the methods that suit the fabric until one meets the bound, keeps the best, and returns it verified.
"""

from __future__ import annotations

from fractions import Fraction
from typing import cast

from ..errors import ArgumentError
from ..topology.model import Topology
from .blink import few, groups, hybrid, ilp, mwu
from .bounds.bound import trivial
from .bounds.verify import verify
from .cluster import rails
from .exact import columns, symmetric
from .exact import flow_growth as flowgrowth
from .exact import paths as exact
from .exact.growth import MAX_RANKS
from .graph.fabric import choose, shared_memory
from .graph.load import link_loads, scaled
from .patterns import rings, shapes
from .patterns.memory import CHAINED, share_memory, star_tree
from .task import Knobs, Method, Planned, Task
from .tree import COLLECTIVES, ROOTED, Certificate, Collective, Packing, Tree


def _fits_cluster(task: Task) -> int:
    return 1 if task.boxes and not task.by_paths else 0


def _cluster(task: Task) -> Planned | None:
    found = rails.planned(task.boxes, task.collective, task.root)
    return Planned(*found) if found else None


def _fits_symmetric(task: Task) -> int:
    return 1 if task.collective in WHOLE and symmetric.turns(task.oriented) is not None else 0


def _symmetric(task: Task) -> Planned | None:
    found = symmetric.planned(task.oriented, both=task.collective == "allreduce")
    return Planned(*found) if found else None


def _fits_exact(task: Task) -> int:
    return 2 if task.by_paths or (task.n <= MAX_RANKS and task.logical is not None) else 0


def _exact(task: Task) -> Planned:
    if task.by_paths:
        return Planned(exact.paths(task.oriented, task.root, task.bound), task.bound, "the paths of a maximum flow")
    return Planned(*exact.grown(task.oriented, task.collective, task.root))


def _fits_flows(task: Task) -> int:
    foreseen = task.collective in ONE_WAY and MAX_RANKS < task.n <= flowgrowth.MOST_RANKS[task.collective in ROOTED]
    return 4 if foreseen and task.oriented.flat else 0


def _flows(task: Task) -> Planned | None:
    found = flowgrowth.planned(task.oriented, task.collective, task.root, task.bound)
    return Planned(*found) if found else None


def _fits_onehop(task: Task) -> int:
    large = task.n > MANY_RANKS and task.boxes
    if large or task.logical is None or not shapes.planes(task.logical):
        return 0
    return 1 if shapes.uniform(task.logical) else 3


def _onehop(task: Task) -> Planned:
    assert task.logical is not None
    trees = shapes.onehop(task.n, task.collective, task.root, shapes.planes(task.logical))
    return Planned(*scaled(trees, link_loads(task.collective, trees), task.fabric.arcs))


def _fits_chain(task: Task) -> int:
    if task.by_paths:
        return 0
    f = task.oriented
    if task.n > MANY_RANKS:
        return LAST
    last_resort = not any(m.fits(task) for m in METHODS.values() if m.auto and not m.costly and m.scheme != "chain")
    return LAST if last_resort or all(len(f.hops_from(r)) == f.n - 1 for r in range(f.n)) else 0


def _chain(task: Task) -> Planned:
    trees = shapes.chain(task.oriented, task.collective, task.root)
    return Planned(*scaled(trees, link_loads(task.collective, trees), task.fabric.arcs))


def _best(task: Task) -> Packing:
    return _on_links(task, "auto")


def _fits_columns(task: Task) -> int:
    return 5 if 1 < task.n <= columns.MOST_RANKS and not task.by_paths else 0


ONE_WAY = ("broadcast", "reduce", "allgather", "reduce_scatter")
WHOLE = ("allgather", "reduce_scatter", "allreduce")
MANY_RANKS = 64  # simple shapes are tried up to here, or as a last resort
COSTLY_RANKS = 48  # beyond, what comes this close to the bound is not searched further
CLOSE = Fraction(98, 100)
LAST = 9
# Every way to plan on links; one line each.
METHODS: dict[str, Method] = {
    "cluster": Method(
        "cluster", "whole boxes exchange over their ports, trees inside each box do the rest", _fits_cluster, _cluster
    ),
    "symmetric": Method("symmetric", "one shallow template, turned to every rank", _fits_symmetric, _symmetric),
    "exact": Method("trees", "trees grown to the capacity of the links", _fits_exact, _exact),
    "onehop": Method("onehop", "stars, as every rank reaches every other in one hop", _fits_onehop, _onehop),
    "chain": Method(
        "chain", "chains in depth-first order, which cross a switch link at most once each way", _fits_chain, _chain
    ),
    "flows": Method(
        "trees",
        "trees grown to the capacity of the links, a maximum flow for each edge",
        _fits_flows,
        _flows,
        costly=True,
    ),
    "columns": Method(
        "columns",
        "a linear program over trees whose edges are cheapest paths",
        _fits_columns,
        columns.planned,
        costly=True,
    ),
    # Asked for by name alone: Blink's own stages, limits, and what to compare with.
    "mwu": Method("mwu", "trees of multiplicative weights", mwu.fits, mwu.plan, auto=False),
    "mwu+ilp": Method("mwu+ilp", "trees of multiplicative weights, thinned out", mwu.fits, ilp.plan, auto=False),
    "few": Method("few", "few or shallow trees", mwu.fits, few.plan, auto=False),
    "rings": Method("rings", "rings, as NCCL builds them", rings.fits, rings.plan, auto=False),
    "groups": Method("groups", "fully connected groups, one after another", groups.fits, groups.plan, auto=False),
    "hybrid": Method("hybrid", "two kinds of links at once", hybrid.fits, lambda t: hybrid.plan(t, _best), auto=False),
}
MEMORY_WHY = {
    "chain": METHODS["chain"].why,
    "direct": "every rank works on its share and reads the others', in few steps and the order of the ranks",
}


def pack(
    topology: Topology, collective: str, *, root: int = 0, method: str = "auto", knobs: Knobs | None = None
) -> Packing:
    """Plan ``collective`` (one of ``tree.COLLECTIVES``) on this machine.

    One rank gets the trivial packing: a tree without edges of weight 1, and rate and bound 1 MB/s, which stand for
    "no byte travels"; a barrier has the same numbers on a real tree. A collective without a root has ``root`` -1.

    Args:
        knobs: what some of the methods that are asked for by name can be told.

    Raises:
        ArgumentError: for an unknown collective or method, a root that is no rank, or an impossible knob.
        TopologyError: if no links join the ranks, or the topology is not one.
    """
    _check_call(topology, collective, root)
    memory = shared_memory(topology)
    if topology.n == 1 or collective == "barrier":
        plan = _without_bytes(topology, collective, root, method, memory)
    elif memory is not None:
        names = ("direct", "chain") if collective in CHAINED else ("direct",)
        name = _checked(method, names, collective, topology) or names[0]
        trees, rate, certificate = share_memory(topology, memory, collective, root, name)
        plan = _packing(topology, collective, root, name, "memory", trees, rate, certificate, MEMORY_WHY[name])
    else:
        knobs = (knobs or Knobs()).check()
        plan = _on_links(Task(choose(topology, collective, root), collective, root, knobs), method)
    return verify(plan, topology)


def methods(topology: Topology, collective: str, *, root: int = 0) -> tuple[str, ...]:
    """The methods that ``auto`` chooses from for ``collective`` on this machine, its own choice first."""
    _check_call(topology, collective, root)
    memory = shared_memory(topology)
    if topology.n == 1 or collective == "barrier":
        return ("direct",) if memory is not None else ("exact",)
    if memory is not None:
        return ("direct", "chain") if collective in CHAINED else ("direct",)
    names = _candidates(Task(choose(topology, collective, root), collective, root))
    if len(names) == 1:
        return names
    chosen = pack(topology, collective, root=root).scheme
    names = tuple(name for name in names if not METHODS[name].costly or METHODS[name].scheme == chosen)
    return tuple(sorted(names, key=lambda name: METHODS[name].scheme != chosen))


def extra_methods(topology: Topology, collective: str, *, root: int = 0) -> tuple[str, ...]:
    """Further methods that :func:`pack` accepts by name: slower ones, and those to compare with."""
    _check_call(topology, collective, root)
    if topology.n == 1 or collective == "barrier" or shared_memory(topology) is not None:
        return ()
    task = Task(choose(topology, collective, root), collective, root)
    return tuple(name for name, m in METHODS.items() if not m.auto and m.fits(task))


def _on_links(task: Task, method: str) -> Packing:
    """The best of the candidates, or the one asked for; stops at the first that meets the bound."""
    best: tuple[str, Planned] | None = None
    for name in _wanted(task, method):
        if METHODS[name].costly and task.n > COSTLY_RANKS and best is not None and best[1].rate >= CLOSE * task.bound:
            continue
        found = METHODS[name].plan(task)
        if found is None:
            continue
        used = task if found.fabric is None else Task(found.fabric, task.collective, task.root)
        if best is None or found.rate > best[1].rate:
            best = name, found
        if used.met(found.rate):
            break
    if best is None:
        raise ArgumentError(
            f"method {method!r} finds no {task.collective} plan on {task.fabric.topology.name}; choose another"
        )
    return finished(task, *best)


def finished(task: Task, name: str, found: Planned) -> Packing:
    """What method ``name`` planned, with the bound of the links that it used; not yet verified."""
    used = task if found.fabric is None else Task(found.fabric, task.collective, task.root)
    why = found.why or METHODS[name].why
    t, links = used.fabric.topology, "+".join(used.fabric.kinds)
    return _packing(t, task.collective, task.root, name, links, found.trees, found.rate, used.proof(found.rate), why)


def _candidates(task: Task) -> tuple[str, ...]:
    """Methods that ``auto`` may take for the task, in the order in which to try them."""
    turns = {name: m.fits(task) for name, m in METHODS.items() if m.auto}
    return tuple(sorted((name for name, turn in turns.items() if turn), key=lambda name: turns[name]))


def _wanted(task: Task, method: str) -> tuple[str, ...]:
    """All candidates for ``auto``, else the one method asked for."""
    if method == "auto":
        return _candidates(task)
    able = tuple(name for name, m in METHODS.items() if m.fits(task))
    return (_checked(method, able, task.collective, task.fabric.topology),)


def _without_bytes(t: Topology, collective: str, root: int, method: str, memory: int | None) -> Packing:
    """One rank alone, or a barrier: one tree, no rate."""
    name = "exact" if memory is None else "direct"
    _checked(method, (name,), collective, t)
    links, tree, why = "", Tree(0, (), Fraction(1)), "one rank"
    if t.n > 1:
        why = "a barrier moves no bytes"
        if memory is not None:
            links, tree = "memory", star_tree(t.n, memory)
        else:
            fabric = choose(t, collective, 0)
            links, tree = "+".join(fabric.kinds), shapes.shallow(fabric.two_way, 0)
    return _packing(t, collective, root, name, links, (tree,), Fraction(1), trivial(why), why)


def _packing(
    t: Topology,
    collective: str,
    root: int,
    name: str,
    links: str,
    trees: tuple[Tree, ...],
    rate: Fraction,
    certificate: Certificate,
    why: str,
) -> Packing:
    bound = certificate.capacity_mbps / certificate.divisor
    reason = f"{name}: {why}"
    if certificate.kind != "trivial":
        reason += "; " + ("meets the bound" if rate == bound else f"{float(100 * rate / bound):.1f} % of the bound")
    return Packing(
        collective=cast(Collective, collective),
        root=root if collective in ROOTED else -1,
        n=t.n,
        scheme=METHODS[name].scheme if name in METHODS else name,
        links=links,
        trees=trees,
        rate=rate,
        bound=bound,
        certificate=certificate,
        multicast=links == "memory",
        reason=reason,
    )


def _check_call(t: Topology, collective: str, root: int) -> None:
    if not t.__dict__.get("_checked"):
        t.check()
        t.__dict__["_checked"] = True
    if collective not in COLLECTIVES:
        raise ArgumentError(f"collective {collective!r}: expected one of {', '.join(COLLECTIVES)}; choose one of these")
    if not 0 <= root < t.n:
        raise ArgumentError(f"root {root}: {t.name} has ranks 0..{t.n - 1}; choose one of these")


def _checked(method: str, names: tuple[str, ...], collective: str, t: Topology) -> str:
    """``method`` if it is one of ``names``, or nothing for ``auto``."""
    if method == "auto":
        return ""
    if method not in names:
        raise ArgumentError(
            f"method {method!r} cannot plan {collective} on {t.name}: expected auto, {', '.join(names)}; "
            "choose one of these"
        )
    return method
