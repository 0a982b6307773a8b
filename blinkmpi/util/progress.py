"""A progress bar on stderr, where that is a terminal."""

import sys
from types import TracebackType
from typing import Any, Self

from .screen import console, is_terminal


class StderrBar:
    """A context with a bar for ``total`` steps (None: not known yet); ``bar`` is None where no terminal shows it."""

    def __init__(self, total: int | None = None, *, done: int = 0, shown: bool = True) -> None:
        self.total, self.done = total, done
        self.shown = shown
        self.bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self.shown and is_terminal(sys.stderr):
            from rich import progress

            self.bar = progress.Progress(
                progress.MofNCompleteColumn(), progress.BarColumn(), progress.TimeElapsedColumn(),
                progress.TextColumn("{task.description}", markup=False),
                console=console(stderr=True), transient=True,
            )  # fmt: skip
            self.bar.start()
            self._task = self.bar.add_task("", total=self.total, completed=self.done)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, **changes: Any) -> None:
        """Set ``completed``, ``total`` or ``description`` of the bar."""
        if self.bar is not None:
            self.bar.update(self._task, **changes)
