"""The bar on stderr: shown on a terminal alone."""

import io
import sys

import pytest

from blinkmpi.util.progress import StderrBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with StderrBar(4, done=1) as progress:
        assert progress.bar is not None
        progress.update(completed=2, description="copies")
        (task,) = progress.bar.tasks
        assert (task.completed, task.total, task.description) == (2, 4, "copies")
    assert progress.bar.finished is False
    with StderrBar(4, shown=False) as hidden:
        assert hidden.bar is None


def test_elsewhere_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with StderrBar() as progress:
        progress.update(completed=1)
        assert progress.bar is None
