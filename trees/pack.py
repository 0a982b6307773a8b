"""TreeGen's one entry point: which links, which method, and the proof (Blink section 3).

``pack`` takes NVLink or xGMI where they join the ranks, the shared memory of CPU ranks, else PCIe and host links.
It tries the methods that suit the fabric until one meets the bound, keeps the best, and returns it verified.
"""

from __future__ import annotations

from fractions import Fraction
from typing import cast

from ..errors import ArgumentError
from ..topology.model import Topology
from . import exact, shapes
from .bound import certify, trivial
from .fabric import Fabric, choose, overlay, shared_memory
from .growth import MAX_RANKS
from .load import link_loads, scaled
from .memory import CHAINED, share_memory, star_tree
from .tree import AGAINST, ALONG, COLLECTIVES, ROOTED, Certificate, Collective, Packing, Tree
from .verify import verify

SCHEMES = {"exact": "trees"}
WHY = {
    "exact": "trees grown to the capacity of the links",
    "onehop": "stars, as every rank reaches every other in one hop",
    "chain": "chains in depth-first order, which cross a switch link at most once each way",
    "direct": "every rank works on its share and reads the others', measured fastest on one memory",
}


def pack(topology: Topology, collective: str, *, root: int = 0, method: str = "auto") -> Packing:
    """Plan ``collective`` (one of ``tree.COLLECTIVES``) on this machine.

    One rank gets the trivial packing: a tree without edges of weight 1, and rate and bound 1 MB/s, which stand for
    "no byte travels"; a barrier has the same numbers on a real tree. A collective without a root has ``root`` -1.

    Raises:
        ArgumentError: for an unknown collective or method, or a root that is no rank.
        TopologyError: if no links join the ranks.
    """
    _check_call(topology, collective, root)
    memory = shared_memory(topology)
    if topology.n == 1 or collective == "barrier":
        plan = _without_bytes(topology, collective, root, method, memory)
    elif memory is not None:
        names = ("direct", "chain") if collective in CHAINED else ("direct",)
        name = _checked(method, names, collective, topology) or names[0]
        trees, rate, certificate = share_memory(topology, memory, collective, root, name)
        plan = _packing(topology, collective, root, name, "memory", trees, rate, certificate)
    else:
        plan = _on_links(choose(topology, collective, root), collective, root, method)
    return verify(plan, topology)


def methods(topology: Topology, collective: str, *, root: int = 0) -> tuple[str, ...]:
    """The methods that :func:`pack` accepts for ``collective`` on this machine, its own choice first."""
    _check_call(topology, collective, root)
    memory = shared_memory(topology)
    if topology.n == 1 or collective == "barrier":
        return ("direct",) if memory is not None else ("exact",)
    if memory is not None:
        return ("direct", "chain") if collective in CHAINED else ("direct",)
    fabric = choose(topology, collective, root)
    names = _candidates(_oriented(fabric, collective), collective)
    if len(names) == 1:
        return names
    chosen = pack(topology, collective, root=root).scheme
    return tuple(sorted(names, key=lambda name: SCHEMES.get(name, name) != chosen))


def _on_links(fabric: Fabric, collective: str, root: int, method: str) -> Packing:
    """The best of the candidates, or the one asked for; stops at the first that meets the bound."""
    names = _candidates(_oriented(fabric, collective), collective)
    name = _checked(method, names, collective, fabric.topology)
    certificate = certify(fabric, collective, root)
    plans: list[Packing] = []
    for one in (name,) if name else names:
        trees, rate = _plan(fabric, collective, root, one, certificate)
        plans.append(_packing(fabric.topology, collective, root, one, "+".join(fabric.kinds), trees, rate, certificate))
        if plans[-1].optimal:
            break
    return max(plans, key=lambda p: p.rate)


def _oriented(fabric: Fabric, collective: str) -> Fabric:
    """The fabric in the direction in which the trees' edges point."""
    if collective in ALONG and collective in AGAINST:
        return fabric.two_way
    return fabric.backwards if collective in AGAINST else fabric


def _candidates(f: Fabric, collective: str) -> tuple[str, ...]:
    """Methods that can plan ``collective`` on this oriented fabric, in the order in which to try them."""
    names: list[str] = []
    stars = overlay(f) if f.flat else None
    if stars is not None and shapes.uniform(stars):
        names.append("onehop")
    by_flow = collective in ("gather", "scatter")
    if by_flow or (stars is not None and f.n <= MAX_RANKS):
        names.append("exact")
    if stars is not None and "onehop" not in names and shapes.planes(stars):
        names.append("onehop")
    if not by_flow and (not names or all(len(f.hops_from(r)) == f.n - 1 for r in range(f.n))):
        names.append("chain")
    return tuple(names)


def _plan(
    fabric: Fabric, collective: str, root: int, name: str, certificate: Certificate
) -> tuple[tuple[Tree, ...], Fraction]:
    """Trees by one method, and their rate."""
    f = _oriented(fabric, collective)
    if name == "exact" and collective in ("gather", "scatter"):
        rate = certificate.capacity_mbps / certificate.divisor
        return exact.paths(f, root, rate), rate
    if name == "exact":
        return exact.grown(f, collective, root)
    if name == "onehop":
        trees = shapes.onehop(f.n, collective, root, shapes.planes(overlay(f)))
    else:
        trees = shapes.chain(f, collective, root)
    return scaled(trees, link_loads(collective, trees), fabric.arcs)


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
    return _packing(t, collective, root, name, links, (tree,), Fraction(1), trivial(why))


def _packing(
    t: Topology,
    collective: str,
    root: int,
    name: str,
    links: str,
    trees: tuple[Tree, ...],
    rate: Fraction,
    certificate: Certificate,
) -> Packing:
    bound = certificate.capacity_mbps / certificate.divisor
    if certificate.kind == "trivial":
        reason = f"{name}: {certificate.text}"
    else:
        met = "meets the bound" if rate == bound else f"{float(100 * rate / bound):.1f} % of the bound"
        paths = name == "exact" and collective in ("gather", "scatter")
        reason = f"{name}: {'the paths of a maximum flow' if paths else WHY[name]}; {met}"
    return Packing(
        collective=cast(Collective, collective),
        root=root if collective in ROOTED else -1,
        n=t.n,
        scheme=SCHEMES.get(name, name),
        links=links,
        trees=trees,
        rate=rate,
        bound=bound,
        certificate=certificate,
        multicast=links == "memory",
        reason=reason,
    )


def _check_call(t: Topology, collective: str, root: int) -> None:
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
