"""The picture of a machine: devices, switches, and every link in the colour of its kind, as wide as its rate.

The layout is :mod:`.layout`'s; matplotlib is an extra, imported when something is drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from math import hypot, sqrt
from typing import TYPE_CHECKING

import numpy as np

from ..topology.model import Link, Topology
from ..trees.graph.fabric import fabric
from ..util.figure import DARK, SWITCH, check_target, new_figure, save
from .layout import Position, curve, extent, framed, number_of, places

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {"nvlink": "#2e8b57", "xgmi": "#c0392b", "c2c": "#7cb342", "pcie": "#d99a00", "host": "#9b4f96",
         "memory": "#1a9ba8", "net": "#2f6fb5"}  # fmt: skip
MOST_LABELS = 80
CROWD = 60  # links, from which on their lines are thinner
LEAST_NAME = 4.5  # points of a frame's name
LEAST_POINTS = 2.5  # of a word in a circle, which a picture on a screen can be enlarged for
LABEL_AT = 0.36  # along a link: at the middle the labels of crossing links would meet
WIDTH, HEAD, FOOT = 9.8, 0.95, 0.55  # inches; for title and legend
FLAT = 0.5  # the height of a machine in its width, from which down a picture is wider


def draw_machine(topology: Topology, path: str) -> None:
    """Draw the machine with all its links.

    Raises:
        ArgumentError: for an ending that is no picture's, without matplotlib, or where the file cannot be written.
    """
    check_target(path)
    save(machine_figure(topology), path)


def machine_figure(topology: Topology) -> Figure:
    """The picture, before it is written."""
    from matplotlib.lines import Line2D

    t = topology
    spots = places(fabric(t, t.kinds()))
    low, high = extent(spots)
    part = float((high[1] - low[1]) / (high[0] - low[0]))
    width = float(np.clip(WIDTH * FLAT / part, WIDTH, 1.6 * WIDTH))
    height = float(np.clip((width - 0.4) * part, 3.0, 9.0))
    inches = height + HEAD + FOOT
    figure = new_figure(width, inches)
    axes = figure.add_axes((0.015, FOOT / inches, 0.97, height / inches))
    _links(axes, t, spots)
    _vertices(axes, t, spots)
    kinds = t.kinds()
    handles = [Line2D([], [], color=KINDS[kind], linewidth=3) for kind in kinds]
    figure.legend(handles, [_legend(t, kind) for kind in kinds], loc="lower left", ncols=min(3, max(1, len(kinds))),
                  frameon=False, fontsize=9, bbox_to_anchor=(0.01, 0.0))  # fmt: skip
    figure.text(0.02, 1 - 0.40 / inches, t.name, fontsize=15, weight="bold")
    lines = textwrap.wrap(t.source, 135)
    shown = "\n".join([*lines[:1], textwrap.shorten(" ".join(lines[1:]), 135, placeholder=" ...")] if lines else [])
    figure.text(0.02, 1 - 0.50 / inches, shown, fontsize=8.5, color="#666666", va="top")
    return figure


def _links(axes: Axes, t: Topology, spots: Sequence[Position]) -> None:
    """One line for both directions if they are equal; the number of lanes where links of a kind differ in it."""
    from matplotlib.collections import LineCollection

    most = max((k.mbps for k in t.links), default=1)
    back = {(k.dst, k.src, k.kind): k.mbps for k in t.links}
    shown = [k for k in t.links if k.src < k.dst or back.get((k.src, k.dst, k.kind)) != k.mbps]
    pairs: dict[frozenset[int], list[Link]] = {}
    for k in shown:
        pairs.setdefault(frozenset((k.src, k.dst)), []).append(k)
    varied = {kind for kind in t.kinds() if len({k.lanes for k in t.links if k.kind == kind}) > 1}
    thin = spots[0].scale * min(1.0, sqrt(CROWD / max(1, len(pairs))))
    for links in pairs.values():
        for lane, k in enumerate(links):
            line = curve([spots[k.src], spots[k.dst]], lane - (len(links) - 1) / 2, crowd=len(links))
            colour = KINDS[k.kind]
            wide = (1.2 + 5.0 * k.mbps / most) * thin
            axes.add_collection(LineCollection([line], colors=[colour], linewidths=[wide], alpha=0.8, zorder=2))
            if k.lanes > 1 and k.kind in varied and len(pairs) <= MOST_LABELS:
                x, y = line[int(len(line) * LABEL_AT)]
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
                axes.text(x, y, str(k.lanes), fontsize=8 * spots[0].scale, color=colour, ha="center", va="center",
                          zorder=3, bbox=box)  # fmt: skip


def _vertices(axes: Axes, t: Topology, spots: Sequence[Position]) -> None:
    """Devices with their numbers, switches with their names, frames around what belongs together."""
    from matplotlib.patches import Circle

    stage(axes, t, spots, named=True)
    for v, place in enumerate(spots):
        if place.at is None:
            continue
        x, y = float(place.at[0]), float(place.at[1])
        face, edge = ("white", DARK) if v < t.n else (SWITCH, "#9a9a9a")
        axes.add_patch(Circle((x, y), place.size, facecolor=face, edgecolor=edge, linewidth=1.4, zorder=4))
        if v < t.n:
            word, points = number_of(t, v), 13.0
        else:
            word, points = t.vertex_label(v).partition("@")[0].replace(" ", "\n"), 9.0
        word_in(axes, place, word, points, bold=v < t.n)


def word_in(axes: Axes, place: Position, word: str, points: float, *, bold: bool, color: str = DARK) -> None:
    """Write a word into a circle, as large as it or two figures fit; not at all where it could not be read."""
    assert place.at is not None  # words are written where something was drawn
    x, y = float(place.at[0]), float(place.at[1])
    text = axes.text(x, y, word.rjust(2, "0"), ha="center", va="center", zorder=5, fontsize=points, color=color,
                     weight="bold" if bold else "normal")  # fmt: skip
    box = text.get_window_extent()
    ends = axes.transData.transform([(x - place.size, y), (x + place.size, y)])
    part = 0.84 * float(ends[1][0] - ends[0][0]) / hypot(box.width, box.height)
    text.set_text(word)
    text.set_fontsize(points * min(part, 1))
    if points * min(part, 1) < LEAST_POINTS:
        text.remove()


def stage(axes: Axes, t: Topology, spots: Sequence[Position], *, named: bool) -> None:
    """The empty picture: axes as large as the machine, frames around what belongs together."""
    from matplotlib.patches import FancyBboxPatch

    size, (low, high) = spots[0].size, extent(spots)
    for (corner, sides), name in framed(t, spots):
        axes.add_patch(FancyBboxPatch(corner, *sides, boxstyle=f"round,pad=0,rounding_size={size}",
                                      facecolor="#fafafa", edgecolor="#e3e3e3", zorder=0))  # fmt: skip
        if named:
            x, y = corner[0] + size, corner[1] + sides[1] - 0.25 * size
            points = max(LEAST_NAME, 9 * spots[0].scale)
            axes.text(x, y, name, ha="left", va="top", fontsize=points, color="#999999",
                      bbox={"facecolor": "#fafafa", "edgecolor": "none", "pad": 0.5})  # fmt: skip
    axes.set_xlim(low[0], high[0])
    axes.set_ylim(low[1], high[1])
    axes.set_aspect("equal")
    axes.axis("off")
    axes.apply_aspect()  # so that words can be measured


def _legend(t: Topology, kind: str) -> str:
    """``nvlink: 1-2 x 25 GB/s (table)``."""
    links = [k for k in t.links if k.kind == kind]
    lanes, rates = sorted({k.lanes for k in links}), sorted({k.lane_mbps / 1000 for k in links})
    count = "-".join(map(str, dict.fromkeys((lanes[0], lanes[-1]))))
    each = "-".join(f"{r:g}" for r in dict.fromkeys((rates[0], rates[-1])))
    return f"{kind}: {count} x {each} GB/s ({', '.join(sorted({k.origin for k in links}))})"
