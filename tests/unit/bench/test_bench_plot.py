"""Pictures of results: which curves a file holds, how several are told apart, and that they are drawn."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from blinkmpi.bench.plot_sizes import MOST_COLUMNS, OURS, curves_of, told_apart
from blinkmpi.cli import main as cli

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"


def row(size: int, *, name: str = "all_reduce", executor: str = "c", peers: dict[str, float] | None = None) -> Any:
    """Ours takes one microsecond a KiB, out of place; twice that in place."""
    result: dict[str, Any] = {"size": size, "type": "float", "redop": "sum", "root": -1}
    result |= {"experiment_name": f"{name}_float_sum", "blinkmpi": {"executor": executor}}
    for place, times in (("out_of_place", 1), ("in_place", 2)):
        time = size / 1024 * times
        result[place] = {"time": time, "bus_bw": 8.0 / times}
        compare = {
            peer: {"time": time * ratio, "ratio": ratio, "times_us": {"min": time * ratio, "max": time * ratio * 2}}
            for peer, ratio in (peers or {}).items()
        }
        result["blinkmpi"][place] = {
            "times_us": {"min": time, "max": time * 1.5},
            "compare": compare | {"absent": None},
        }
    return result


def document(*rows: Any, graph: int = 0, ranks: int = 8) -> dict[str, Any]:
    facts = {"ranks": ranks, "compare": ["nccl", "absent"], "gpu": {"name": "NVIDIA H200"}, "date": "2026-11-21T09:00"}
    return {"config": {"graph": graph}, "results": list(rows), "blinkmpi": facts}


def test_a_file_holds_ours_and_the_peers_that_ran() -> None:
    ours, nccl = curves_of(document(*(row(size, peers={"nccl": 4.0}) for size in (1024, 4096))))
    assert (ours.peer, ours.sizes, ours.times, ours.busbw) == (OURS, (1024, 4096), (1.0, 4.0), (8.0, 8.0))
    assert (nccl.peer, nccl.times, nccl.busbw, nccl.ratios) == ("nccl", (4.0, 16.0), (2.0, 2.0), (4.0, 4.0))
    assert nccl.spread == ((4.0, 8.0), (16.0, 32.0))
    assert ours.column == nccl.column == "all_reduce float sum, 8 ranks"
    assert ours.variant == ""
    inside = next(iter(curves_of(document(row(1024)), in_place=True)))
    assert (inside.times, inside.busbw) == ((2.0,), (4.0,))


def test_executors_graphs_and_files_are_told_apart() -> None:
    rows = [row(1024), row(4096), row(1024, executor="numpy"), row(4096, executor="numpy")]
    both = list(curves_of(document(*rows, graph=4)))
    assert [(c.variant, c.sizes) for c in both] == [("c, graph", (1024, 4096)), ("numpy, graph", (1024, 4096))]
    alone = list(curves_of(document(row(1024, name="reduce"))))
    stream, graph = list(curves_of(document(row(1024)))), list(curves_of(document(row(1024), graph=4)))
    named = told_apart([("x", stream), ("y", graph), ("z", alone)])
    assert [c.variant for c in named] == ["x", "y, graph", ""]


def test_rows_without_a_time_or_size_are_left_out() -> None:
    empty, cpu = row(0), row(4096)
    cpu["out_of_place"] = {"cpu_time": 1.0}
    (only,) = curves_of(document(empty, row(1024), cpu))
    assert only.sizes == (1024,)


@pytest.fixture
def files(tmp_path: Path) -> Any:
    """Write documents; give their names."""
    pytest.importorskip("matplotlib", reason="matplotlib is an extra: pip install 'blinkmpi[plot]'")

    def write(*found: dict[str, Any]) -> list[str]:
        names = []
        for i, content in enumerate(found):
            path = tmp_path / f"result{i}.json"
            path.write_text(json.dumps(content))
            names.append(str(path))
        return names

    return write


def drawn(words: list[str], path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["plot", *words, "-o", str(path)]) == 0, capsys.readouterr().err
    return " ".join(re.findall(r"<text[^>]*>([^<]*)<", path.read_text()))


@pytest.mark.slow
def test_a_picture_names_libraries_sizes_and_variants(
    files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [1 << i for i in range(10, 31, 2)]
    found = [document(*(row(s, peers={"nccl": 2.0}) for s in sizes), graph=g) for g in (0, 4)]
    words = drawn(files(*found), tmp_path / "a.svg", capsys)
    for text in ("all_reduce float sum, 8 ranks", "NCCL", "blinkmpi", "result0", "result1, graph", "1 KiB", "1 GiB",
                 "NVIDIA H200", "time / ours", "bus bandwidth"):  # fmt: skip
        assert text in words
    again = tmp_path / "b.svg"
    assert cli.main(["plot", *files(*found), "-o", str(again)]) == 0
    assert again.read_bytes() == (tmp_path / "a.svg").read_bytes()


def test_without_a_peer_there_are_no_ratios(files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = drawn([*files(document(row(1024))), "--in-place"], tmp_path / "a.svg", capsys)
    assert "time / ours" not in words
    assert "in place" in words


@pytest.mark.slow
@pytest.mark.parametrize(("files", "beside"), [
    ("*-np[248].json", "MPI"), ("all_reduce*gpu-*np2.json", "NCCL"), ("reduce*gpu-np*.json", "NCCL"),
])  # fmt: skip
def test_results_of_the_repository_can_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: str, beside: str
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra: pip install 'blinkmpi[plot]'")
    others = ("call-cost", "helper-thread", "message-cost", "emulated", "host-time")
    some = sorted(str(path) for path in RESULTS.glob(files) if not path.name.startswith(others))
    some = [path for path in some if beside == "NCCL" or "gpu" not in Path(path).name][:6]
    assert len(some) > 3
    assert beside in drawn(some, tmp_path / "a.svg", capsys)


@pytest.mark.parametrize(("content", "message"), [
    ("{", "is no result of blinkmpi bench"),
    ('{"results": []}', "is no result of blinkmpi bench"),
    (json.dumps({"results": {}, "blinkmpi": {"ranks": 2}}), "is no result of blinkmpi bench"),
    (json.dumps(document()), "no row with a time"),
    (json.dumps(document(*(row(8, name=str(i)) for i in range(MOST_COLUMNS + 1)))), "give fewer files"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused(
    files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    assert cli.main(["plot", str(path), "-o", str(tmp_path / "x.svg")]) == 2
    assert message in capsys.readouterr().err


def test_files_that_are_not_there_are_named(files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plot", "nowhere.json", "-o", str(tmp_path / "x.svg")]) == 2
    assert "cannot read 'nowhere.json'" in capsys.readouterr().err
    assert cli.main(["plot", *files(document(row(8))), "-o", "x.doc"]) == 2
    assert "cannot draw 'x.doc'" in capsys.readouterr().err
