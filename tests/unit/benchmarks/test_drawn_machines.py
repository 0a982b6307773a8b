"""Machines drawn at random: every family gives machines that can be planned, and the same ones again."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from blinkmpi.topology.model import Topology

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "planner"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("treegen_random", "drawn_machines", "methods"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import treegen_random  # type: ignore[import-not-found]

    module: ModuleType = treegen_random
    return module


def test_families_draw_many_machines_and_the_same_again(bench: ModuleType) -> None:
    assert len(bench.FAMILIES) == 14
    for family in bench.FAMILIES:
        some = [bench.drawn(family, seed) for seed in range(12)]
        assert len({t.fingerprint for t in some}) > 6, family
        assert all(isinstance(t, Topology) and 2 <= t.n <= 256 for t in some)
        assert bench.drawn(family, 3).fingerprint == some[3].fingerprint


@pytest.mark.slow
def test_small_machines_of_every_family_are_planned_at_the_bound(bench: ModuleType, tmp_path: Path) -> None:
    for family in bench.FAMILIES:
        seed = next(seed for seed in range(100) if bench.drawn(family, seed).n <= 10)
        assert {row["outcome"] for row in bench.judged((family, seed))} <= {"optimal", "refused"}, (family, seed)


@pytest.mark.slow
def test_the_file_names_every_call_that_is_not_as_it_should_be(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "random.json"
    monkeypatch.setattr(bench, "head", lambda _: {})
    assert bench.main(["--machines", "2", "--families", "torus", "--jobs", "1", "-o", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["all"]["machines"] == 2
    assert found["all"]["optimal"] == found["all"]["calls"] == 2 * len(bench.COLLECTIVES)
    assert found["calls"] == []


def test_refusals_are_judged_by_reachability(bench: ModuleType) -> None:
    one_way = bench.drawn("one_way", 1)
    assert all(bench.possible(one_way, collective, 0) for collective in bench.COLLECTIVES)
    from msgspec.structs import replace

    cut = replace(one_way, links=tuple(k for k in one_way.links if k.dst != 1))
    assert not bench.possible(cut, "broadcast", 0)
    assert bench.possible(cut, "broadcast", 1) == bench.possible(cut, "scatter", 1)
    assert not bench.possible(cut, "allreduce", 0)
