"""Where the commands' answers go, to the screen or a file, and their errors: from rank 0 alone."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, BlinkError
from ..util.launcher import launched_rank
from ..util.text import brief

LONGEST_ERROR = 2000  # letters; what a file of the user has in it may be longer
WIDEST = 1 << 16  # columns of any table
LONGEST_WORD = 30  # in a column that wraps; longer ones, such as a rank's many children, are folded


def own_rank() -> int:
    """This process's rank, from the launcher, so that a machine from a file needs no MPI."""
    return launched_rank(os.environ) or 0


def mpi() -> tuple[Any, str]:
    """mpi4py's module, or None and why it cannot be imported."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return None, str(error)
    from ..util.singleton import remove_segment_at_exit

    remove_segment_at_exit()
    return MPI, ""


def fail(error: BlinkError) -> int:
    """Say what went wrong; the exit code."""
    if own_rank() == 0:
        print(f"blinkmpi: error: {brief(str(error), LONGEST_ERROR)}", file=sys.stderr)
    else:
        time.sleep(1)  # mpirun ends the job at the first failure: rank 0 speaks before that
    return 2


def or_fail(answer: Callable[[], int]) -> int:
    """The exit code of ``answer``, or that of the error which it raises."""
    try:
        return answer()
    except BlinkError as error:
        return fail(error)


def by_rank_0(world: Any, work: Callable[[], int]) -> int:
    """Do ``work`` on rank 0 and give every rank its exit code, 1 if it fails; collective."""
    from ..util.together import bcast

    code = 1
    if world.rank != 0:
        return bcast(world, None, int)
    try:
        code = work()
    finally:
        bcast(world, code, int)
    return code


def write(path: str, text: str) -> None:
    """Write a file.

    Raises:
        ArgumentError: if that is impossible.
    """
    if own_rank() != 0:
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"cannot write {path!r}: {error.strerror}; give a path in a folder that exists") from error


def show(thing: Any, *, stderr: bool = False) -> None:
    """Print with rich: 100 columns where no terminal says otherwise."""
    from rich.console import Console

    from ..util.screen import console

    class Screen(Console):
        """A console that leaves a reader who has gone to the command."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    screen = console(Screen, stderr=stderr, width=shutil.get_terminal_size((100, 25)).columns)
    _keep_whole(screen, thing)
    screen.print(thing, crop=False)


def _keep_whole(screen: Any, thing: Any) -> None:
    """Let tables be wider than the screen rather than cut what must not wrap, such as numbers, and words."""
    from rich.console import Group
    from rich.table import Table

    if isinstance(thing, Group):
        for part in thing.renderables:
            _keep_whole(screen, part)
    elif isinstance(thing, Table):
        for column in thing.columns:
            widths = [screen.measure(cell) for cell in (column.header, *column.cells)]
            word = min(LONGEST_WORD, max(width.minimum for width in widths))
            least = max(width.maximum for width in widths) if column.no_wrap else word
            column.min_width = max(column.min_width or 0, least)
        needed = screen.measure(thing, options=screen.options.update(width=WIDEST)).minimum
        if needed > screen.width:
            thing.width = needed
