"""What all pictures share: a figure, its colours, and the file that it is written to.

matplotlib is imported inside the functions that draw, since it is an extra: ``pip install 'blinkmpi[plot]'``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".svg", ".png", ".pdf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b3294", "#8c6d31", "#a50f15", "#525252")
DARK, SWITCH = "#333333", "#f2f2f2"
STYLES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")


def check_target(path: str) -> None:
    """Check that a picture can be written before the work for it begins.

    Raises:
        ArgumentError: for another ending, or without matplotlib.
    """
    if Path(path).suffix.lower() not in ENDINGS:
        raise ArgumentError(f"cannot draw {path!r}: expected a name that ends in {', '.join(ENDINGS)}; rename it")
    if not Path(path).absolute().parent.is_dir():
        raise ArgumentError(f"cannot write {path!r}: no such folder; give a path in a folder that exists")
    new_figure(1, 1)


def new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError(f"pictures need matplotlib ({error}); pip install 'blinkmpi[plot]'") from error
    return Figure(figsize=(width, height))


def save(figure: Figure, path: str) -> None:
    """Write the picture; equal pictures are equal files."""
    from matplotlib import rc_context

    vector = Path(path).suffix.lower() != ".png"
    try:
        with rc_context({"svg.hashsalt": "blinkmpi", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=150, metadata=_dateless(path) if vector else None)
    except OSError as error:
        raise ArgumentError(f"cannot write {path!r}: {error.strerror}; give a path that can be written") from error


def _dateless(path: str) -> dict[str, Any]:
    return {"Date": None} if path.lower().endswith(".svg") else {"CreationDate": None}


def look_of(variant: int) -> dict[str, Any]:
    """Line style and marker of a variant."""
    return {"linestyle": STYLES[variant % len(STYLES)], "marker": MARKERS[variant % len(MARKERS)]}


def headed(figure: Figure, title: str, facts: str, *, letters: float) -> float:
    """Write title and facts, wrapped to so many letters an inch; the inches that they take."""
    width, height = figure.get_size_inches()
    figure.suptitle(title, x=0.6 / width, y=1 - 0.16 / height, ha="left", va="top", fontsize=14, weight="bold")
    lines = textwrap.wrap(facts, int(letters * (width - 0.9)))
    figure.text(0.6 / width, 1 - 0.50 / height, "\n".join(lines), fontsize=9, color="#666666", va="top")
    return 0.60 + 0.16 * len(lines)


def plain_log_axes(
    axes: Axes, at: Sequence[float], text: Callable[[float], str], rates: Sequence[float] | None = None
) -> None:
    """Logarithmic axes, ticks ``at`` these places along x, named by ``text``; ticks of rates at 1, 2, 5, or 1 alone."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(at)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axes.set_yscale("log")
    if rates is not None:
        wide = max(rates, default=1) > 300 * min(rates, default=1)
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1,) if wide else (1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    bare(axes)
    axes.tick_params(labelsize=8.5)


def bare(axes: Axes, grid: str = "both") -> None:
    """A light grid behind the data, and no frame above and to the right."""
    axes.grid(axis=grid, color="#e8e8e8", zorder=0)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
