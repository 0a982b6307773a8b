"""The differences between two plans: schemes, rates, trees and the load of links.

Pure data. Plans are compared collective by collective, root by root, scheme by scheme; trees as the multiset of their
edges with their share of the vector.
"""

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise

from ..trees.tree import Packing
from ..util.codec import Value
from ..util.text import size_text
from .explain import shares
from .plan import Plan, Rule

DETAILS = ("limit", "tree ", "load ")  # how the rows begin that say how, not how much
Key = tuple[str, int, str]


class PlanDifference(Value, frozen=True):
    """One difference for one collective; an empty text means that this plan lacks it."""

    collective: str
    what: str
    one: str
    other: str


def plan_differences(one: Plan, other: Plan) -> tuple[PlanDifference, ...]:
    """What ``other`` has differently: machine, packings, selection table; nothing for equal plans."""
    found = []
    for what in ("machine", "fingerprint", "n"):
        texts = str(getattr(one, what)), str(getattr(other, what))
        if texts[0] != texts[1]:
            found.append(PlanDifference("", "ranks" if what == "n" else what, *texts))
    mine, theirs = _packings(one), _packings(other)
    for key in [*mine, *(k for k in theirs if k not in mine)]:
        collective = key[0] + (f" from {key[1]}" if key[1] >= 0 else "")
        a, b = mine.get(key), theirs.get(key)
        if a is None or b is None:
            texts = "" if a is None else _facts(a), "" if b is None else _facts(b)
            found.append(PlanDifference(collective, key[2], *texts))
        elif a != b:
            found += [PlanDifference(collective, what, x, y) for what, x, y in _changes(a, b, key[2])]
    return (*found, *_rules(one, other))


def _packings(plan: Plan) -> dict[Key, Packing]:
    """By collective, root and scheme; of all roots, also of those that are turned."""
    like: dict[int, list[int]] = {}
    for turn in plan.turns:
        like.setdefault(turn.like, []).append(turn.root)
    found = {
        (p.collective, root, p.scheme): plan.packing(p.collective, root, p.scheme)
        for p in plan.packings
        for root in (p.root, *like.get(p.root, ()))
    }
    order: list[str] = list(dict.fromkeys(p.collective for p in plan.packings))
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1])))


def _facts(p: Packing) -> str:
    return f"{len(p.trees)} trees, depth {p.depth}, {_gbps(p.rate)}"


def _changes(a: Packing, b: Packing, scheme: str) -> list[tuple[str, str, str]]:
    """What, before, after: rate, bound, certificate, number and depth of trees, each tree, each link's load."""
    facts = [
        (f"{scheme}: rate", _gbps(a.rate), _gbps(b.rate)),
        (f"{scheme}: bound", _gbps(a.bound), _gbps(b.bound)),
        ("limit", a.certificate.text, b.certificate.text),
        (f"{scheme}: trees", str(len(a.trees)), str(len(b.trees))),
        (f"{scheme}: depth", str(a.depth), str(b.depth)),
        (f"{scheme}: links", a.links, b.links),
    ]
    trees = _trees(a), _trees(b)
    for tree in sorted({*trees[0], *trees[1]}):
        facts.append((f"tree {tree}", _share(trees[0].get(tree)), _share(trees[1].get(tree))))
    loads = _loads(a), _loads(b)
    for hop in sorted({*loads[0], *loads[1]}):
        before, after = (_gbps(some[hop]) if some[hop] else "" for some in loads)
        facts.append((f"load {hop[0]}>{hop[1]}", before, after))
    return [(what, x, y) for what, x, y in facts if x != y]


def _trees(p: Packing) -> Mapping[str, Fraction]:
    """Root and edges of a tree, as people read them, to its share of the vector."""
    found: Counter[str] = Counter()
    for tree, share in zip(p.trees, shares(p), strict=True):
        down, up = (
            " ".join(f"{e.src}>{e.dst}" for e in sorted(edges, key=lambda e: (e.src, e.dst)))
            for edges in (tree.edges, tree.up)
        )
        found[f"{tree.root}: {down}{f' up {up}' if up else ''}"] += share  # type: ignore[assignment]
    return dict(found)  # type: ignore[arg-type]


def _loads(p: Packing) -> Counter[tuple[int, int]]:
    """MB/s that the trees put on every hop, on the way that their edges point."""
    found: Counter[tuple[int, int]] = Counter()
    for tree in p.trees:
        for edge in (*tree.edges, *tree.up):
            for hop in pairwise(edge.path):
                found[hop] += tree.weight  # type: ignore[assignment]
    return found


def _rules(one: Plan, other: Plan) -> list[PlanDifference]:
    """The selection table, row by row."""
    tables = [{(r.collective, _where(r)): r for r in plan.rules} for plan in (one, other)]
    found = []
    for key in [*tables[0], *(k for k in tables[1] if k not in tables[0])]:
        texts = [_how(table.get(key)) for table in tables]
        if texts[0] != texts[1]:
            found.append(PlanDifference(key[0], key[1], *texts))
    return found


def _how(rule: Rule | None) -> str:
    """The scheme of a row, with its slots."""
    if rule is None or not rule.chunk_bytes:
        return rule.scheme if rule else ""
    return f"{rule.scheme}, {rule.depth} slots of {size_text(rule.chunk_bytes)}"


def _where(rule: Rule) -> str:
    """The calls that a row is for."""
    root = f", root {rule.root}" if rule.root >= 0 else ""
    kinds = (", registered buffers" * rule.registered, ", widened partial results" * rule.widened)
    return f"from {rule.min_bytes} bytes{root}{''.join(kinds)}"


def _gbps(mbps: Fraction | int) -> str:
    return f"{float(mbps) / 1000:.4g} GB/s"


def _share(share: Fraction | None) -> str:
    return "" if share is None else str(share)
