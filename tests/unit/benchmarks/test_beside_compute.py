"""Matrix products beside AllReduces: what is made of times, and a job of it on a clock in place of a GPU."""

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import blinkmpi
from blinkmpi.runtime import inspection
from tests.harness import mpi
from tests.unit.benchmarks.scripts import script

torch = pytest.importorskip("torch")
fakes = pytest.importorskip("tests.unit.benchmarks.fake_torch")
gpus = pytest.importorskip("benchmarks.fake.gpu")

PRODUCT_S, OURS_S, NCCL_S = 1e-3, 4e-4, 5e-4


@pytest.fixture
def rows() -> Any:
    return script("beside_compute/rows")


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, with fakes of what it asks of a GPU."""
    return with_fakes(tmp_path, monkeypatch)


def with_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Any:
    module = script("beside_compute/measure")
    fake = fakes.FakeTorch(torch, tmp_path / "nccl.log", mm_s=PRODUCT_S, nccl_s=NCCL_S, **how)
    made: list[int | None] = []
    communicator = type("Ours", (fakes.FakeCommunicator,), {"torch": fake, "call_s": OURS_S, "made": made})
    monkeypatch.setattr(blinkmpi, "Communicator", communicator)
    how_it_runs = {"scheme": "onehop", "protocol": "direct", "ctas": 8, "reason": ""}
    monkeypatch.setattr(inspection, "choice", lambda context, name, nbytes, **_: how_it_runs)
    monkeypatch.setitem(sys.modules, "torch", fake)
    module.fake, module.made = fake, made  # type: ignore[attr-defined]
    return module


# ---------------------------------------------------------------- times


def test_marks_are_few_and_end_with_the_last_piece(rows: Any) -> None:
    assert rows.marked(1) == (1,)
    assert rows.marked(5) == (1, 2, 3, 4, 5)
    found = rows.marked(100)
    assert len(found) == rows.PARTS
    assert found[-1] == 100


def test_a_lap_has_about_as_much_of_both_within_limits(rows: Any) -> None:
    assert rows.amounts(1e-3, 1e-3) == (20, 20)
    assert rows.amounts(1e-3, 1e-5) == (1, rows.MOST_CALLS)
    assert rows.amounts(1e-5, 1e-2) == (rows.MOST_PRODUCTS, 2)
    assert rows.amounts(1.0, 1.0) == (1, 1)


def test_what_is_done_between_marks_is_in_proportion(rows: Any) -> None:
    marks = ((2, 1.0), (4, 3.0))
    assert [rows.done(marks, at) for at in (0.0, 0.5, 1.0, 2.0, 3.0)] == [0, 1, 2, 3, 4]


def test_a_slowdown_is_of_the_time_in_which_both_run(rows: Any) -> None:
    # calls end at 2 s; by then 4 of 6 products are done, at half a second each; the rest are faster
    lap = rows.Lap(((4, 2.0), (6, 2.5)), ((1, 1.0), (2, 2.0)))
    assert rows.beside(lap) == (0.5, 1.0, 2.5)
    # products end first
    assert rows.beside(rows.Lap(((2, 1.0),), ((1, 1.0), (4, 2.0)))) == (0.5, 1.0, 2.0)


def test_the_slowest_rank_counts_at_each_mark(rows: Any) -> None:
    one, two = rows.Lap(((1, 1.0), (2, 2.5)), ()), rows.Lap(((1, 1.5), (2, 2.0)), ())
    assert rows.slowest([one, two]) == rows.Lap(((1, 1.5), (2, 2.5)), ())


def test_a_row_has_both_slowdowns_and_no_times_of_wrong_results(rows: Any) -> None:
    products = [rows.Lap(((4, 4e-3),), ())] * 3
    alone = [rows.Lap((), ((10, at),)) for at in (9e-3, 5e-3, 1e-3)]
    both = [rows.Lap(((4, 5e-3),), ((10, 10e-3),))] * 3
    sides = {"ours": rows.Side(alone, both, 0, {"protocol": "direct"}), "nccl": rows.Side(alone, both, 7, {})}
    found = rows.row(products, sides, edge=64, dtype="float32", bytes=1 << 20, max_ctas=8)
    ours = found["libraries"]["ours"]
    assert (found["products"], found["calls"], found["product_us"]) == (4, 10, 1000.0)
    assert (ours["alone_us"], ours["beside_us"], ours["slowdown"]) == pytest.approx((500.0, 1000.0, 2.0))
    assert (ours["product_beside_us"], ours["product_slowdown"]) == pytest.approx((1250.0, 1.25))
    assert (ours["total_us"], ours["one_after_another_us"]) == pytest.approx((10_000.0, 9000.0))
    assert ours["protocol"] == "direct"
    assert found["libraries"]["nccl"] == {"wrong": 7}
    text = rows.shown(found)
    assert (
        "64^3 float32 1 MiB, 8 CTAs: product 1000 us; ours x 1.25, call 500 us x 2.00, total 10.00 of 9.00 ms" in text
    )
    assert text.endswith("nccl 7 wrong")


# ---------------------------------------------------------------- a job


WORDS = ["--edges", "64", "32", "--mib", "1", "2", "--ctas", "8", "0", "--repeats", "3"]


@pytest.mark.slow
def test_a_job_measures_both_libraries_with_each_limit(
    measure: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "beside-compute-gpu-np1.json"
    rows = measure.run(measure.parsed([*WORDS, "-o", str(file)]), tmp_path / "nccl.log")
    made = json.loads(file.read_text())
    assert made["results"] == rows
    assert len(rows) == 2 * 2 * 2 * 2, "limits, types, lengths, edges"
    assert measure.made == [None, 8, None], "the first one only finds the GPU"
    groups = measure.fake.distributed.groups
    assert [(g.config.min_ctas, g.config.max_ctas, g.high) for g in groups] == [(8, 8, False), (None, None, False)]
    for row in rows:
        ours, nccl = row["libraries"]["ours"], row["libraries"]["nccl"]
        assert (ours["alone_us"], nccl["alone_us"]) == pytest.approx((OURS_S * 1e6, NCCL_S * 1e6))
        assert row["product_us"] == pytest.approx(PRODUCT_S * 1e6)
        for one in (ours, nccl):
            assert (one["wrong"], one["slowdown"], one["product_slowdown"]) == pytest.approx((0, 1, 1))
            assert one["total_us"] < one["one_after_another_us"]
        assert (ours["protocol"], nccl["channels"]) == ("direct", row["max_ctas"] or 24)
    facts = made["blinkmpi"]
    assert facts["gpu"] == {"name": "a GPU", "driver": "1", "torch": torch.__version__, "NCCL": "2.28.9"}
    assert {"commit", "date", "hardware", "versions", "machine", "ranks", "memory"} <= facts.keys()
    assert made["beside_compute"]["late_laps"] == 0
    assert capsys.readouterr().out.count(" CTAs: product") == 8


def test_what_there_was_no_time_for_is_named(measure: Any, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    words = ["--edges", "32", "--mib", "1", "--ctas", "16", "0", "--dtypes", "float32", "--seconds", "-1"]
    assert measure.run(measure.parsed([*words, "-o", str(file)]), tmp_path / "nccl.log") == []
    ends = "CTAs, float32, 1 MiB: not begun after -1 s"
    assert json.loads(file.read_text())["failed"] == [f"16 {ends}", f"default {ends}"]


def test_wrong_sums_have_no_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = with_fakes(tmp_path, monkeypatch, right=False)
    words = ["--edges", "32", "--mib", "1", "--ctas", "0", "--dtypes", "float32", "--repeats", "1"]
    (row,) = module.run(module.parsed(words), tmp_path / "nccl.log")
    assert row["libraries"]["nccl"] == {"channels": 24, "wrong": 1 << 18}
    assert row["libraries"]["ours"]["wrong"] == 0
    monkeypatch.setattr(module, "parsed", lambda: None)
    monkeypatch.setattr(module, "run", lambda options, log: [row])
    monkeypatch.setenv("NCCL_DEBUG", "")  # which main sets, and the test takes back
    with pytest.raises(SystemExit, match="wrong results"):
        module.main()


def test_a_wrong_product_is_counted(measure: Any) -> None:
    product = measure.Product(measure.fake, 32, "cpu")
    assert product.wrong() == 0
    product.result[3, 5] = 1000
    assert product.wrong() == 1


def test_streams_are_held_back_until_the_host_is_through(measure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(Barrier=lambda: None)
    clock = measure.Clock(measure.fake, world, high_priority=True)
    assert clock.cycles == pytest.approx(fakes.HERTZ)
    assert (clock.products.priority, clock.calls.priority) == (0, -1)

    def nothing() -> None:
        measure.fake.cuda.busy(1e-3)

    lap = clock.lap(measure.Work(nothing, 2), measure.Work(nothing, 3), nothing)
    assert [end for _, end in lap.products] == pytest.approx([1e-3, 2e-3]), "from the end of the meeting"
    assert [end for _, end in lap.calls] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert clock.late == 0
    before = clock.gate_s
    seconds = iter([0.0, 10.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(fakes.FakeEvent, "query", lambda self: True)
    clock.lap(None, measure.Work(nothing, 1))
    assert clock.late == 1
    assert clock.gate_s == measure.LONGEST_GATE_S > before


@pytest.mark.slow
@mpi(ranks=(2,), timeout=180)
def test_ranks_make_their_calls_and_what_nobody_sums_is_wrong(comm: Any) -> None:
    """Communicators of ours as they are, on a driver that launches nothing."""
    module = script("beside_compute/measure")
    words = ["--edges", "32", "--mib", "1", "16", "--ctas", "8", "0", "--dtypes", "bfloat16", "--repeats", "1"]
    with tempfile.TemporaryDirectory() as folder, gpus.fake_gpus() as driver:
        log = Path(folder) / "nccl.log"
        fake = fakes.FakeTorch(torch, log, comm.size, mm_s=PRODUCT_S, nccl_s=NCCL_S)
        with mock.patch.dict(sys.modules, {"torch": fake}):
            rows = module.run(module.parsed(words), log)
        assert driver["launches"] > 4 * module.WARMUP_CALLS
    assert [(row["bytes"] >> 20, row["max_ctas"]) for row in rows] == [(1, 8), (16, 8), (1, None), (16, None)]
    for row in rows:
        ours, nccl = row["libraries"]["ours"], row["libraries"]["nccl"]
        assert ours["wrong"] == comm.size * row["bytes"] // 2, "every element on every rank"
        assert ours["scheme"] == "onehop"
        assert "alone_us" not in ours
        assert (nccl["wrong"], nccl["alone_us"]) == (0, pytest.approx(NCCL_S * 1e6))
