"""What the commands print with rich: plans and simulations (machines are shown by ``topology.show``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .explain import depth_of, gap_text, ranks_text, shares, time_text
from .topology.model import Topology
from .trees.tree import Packing, Tree

BAR = 30


def packings(found: Sequence[tuple[Packing, float]], topology: Topology) -> RenderableType:
    """One row for each collective, then the certificates."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("collective", no_wrap=True)
    table.add_column("scheme", no_wrap=True)
    for name in ("trees", "depth", "rate GB/s", "bound GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("optimal", no_wrap=True)
    proofs = Table.grid(padding=(0, 2))
    for p, _ in found:
        name = p.collective + (f" from {p.root}" if p.root >= 0 else "")
        trivial = p.certificate.kind == "trivial"
        table.add_row(
            name,
            p.scheme,
            str(len(p.trees)),
            str(depth_of(p)),
            "-" if trivial else f"{float(p.rate / 1000):.4g}",
            "-" if trivial else f"{float(p.bound / 1000):.4g}",
            Text("yes", "green") if p.optimal else Text(f"{float(p.rate / p.bound):.1%}", "yellow"),
        )
        proofs.add_row(f" {name}", p.certificate.text)
    links = sorted({p.links for p, _ in found} - {""})
    total = sum(seconds for _, seconds in found)
    title = Text(f"{topology.name}, {ranks_text(topology.n)}, over {', '.join(links) or 'no links'}", "bold")
    return Group(
        title, table, Text(" Why nothing is faster", "bold"), proofs, Text(f"\n planned in {time_text(total)}", "dim")
    )


def packing(p: Packing, seconds: float, topology: Topology) -> RenderableType:
    """One collective with all its trees."""
    rate, bound = float(p.rate / 1000), float(p.bound / 1000)
    head = Table.grid(padding=(0, 2))
    head.add_row("scheme", f"{p.scheme}: {p.reason.partition(': ')[2] or p.reason}")
    if p.certificate.kind != "trivial":
        head.add_row(
            "rate", Text(f"{rate:.4g} GB/s, {gap_text(rate, bound, p.optimal)}", "green" if p.optimal else "yellow")
        )
        head.add_row("bound", f"{bound:.4g} GB/s: {p.certificate.text}")
    head.add_row("links", p.links or "none")
    head.add_row("planned in", time_text(seconds))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("tree", "share", "GB/s", "depth", "root"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("edges, away from the root")
    for i, (tree, share) in enumerate(zip(p.trees, shares(p), strict=True)):
        weight = "-" if p.certificate.kind == "trivial" else f"{float(tree.weight / 1000):.4g}"
        table.add_row(str(i), str(share), weight, str(tree.depth), str(tree.root), edges_text(tree))
    where = f" from rank {p.root}" if p.root >= 0 else ""
    title = Text(f"{p.collective}{where}, {ranks_text(p.n)} on {topology.name}\n", "bold")
    return Group(title, head, Text(), table)


def edges_text(tree: Tree) -> str:
    """``0>1,3  1>5``: each parent with its children."""
    parents = groupby(tree.edges, key=lambda e: e.src)
    return "  ".join(f"{src}>{','.join(str(e.dst) for e in edges)}" for src, edges in parents) or "none"


def simulation(facts: Mapping[str, str], rows: Sequence[tuple[str, float]], more: int) -> RenderableType:
    """Facts as a list, links as bars."""
    head = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        head.add_row(name, value)
    if not rows:
        return head
    bars = Table(box=SIMPLE_HEAD, pad_edge=False)
    bars.add_column("busiest")
    bars.add_column("busy", justify="right")
    bars.add_column("")
    for name, part in rows:
        bars.add_row(name, f"{part:.0%}", ProgressBar(total=1.0, completed=part, width=BAR))
    rest = [Text(f"and {more} more", "dim")] if more > 0 else []
    return Group(head, Text(), bars, *rest)
