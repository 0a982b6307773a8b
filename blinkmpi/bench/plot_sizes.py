"""Draw what ``blinkmpi bench -J`` wrote: time and bus bandwidth against size, ours and the peers', and ratios.

One column for each thing that was measured (collective, type, operation, ranks); files and executors that measured the
same thing share a column. The results of a sweep are drawn against nodes or ranks (:mod:`.sweep.plot_scaling`), or as
the files of its runs if it has only one number of these. matplotlib is an extra: ``pip install 'blinkmpi[plot]'``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..util.figure import COLOURS, DARK, check_target, headed, look_of, new_figure, plain_log_axes, save
from ..util.files import read_json
from ..util.text import brief, plural, quoted, size_text
from .document import with_current_names
from .drawn_fields import why_not
from .sweep import plot_scaling
from .sweep.plot_scaling import LIBRARY_NAMES, OURS
from .sweep.results import is_sweep
from .sweep.results import read as read_sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LIBRARIES = (OURS, "mpi", "nccl", "symm_mem")  # each has its colour
MOST_COLUMNS = 6
TICKS = 7  # sizes named along an axis, at most
RATIO_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 50)
FINE_TICKS = tuple(k / 10 for k in range(1, 31))  # of ratios within a factor of two


@dataclass(frozen=True, slots=True)
class SizeCurve:
    """One library in one block of rows: microseconds and GB/s by size in bytes."""

    column: str
    variant: str  # what tells curves of one library in one column apart: the executor, the file, graphs
    peer: str
    sizes: tuple[int, ...]
    times: tuple[float, ...]
    spread: tuple[tuple[float, float], ...]  # fastest and slowest
    busbw: tuple[float, ...]
    ratios: tuple[float, ...]  # its time over ours; empty for ours


def draw(files: Sequence[str], path: str, *, in_place: bool = False) -> None:
    """Draw the results of ``files`` into ``path``.

    Raises:
        ArgumentError: for a file that is no such result or has nothing to draw, a target that cannot be written, more
            columns than can be read, or without matplotlib.
    """
    check_target(path)
    read = [(Path(name).stem, _read(name)) for name in files]
    runs = [run for _, found in read if is_sweep(found) for run in found["runs"]]
    if runs and all(is_sweep(found) for _, found in read) and plot_scaling.curves_of(runs, in_place=in_place)[1]:
        plot_scaling.draw_scaling(runs, _facts(plot_scaling.documents(read), in_place), path, in_place=in_place)
        return
    documents = plot_scaling.documents(read)
    curves = told_apart([(name, list(curves_of(found, in_place=in_place))) for name, found in documents])
    columns = list(dict.fromkeys(curve.column for curve in curves))
    if not columns:
        raise ArgumentError(f"{', '.join(files)}: no row with a time; give results of blinkmpi bench without -C")
    if len(columns) > MOST_COLUMNS:
        raise ArgumentError(f"{len(columns)} different measurements, of which {MOST_COLUMNS} fit: give fewer files")
    compared = any(curve.ratios for curve in curves)
    rows = 3 if compared else 2
    width, height = 1.2 + max(6.2, 4.6 * len(columns)), 1.9 + 2.6 * rows
    figure = new_figure(width, height)
    heights = [1.25, 1.25, 0.8][:rows]
    panels = figure.subplots(rows, len(columns), sharex="col", sharey="row", squeeze=False, height_ratios=heights)
    styles: dict[str, int] = {}
    for column, axes in zip(columns, panels.T, strict=True):
        some = [curve for curve in curves if curve.column == column]
        for i, variant in enumerate(dict.fromkeys(curve.variant for curve in some)):
            styles.setdefault(variant, i)
        for curve in some:
            _curve(axes, curve, styles[curve.variant])
        _axes(axes, some, column)
    for axes, label in zip(panels[:, 0], ("time (µs)", "bus bandwidth (GB/s)", "peer's time / ours"), strict=False):
        axes.set_ylabel(label, fontsize=10)
    if compared:
        for axes in panels[2]:
            axes.axhline(1, color=DARK, linewidth=0.9, zorder=1)
    facts = f"{_facts(documents, in_place)}; shaded: fastest to slowest"
    below = headed(figure, "Collectives against size", facts, letters=14)
    lines = _legend(figure, curves, styles, y=1 - below / height)
    top = 1 - (below + 0.45 + 0.2 * lines) / height
    figure.subplots_adjust(left=0.85 / width, right=1 - 0.3 / width, top=top, bottom=0.4 / height,
                           hspace=0.12, wspace=0.1)  # fmt: skip
    figure.align_ylabels(panels[:, 0])
    save(figure, path)


def told_apart(files: Sequence[tuple[str, list[SizeCurve]]]) -> list[SizeCurve]:
    """All curves; those of a column that several files share have the file's name in their variant."""
    sharing: dict[str, set[str]] = {}
    for name, curves in files:
        for curve in curves:
            sharing.setdefault(curve.column, set()).add(name)
    return [
        replace(c, variant=", ".join(filter(None, (name, c.variant)))) if len(sharing[c.column]) > 1 else c
        for name, curves in files
        for c in curves
    ]


def curves_of(document: dict[str, Any], *, in_place: bool = False) -> Iterator[SizeCurve]:
    """The curves of one file."""
    place = "in_place" if in_place else "out_of_place"
    blocks = list(_blocks(document["results"]))
    several = len({_executor(block) for block in blocks}) > 1
    for block in blocks:
        rows = [row for row in block if row["size"] > 0 and "time" in row[place]]
        if not rows:
            continue
        first = rows[0]
        words = [first["experiment_name"].rsplit("_", 2)[0], first["type"]]
        words += [first["redop"]] if first["redop"] != "none" else []
        words += [f"from {first['root']}"] if first["root"] > 0 else []
        column = f"{' '.join(words)}, {plural(document['blinkmpi']['ranks'], 'rank')}"
        column += ", emulated" if first["blinkmpi"].get("emulated") else ""
        parts = [_executor(block)] if several else []
        parts += ["graph"] if document["config"].get("graph") else []
        yield _curve_of(rows, place, column, ", ".join(parts))
        for peer in document["blinkmpi"].get("compare") or []:
            measured = [row for row in rows if row["blinkmpi"][place]["compare"].get(peer)]
            if measured:
                yield _curve_of(measured, place, column, ", ".join(parts), peer)


def _curve_of(rows: Sequence[dict[str, Any]], place: str, column: str, variant: str, peer: str = OURS) -> SizeCurve:
    """The curve of a library: ours, or a peer's from what stands beside each of our rows."""
    beside = [row["blinkmpi"][place] if peer == OURS else row["blinkmpi"][place]["compare"][peer] for row in rows]
    ratios = () if peer == OURS else tuple(one["ratio"] for one in beside)
    return SizeCurve(
        column, variant, peer, tuple(row["size"] for row in rows),
        tuple((row[place] if peer == OURS else one)["time"] for row, one in zip(rows, beside, strict=True)),
        tuple((one["times_us"]["min"], one["times_us"]["max"]) for one in beside),
        tuple(row[place]["bus_bw"] / one.get("ratio", 1) for row, one in zip(rows, beside, strict=True)), ratios,
    )  # fmt: skip


def _blocks(results: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Rows that belong together: one experiment and root, sizes that grow; a run has a block for each executor."""
    rows: list[dict[str, Any]] = []
    for row in results:
        key = (row["experiment_name"], row["root"])
        if rows and (key != (rows[-1]["experiment_name"], rows[-1]["root"]) or row["size"] <= rows[-1]["size"]):
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def _executor(rows: Sequence[dict[str, Any]]) -> str:
    """What ran a block besides MPI."""
    names = dict.fromkeys(str(row["blinkmpi"].get("executor")) for row in rows)
    return "+".join(name for name in names if name != "mpi") or "mpi"


def _read(name: str) -> dict[str, Any]:
    try:
        document = with_current_names(read_json(name))
    except OSError as error:
        raise ArgumentError(
            f"cannot read {quoted(name)}: {error.strerror}; give a file that blinkmpi bench -J wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        why = brief(str(error))
        raise ArgumentError(f"{quoted(name)} is no result of blinkmpi bench ({why}); write one with -J") from error
    if is_sweep(document):
        return read_sweep(name)
    if why := why_not(document):
        raise ArgumentError(f"{quoted(name)} is no result of blinkmpi bench ({brief(why)}); write one with -J")
    found: dict[str, Any] = document
    return found


def _curve(axes: Any, curve: SizeCurve, variant: int) -> None:
    look = {
        "color": COLOURS[LIBRARIES.index(curve.peer)],
        **look_of(variant),
        "markersize": 4.2,
        "linewidth": 1.7 if curve.peer == OURS else 1.3,
        "zorder": 4 if curve.peer == OURS else 3,
    }
    axes[0].plot(curve.sizes, curve.times, **look)
    low, high = zip(*curve.spread, strict=True)
    axes[0].fill_between(curve.sizes, low, high, color=look["color"], alpha=0.12, linewidth=0, zorder=2)
    axes[1].plot(curve.sizes, curve.busbw, **look)
    if curve.ratios:
        axes[2].plot(curve.sizes, curve.ratios, **look)


def _axes(panels: Sequence[Axes], curves: Sequence[SizeCurve], title: str) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    sizes = sorted({size for curve in curves for size in curve.sizes})
    panels[0].set_title(title, fontsize=11, weight="bold", pad=6)
    for i, axes in enumerate(panels):
        rates = [rate for curve in curves for rate in curve.busbw] if i == 1 else None
        plain_log_axes(axes, sizes[:: -(-len(sizes) // TICKS)], lambda value: size_text(int(value)), rates)
        if i == 2:
            ratios = [ratio for curve in curves for ratio in curve.ratios]
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_locator(FixedLocator(FINE_TICKS if max(ratios) < 2 * min(ratios) else RATIO_TICKS))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panels[-1].tick_params(axis="x", rotation=0, labelsize=8)


def _legend(figure: Any, curves: Sequence[SizeCurve], styles: dict[str, int], *, y: float) -> int:
    """Colours for libraries, lines for variants where there are any; the number of lines that it takes."""
    from matplotlib.lines import Line2D

    there = [name for name in LIBRARIES if any(curve.peer == name for curve in curves)]
    handles = [
        Line2D([], [], color=COLOURS[LIBRARIES.index(name)], linewidth=2.4, label=LIBRARY_NAMES.get(name, name))
        for name in there
    ]
    if any(styles):
        handles += [
            Line2D([], [], color=DARK, linewidth=1.2, markersize=4.2, label=variant or "otherwise", **look_of(i))
            for variant, i in styles.items()
        ]
    columns = max(1, int(figure.get_figwidth() / 1.5))
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.5 / figure.get_figwidth(), y), ncols=columns,
                  frameon=False, fontsize=9, handlelength=2.6, borderaxespad=0.0, columnspacing=1.6)  # fmt: skip
    return -(-len(handles) // columns)


def _facts(documents: Sequence[tuple[str, dict[str, Any]]], in_place: bool) -> str:
    """Where and of what: the machine, the date and the commit of the files, each once."""
    seen: dict[str, None] = {}
    for _, found in documents:
        ours = found["blinkmpi"]
        name = (ours.get("gpu") or {}).get("name") or (ours.get("hardware") or {}).get("cpu") or "unknown machine"
        seen[f"{name}, {str(ours.get('date') or '?')[:10]}, commit {str(ours.get('commit') or '?')[:12]}"] = None
    place = "in place" if in_place else "out of place"
    return f"{'; '.join(list(seen)[:2])}{' and others' if len(seen) > 2 else ''}; {place}"
