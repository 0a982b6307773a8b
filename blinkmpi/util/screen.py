"""Consoles of rich, and whether a terminal shows what this process writes, also where MPI's launcher lies between."""

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from .launcher import launched_rank

if TYPE_CHECKING:
    from rich.console import Console

PROC = Path("/proc")


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a terminal shows what is written to stdout or stderr.

    Open MPI gives each rank a terminal of its own, also where mpirun's own output goes to a file: there it is what the
    launcher writes to that counts.
    """
    if stream is None or not stream.isatty():
        return False
    if launched_rank(os.environ) is None:
        return True
    launcher = _launcher(os.getppid())
    try:
        at = (PROC / str(launcher) / "fd" / str(stream.fileno())).resolve(strict=True)
        return stat.S_ISCHR(at.stat().st_mode) and at.parts[:3] != ("/", "dev", "null")
    except OSError:  # gone, or another user's
        return False


def _launcher(pid: int) -> int:
    """The first of this process's ancestors that is no rank itself, nor started by one; 0 if that cannot be seen."""
    while pid > 1:
        try:
            variables = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace").split("\0")
            if launched_rank(dict(one.partition("=")[::2] for one in variables)) is None:
                return pid
            status = (PROC / str(pid) / "stat").read_text()
        except OSError:
            return 0
        pid = int(status.rpartition(")")[2].split()[1])  # behind the name, which may hold anything: state, parent
    return 0


def plain(stream: TextIO | None, environ: Mapping[str, str]) -> bool:
    """Whether text goes there without any styling: NO_COLOR wants none, FORCE_COLOR some, and so do terminals."""
    if environ.get("NO_COLOR"):
        return True
    return not environ.get("FORCE_COLOR") and not is_terminal(stream)


def console(kind: type[Any] | None = None, *, stderr: bool = False, **options: Any) -> "Console":
    """A console of rich, of a kind of one's own if need be; in what no terminal shows nothing is styled."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if plain(stream, os.environ):
        options |= {"color_system": None, "force_terminal": is_terminal(stream)}
    made: Console = (kind or Console)(stderr=stderr, highlight=False, **options)
    return made
