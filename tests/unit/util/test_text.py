"""How ranks, counts, bytes and seconds read, and what launchers say of a process."""

import pytest

from blinkmpi.errors import ArgumentError
from blinkmpi.util.launcher import launched_rank, launched_size
from blinkmpi.util.text import parse_size, plural, ranks_text, size_text, time_text


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
    assert [size_text(n) for n in (7, 1000, 1 << 16, 3 << 19, 1 << 30)] == [
        "7 bytes", "1000 bytes", "64 KiB", "1.5 MiB", "1 GiB",
    ]  # fmt: skip
    assert [time_text(s) for s in (2.0, 0.0123, 850e-6)] == ["2 s", "12.3 ms", "850 us"]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([0, 2], "ranks 0, 2"), (range(8), "ranks 0-7")],
)
def test_ranks_are_named_in_runs(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


@pytest.mark.parametrize(
    ("environ", "rank", "size"),
    [
        ({}, None, 1),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, 1, 4),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, 0, 2),
        ({"PMIX_RANK": "3", "SLURM_STEP_NUM_TASKS": "8"}, 3, 8),
        ({"PMI_RANK": "", "PMI_SIZE": "many"}, None, 1),
    ],
)
def test_a_launcher_tells_rank_and_size(environ: dict[str, str], rank: int | None, size: int) -> None:
    assert launched_rank(environ) == rank
    assert launched_size(environ) == size
