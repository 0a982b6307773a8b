"""How ranks, counts, bytes and seconds read, what launchers say of a process, and the bar on stderr."""

import io
import sys

import pytest

from blinkmpi.errors import ArgumentError
from blinkmpi.util.launcher import launched_rank, launched_size
from blinkmpi.util.progress import StderrBar
from blinkmpi.util.text import error_text, parse_size, plural, ranks_text, size_text, time_text


@pytest.mark.parametrize(
    ("text", "size"), [("64K", 65536), ("256M", 1 << 28), ("1.5m", 3 << 19), ("4G", 1 << 32), ("7", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "-1", "64X", "1e400", "nan"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ArgumentError, match="such as 65536, 64K"):
        parse_size(text)


def test_numbers_and_nouns() -> None:
    assert [plural(n, "rank") for n in (0, 1, 8)] == ["0 ranks", "1 rank", "8 ranks"]
    sizes = {0: "0 bytes", 7: "7 bytes", 1000: "1000 bytes", 1 << 10: "1 KiB", 1536: "1.5 KiB", 1 << 16: "64 KiB"}
    sizes |= {1 << 20: "1 MiB", 3 << 19: "1.5 MiB", 1 << 30: "1 GiB"}
    assert {n: size_text(n) for n in sizes} == sizes
    times = {2e-6: "2 us", 8.5e-4: "850 us", 0.0123: "12.3 ms", 1.5: "1.5 s", 2.0: "2 s"}
    assert {t: time_text(t) for t in times} == times


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([0, 2], "ranks 0, 2"), (range(8), "ranks 0-7")],
)
def test_ranks_are_named_in_runs(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_errors_have_a_name_and_perhaps_a_message() -> None:
    assert [error_text(e) for e in (ValueError("no device"), KeyboardInterrupt())] == [
        "ValueError: no device", "KeyboardInterrupt",
    ]  # fmt: skip


@pytest.mark.parametrize(("environ", "rank", "size"), [
    ({}, None, 1),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, 1, 4),
    ({"PMI_RANK": "0", "PMI_SIZE": "2"}, 0, 2),
    ({"PMIX_RANK": "3", "SLURM_STEP_NUM_TASKS": "8"}, 3, 8),
    ({"PMI_RANK": "", "PMI_SIZE": "many"}, None, 1),
])  # fmt: skip
def test_a_launcher_tells_rank_and_size(environ: dict[str, str], rank: int | None, size: int) -> None:
    assert launched_rank(environ) == rank
    assert launched_size(environ) == size


# ---------------------------------------------------------------- the bar on stderr


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


@pytest.mark.slow
def test_elsewhere_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with StderrBar() as progress:
        progress.update(completed=1)
        assert progress.bar is None
