"""What all pictures share: a figure, its colours, and the file that it is written to.

matplotlib is imported inside the functions that draw, since it is an extra: ``pip install blinkmpi[plot]``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".svg", ".png", ".pdf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b3294", "#8c6d31", "#a50f15", "#525252")
DARK, SWITCH = "#333333", "#f2f2f2"


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
        raise ArgumentError(f"pictures need matplotlib ({error}); pip install blinkmpi[plot]") from error
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
