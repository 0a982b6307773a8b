"""Draw the scaling curves of a sweep: bus bandwidth and time against the number of nodes or ranks.

One column for each thing that was measured (collective, type, operation). A colour is a size, a line is a library, a
scheme or a number of ranks on each node; with many of these each size has panels of its own. What was measured on one
number of ranks alone has no such curve.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ArgumentError
from ...util.figure import COLOURS, DARK, headed, look_of, new_figure, plain_log_axes, save
from ...util.text import plural, size_text
from .file import node_sizes
from .results import is_sweep, rows

OURS = "blinkmpi"
LIBRARY_NAMES = {"mpi": "MPI", "nccl": "NCCL", "symm_mem": "torch symm_mem"}
MOST_COLUMNS = 5
MOST_VARIANTS = 3  # with more, each size has panels of its own
TIME, RATE = 1, 2  # of a point
SIZE_COLOURS = ("#440154", "#31688e", "#1f9e89", "#6abf3b", "#d9a406")  # from small to large, all dark enough on white


@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """One line of a column: (x, microseconds, GB/s) in the order of x."""

    column: str
    variant: str
    size: int
    points: tuple[tuple[int, float, float], ...]


def curves_of(runs: Sequence[Mapping[str, Any]], *, in_place: bool = False) -> tuple[str, list[ScalingCurve]]:
    """What x is, ``nodes`` or ``ranks``, and all lines with two points or more."""
    place = "in_place" if in_place else "out_of_place"
    measured = list(rows(runs, place=place))
    keys = [key for key, _ in measured]
    even = all(len(set(node_sizes(key["virtual"]))) <= 1 for key in keys)
    x = "nodes" if even and len({key["nodes"] for key in keys}) > 1 else "ranks"
    several = {part: len({key[part] for key in keys}) > 1 for part in ("scheme", "executor", "graph")}
    each = len({key["ranks"] // key["nodes"] for key in keys}) > 1 and x == "nodes"
    kinds = len({bool(key["virtual"]) for key in keys if key["nodes"] > 1}) > 1
    found: dict[tuple[str, str, int], dict[int, tuple[float, float]]] = {}
    for key, row in measured:
        column = " ".join(filter(None, (key["collective"], row["type"], key["op"])))
        column += f" from {row['root']}" if row["root"] > 0 else ""
        more = [str(key[part]) for part in ("scheme", "executor") if several[part]]
        more += [f"graph {key['graph']}" if key["graph"] else "no graph"] if several["graph"] else []
        more += [f"{plural(key['ranks'] // key['nodes'], 'rank')} a node"] if each else []
        more += ["virtual" if key["virtual"] else "real nodes"] if kinds and x == "nodes" and key["nodes"] > 1 else []
        ours, time = row[place], row[place]["time"]
        compare = row["blinkmpi"][place]["compare"]
        libraries = [(OURS, time, ours["bus_bw"])]
        libraries += [
            (LIBRARY_NAMES.get(p, p), c["time"], ours["bus_bw"] / c["ratio"]) for p, c in compare.items() if c
        ]
        for library, microseconds, rate in libraries:
            own = [part for part in more if library == OURS or part not in (key["scheme"], key["executor"])]
            variant = ", ".join((library, *own))
            points = found.setdefault((column, variant, row["size"]), {})
            points.setdefault(key[x], (microseconds, rate))  # a library beside several schemes: its first time
    made = [ScalingCurve(c, v, s, tuple((at, *p) for at, p in sorted(ps.items()))) for (c, v, s), ps in found.items()]
    return x, [line for line in made if len(line.points) > 1]


def documents(files: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """What ``bench`` wrote, with a name for each: a file's own, or in a sweep the parameters that differ."""
    found = []
    for name, body in files:
        if not is_sweep(body):
            found.append((name, body))
            continue
        good = [run for run in body["runs"] if run["status"] == "ok"]
        varied = [
            p for p in ("scheme", "executor", "virtual", "graph") if len({str(run["key"][p]) for run in good}) > 1
        ]
        for run in good:
            words = [_said(part, run["key"][part]) for part in varied]
            found.append((", ".join(filter(None, words)) or name, run["result"]))
    return found


def _said(part: str, value: Any) -> str:
    if part == "graph":
        return f"graph {value}" if value else "no graph"
    return f"nodes {value}" if part == "virtual" and value else str(value)


def chosen(sizes: Sequence[int], most: int) -> list[int]:
    """The sizes that are drawn: the smallest, the largest and ``most`` - 2 between."""
    ordered = sorted(sizes)
    if len(ordered) <= most:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (most - 1))] for i in range(most)]


def draw_scaling(runs: Sequence[Mapping[str, Any]], facts: str, path: str, *, in_place: bool = False) -> None:
    """Draw the curves of all ``runs`` into ``path``.

    Raises:
        ArgumentError: if there is nothing to draw, or too much.
    """
    x, found = curves_of(runs, in_place=in_place)
    columns = list(dict.fromkeys(line.column for line in found))
    if not columns:
        raise ArgumentError("no size was measured on two numbers of nodes or ranks: a curve needs more runs")
    if len(columns) > MOST_COLUMNS:
        raise ArgumentError(f"{len(columns)} different measurements, of which {MOST_COLUMNS} fit: sweep fewer at once")
    variants = list(dict.fromkeys(line.variant for line in found))
    by_size = len(variants) > MOST_VARIANTS
    sizes = chosen(sorted({line.size for line in found}), 3 if by_size else 5 if len(variants) == 1 else 4)
    found = [line for line in found if line.size in sizes]
    width, height = 1.2 + max(6.4, 4.4 * len(columns)), 2.4 + 2.5 * (len(sizes) if by_size else 2)
    figure = new_figure(width, height)
    panels = figure.subplots(len(sizes) if by_size else 2, len(columns), sharex=True, sharey="row", squeeze=False)
    for column, axes in zip(columns, panels.T, strict=True):
        for line in (line for line in found if line.column == column):
            size, variant = sizes.index(line.size), variants.index(line.variant)
            if by_size:
                _line(axes[size], line, RATE, COLOURS[variant % len(COLOURS)], variant)
            else:
                _line(axes[0], line, RATE, _colour(size, len(sizes)), variant)
                _line(axes[1], line, TIME, _colour(size, len(sizes)), variant)
        axes[0].set_title(column, fontsize=11, weight="bold", pad=6)
        axes[-1].set_xlabel(x, fontsize=10)
    places = sorted({point[0] for line in found for point in line.points})
    for i, axes in enumerate(panels):
        what = TIME if not by_size and i == 1 else RATE
        _axes(axes, [p[what] for line in found for p in line.points if not by_size or line.size == sizes[i]], places)
        name = "time (µs)" if what == TIME else "bus bandwidth (GB/s)"
        axes[0].set_ylabel(f"{size_text(sizes[i])}: {name}" if by_size else name, fontsize=9 if by_size else 10)
    below = 0.02 + headed(figure, f"Collectives against the number of {x}", facts, letters=13.5)
    rows_of_legend = _legend(figure, () if by_size else sizes, variants, y=1 - below / height)
    top = 1 - (below + 0.42 + 0.2 * rows_of_legend) / height
    figure.subplots_adjust(left=0.85 / width, right=1 - 0.3 / width, top=top, bottom=0.62 / height,
                           hspace=0.09, wspace=0.09)  # fmt: skip
    figure.align_ylabels(panels[:, 0])
    save(figure, path)


def _colour(at: int, count: int) -> str:
    return SIZE_COLOURS[round(at * (len(SIZE_COLOURS) - 1) / max(1, count - 1))] if count > 1 else SIZE_COLOURS[1]


def _line(axes: Any, line: ScalingCurve, what: int, colour: str, variant: int) -> None:
    points = [point for point in line.points if point[what] > 0]  # a rank alone has no bus
    axes.plot([point[0] for point in points], [point[what] for point in points], color=colour, markersize=4.4,
              linewidth=1.3 if variant else 1.8, zorder=3 if variant else 4, **look_of(variant))  # fmt: skip


def _axes(row: Any, found: Sequence[float], places: Sequence[int]) -> None:
    for axes in row:
        plain_log_axes(axes, places, lambda value: f"{value:g}", [value for value in found if value > 0])
        axes.set_xlim(places[0] / 1.12, places[-1] * 1.12)


def _legend(figure: Any, sizes: Sequence[int], variants: Sequence[str], *, y: float) -> int:
    """Colours for sizes in one row, lines for variants in the next; the number of rows."""
    from matplotlib.lines import Line2D

    width = figure.get_figwidth()
    height = figure.get_figheight()
    colours = [
        Line2D([], [], color=_colour(i, len(sizes)), linewidth=2.6, label=size_text(size))
        for i, size in enumerate(sizes)
    ]
    looks = [
        Line2D([], [], color=DARK if sizes else COLOURS[i % len(COLOURS)], linewidth=1.3, markersize=4.4, label=variant,
               **look_of(i))
        for i, variant in enumerate(variants)
    ]  # fmt: skip
    used = 0
    for handles in filter(None, (colours, looks)):
        longest = max(len(str(handle.get_label())) for handle in handles)
        across = max(1, int((width - 0.8) / (0.9 + 0.075 * longest)))
        legend = figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.5 / width, y - 0.2 * used / height),
                               ncols=across, frameon=False, fontsize=9, handlelength=2.8, borderaxespad=0.0,
                               columnspacing=1.6)  # fmt: skip
        figure.add_artist(legend)
        used += -(-len(handles) // across)
    return used
