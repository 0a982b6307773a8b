"""Pictures: a machine with its trees, and the speed-ups of its subsets (Blink, theoretical speed-ups).

matplotlib is imported inside the functions that draw, since it is an extra: ``pip install 'blinkmpi[plot]'``. The
layout is :mod:`.layout`'s.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from colorsys import hsv_to_rgb
from itertools import pairwise
from math import ceil, sqrt
from typing import TYPE_CHECKING

import numpy as np

from ..planning.explain import gap_text, share_text, shares, trees_text, what_bounds
from ..planning.subsets import COLLECTIVES, Subset, by_size, spread
from ..topology.model import Topology
from ..trees.answer import SHARP
from ..trees.graph.fabric import fabric
from ..trees.tree import PER_RANK, Edge, Packing, Tree
from ..util.figure import COLOURS, DARK, SWITCH, bare, check_target, new_figure, save
from ..util.text import plural
from .layout import Points, Position, arrow_head, curve, extent, number_of, places
from .machine import stage, word_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_TREES = 24
MOST_EDGES = 6_000
BARS = {"broadcast": COLOURS[0], "allreduce": COLOURS[1], "allgather": COLOURS[2]}


def draw_packing(packing: Packing, topology: Topology, path: str) -> None:
    """Draw all trees over the machine, and each of them alone with its share and rate."""
    check_target(path)
    save(packing_figure(packing, topology), path)


def packing_figure(packing: Packing, topology: Topology) -> Figure:
    """The picture, before it is written."""
    lanes = fabric(topology, packing.links.split("+"))
    spots = places(lanes)
    limit = max(1, min(MOST_TREES, MOST_EDGES // max(1, packing.n)))
    trees = sorted(zip(packing.trees, shares(packing), strict=True), key=lambda pair: -pair[0].weight)
    drawn = [tree for tree, _ in trees[:limit]]
    columns = min(len(drawn), 2 if len(drawn) <= 8 else 3 if len(drawn) <= 15 else 4)
    rows = ceil(len(drawn) / columns)
    low, high = extent(spots)
    height = float(np.clip(8.6 * (high[1] - low[1]) / (high[0] - low[0]), 4.4, 7.2))
    cell = min(2.4, height / max(rows, 2))
    figure = new_figure(9.4 + columns * cell * 1.15, height + 1.1)
    grid = figure.add_gridspec(
        rows, columns + 1, width_ratios=[8.6, *[cell * 1.15] * columns], wspace=0.04, hspace=0.22,
        left=0.015, right=0.985, bottom=0.02, top=height / (height + 1.1) - 0.03,
    )  # fmt: skip
    main = figure.add_subplot(grid[:, 0])
    paint = _colours(len(drawn))
    _machine(main, lanes.arcs, spots, topology, packing, grey=_unused(packing, lanes.arcs))
    _trees(main, drawn, paint, spots)
    for i, (tree, share) in enumerate(trees[:limit]):
        small = figure.add_subplot(grid[i // columns, i % columns + 1])
        _machine(
            small,
            lanes.arcs,
            spots,
            topology,
            packing,
            root=(tree.root, paint[i]),
            labels=cell > 1.2 and packing.n <= 16,
        )
        _trees(small, [tree], [paint[i]], spots, small=True)
        weight = "" if packing.certificate.kind == "trivial" else f"  {float(tree.weight / 1000):.4g} GB/s"
        part = share_text(share) if packing.collective not in PER_RANK else f"block {tree.root}"
        part += f", {share_text(share)} of it" if packing.collective in PER_RANK and share != 1 else ""
        title = small.set_title(f"{part}{weight}", fontsize=9, color=paint[i], pad=2, weight="bold")
        room = 0.96 * float(small.get_position(original=True).width) * figure.bbox.width
        title.set_fontsize(min(9 if cell > 1.2 else 7, 9 * room / title.get_window_extent().width))
    _title(figure, packing, topology, len(drawn))
    return figure


def _title(figure: Figure, p: Packing, t: Topology, drawn: int) -> None:
    where = f" from {t.vertex_label(p.root)}" if p.root >= 0 else ""
    count = trees_text(len(p.trees), p.depth)
    some = f" (the {drawn} thickest drawn)" if drawn < len(p.trees) else ""
    height = figure.get_figheight()
    lines = [1 - inches / height for inches in (0.42, 0.70, 0.95)]
    figure.text(0.02, lines[0], f"{p.collective}{where}, {plural(p.n, 'rank')} on {t.name}", fontsize=15, weight="bold")
    rate, bound = float(p.rate / 1000), float(p.bound / 1000)
    if p.certificate.kind == "trivial":
        figure.text(0.02, lines[1], f"{count}{some}; {p.certificate.text}", fontsize=11, color=DARK)
        return
    method = p.reason.partition(":")[0]
    facts = f"{rate:.4g} GB/s, {gap_text(rate, bound, p.optimal)}; {count}{some}, method {method}, over {p.links}"
    facts += "; dashed: to the root" if any(tree.up for tree in p.trees) else ""
    facts += "; not executed here" if p.scheme == SHARP else ""
    figure.text(0.02, lines[1], facts, fontsize=11, color=DARK)
    proof = textwrap.shorten(
        f"bound {bound:.4g} GB/s of {what_bounds(p, t)}: {p.certificate.text}", 180, placeholder=" ..."
    )
    figure.text(0.02, lines[2], proof, fontsize=9.5, color="#666666")


def _unused(packing: Packing, arcs: dict[tuple[int, int], int]) -> set[frozenset[int]]:
    used = {frozenset(hop) for tree in packing.trees for e in (*tree.edges, *tree.up) for hop in pairwise(e.path)}
    return {frozenset(arc) for arc in arcs} - used


def _machine(
    axes: Axes, arcs: dict[tuple[int, int], int], spots: Sequence[Position], t: Topology, p: Packing, *,
    grey: set[frozenset[int]] | None = None, root: tuple[int, str] | None = None, labels: bool = True,
) -> None:  # fmt: skip
    """Links in grey, devices and switches with their names; the small pictures, with a root, show all links thinly."""
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Circle

    n, big = t.n, root is None
    stage(axes, t, spots, named=big)
    most = max(arcs.values(), default=1)
    pairs = {frozenset(arc): mbps for arc, mbps in arcs.items()}
    lines = [np.array([spots[v].at for v in sorted(pair)]) for pair in pairs]
    widths = [(1.0 + 4.0 * mbps / most) * (1.0 if big else 0.25) for mbps in pairs.values()]
    tones = ["#bdbdbd" if grey and pair in grey else "#e6e6e6" for pair in pairs]
    axes.add_collection(LineCollection(lines, colors=tones, linewidths=widths, zorder=1, capstyle="round"))
    shown = labels and n <= 128
    for v, place in enumerate(spots):
        if place.at is None:
            continue
        is_root = v < n and v == (root[0] if root else p.root)
        face = "white" if v < n else SWITCH
        edge = DARK if v < n else "#9a9a9a"
        if is_root:
            face = root[1] if root else DARK
            edge = face
        axes.add_patch(Circle((float(place.at[0]), float(place.at[1])), place.size, facecolor=face, edgecolor=edge,
                              linewidth=1.4 if big else 0.7, zorder=4))  # fmt: skip
        if shown and (v < n or big):
            word = number_of(t, v) if v < n else t.vertex_label(v).partition("@")[0].replace(" ", "\n")
            points = (13.0 if v < n else 9.0) if big else 6.5
            word_in(axes, place, word, points, bold=v < n, color="white" if is_root else DARK)


def _trees(
    axes: Axes, trees: Sequence[Tree], paint: Sequence[str], spots: Sequence[Position], *, small: bool = False
) -> None:
    """Each edge a curve with an arrow to where its bytes go, dashed on the way up; side by side on a shared link."""
    from matplotlib.collections import LineCollection, PolyCollection

    most = max(float(tree.weight) for tree in trees)
    ways = [[(False, e) for e in tree.edges] + [(True, e) for e in tree.up] for tree in trees]
    crowd = min(1.0, sqrt(40 / max(1, sum(map(len, ways)))))
    sharing: dict[frozenset[int], list[tuple[int, bool, int, int]]] = {}
    for i, some in enumerate(ways):
        for up, e in some:
            sharing.setdefault(_shared(e), []).append((i, up, e.src, e.dst))
    lines: list[Points] = []
    heads: list[Points] = []
    widths, colours, styles = [], [], []
    for i, tree in enumerate(trees):
        thick = (1.2 + 2.6 * float(tree.weight) / most) * (0.55 if small else 1.0)
        for up, e in ways[i]:
            users = sharing[_shared(e)]
            lane = users.index((i, up, e.src, e.dst)) - (len(users) - 1) / 2
            sign = 1 if e.src < e.dst else -1
            line = curve([spots[v] for v in e.path], lane * sign, crowd=len(users))
            size = spots[e.dst].size * (0.5 if small else 0.34) * (0.7 + 0.5 * float(tree.weight) / most)
            lines.append(line)
            heads.append(arrow_head(line, size))
            widths.append(thick * spots[0].scale * crowd)
            colours.append(paint[i])
            styles.append("dashed" if up else "solid")
    axes.add_collection(
        LineCollection(lines, colors=colours, linewidths=widths, linestyles=styles, zorder=2, capstyle="butt")
    )
    axes.add_collection(PolyCollection(heads, facecolors=colours, edgecolors="none", zorder=3))


def _shared(e: Edge) -> frozenset[int]:
    """What an edge shares with others that are drawn beside it: its ends, or, over several switches, these."""
    return frozenset(e.path[1:-1] if len(e.path) > 3 else (e.src, e.dst))


def draw_subsets(found: Sequence[Subset], topology: Topology, pcie_mbps: int, path: str) -> None:
    """Blink's figure: the speed-up of trees over rings on every subset, by size, with the geometric means."""
    check_target(path)
    figure = new_figure(12.5, 7.4)
    panels = figure.subplots(2, 1, sharex=True)
    sizes = by_size(found)
    order = [s for some in sizes.values() for s in some]
    at, x = [], 0.0
    middles: list[tuple[float, int, int]] = []
    for size, some in sizes.items():
        at += [x + i for i in range(len(some))]
        middles.append((x + (len(some) - 1) / 2, size, len(some)))
        x += len(some) + 1.2
    for axes, name in zip(panels, COLLECTIVES, strict=False):
        k = COLLECTIVES.index(name)
        values = [float(s.speedups[k]) for s in order]
        hatched = ["//" if not s.rings else "" for s in order]
        bars = axes.bar(at, values, width=0.78, color=BARS[name], zorder=2)
        for bar, hatch in zip(bars, hatched, strict=True):
            bar.set_hatch(hatch)
            bar.set_edgecolor("white")
            bar.set_linewidth(0.3)
        axes.axhline(1, color=DARK, linewidth=0.8, zorder=3)
        axes.set_ylim(0, max(values) * 1.16)
        axes.set_xlim(-1, max(at) + 1)
        bare(axes, "y")
        axes.set_ylabel(f"{name}\ntrees / rings", fontsize=11)
        for (middle, _, count), some in zip(middles, sizes.values(), strict=True):
            mean = spread(float(s.speedups[k]) for s in some).mean
            ends = [middle - count / 2, middle + count / 2]
            axes.plot(ends, [mean, mean], color=DARK, linewidth=1.4, linestyle=(0, (3, 2)), zorder=4)
            axes.text(middle, max(float(s.speedups[k]) for s in some) + max(values) * 0.03, f"{mean:.2f}",
                      ha="center", fontsize=9, color=DARK)  # fmt: skip
    panels[1].set_xticks(at, [",".join(map(str, s.gpus)) for s in order], rotation=90, fontsize=7)
    panels[1].tick_params(axis="x", length=0)
    panels[0].tick_params(axis="x", length=0)
    for middle, size, count in middles:
        panels[0].text(middle, 1.02, f"{size} GPUs" if count > 1 else str(size), ha="center", fontsize=10,
                       weight="bold", transform=panels[0].get_xaxis_transform())  # fmt: skip
    larger = [s for s in found if len(s.gpus) > 2] or list(found)
    means = "; ".join(
        f"{name} {sp.mean:.2f} (at most {sp.most:.2g})"
        for name, sp in ((c, spread(float(s.speedups[i]) for s in larger)) for i, c in enumerate(COLLECTIVES[:2]))
    )
    head = f"{topology.name}: speed-up of packed trees over rings on {len(found)} unique connected subsets"
    figure.suptitle(head, x=0.06, y=0.985, ha="left", fontsize=14, weight="bold")
    note = f"geometric means from 3 GPUs on: {means}. Hatched: no ring, so PCIe at {pcie_mbps / 1000:g} GB/s instead"
    figure.text(0.06, 0.925, note, fontsize=10, color="#666666")
    figure.subplots_adjust(left=0.06, right=0.99, top=0.86, bottom=0.14, hspace=0.09)
    save(figure, path)


def _colours(count: int) -> list[str]:
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    from matplotlib.colors import to_hex

    turns = [(i * (sqrt(5) - 1) / 2) % 1 for i in range(count)]
    return [to_hex(hsv_to_rgb(h, 0.85, 0.62 + 0.25 * (i % 2))) for i, h in enumerate(turns)]
