"""Pictures: written for every kind of machine, the same twice, with what they must say; and where things lie."""

import re
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from blinkmpi.errors import ArgumentError
from blinkmpi.planning.subsets import survey
from blinkmpi.plot.layout import Position, arrow_head, curve, framed, places
from blinkmpi.plot.trees import draw_packing, draw_subsets
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees import pack
from blinkmpi.trees.graph.fabric import fabric
from tests.unit.trees.packings import machine_of

MACHINES = ("dgx-1v", "dgx-1v:2", "dgx-a100", "dgx-a100:2", "dgx-a100:9", "pcie-8", "mi250", "dgx-2", "cpu:4", "cpu:1")


@pytest.fixture(autouse=True)
def _drawing() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra: pip install 'blinkmpi[plot]'")


def torus(side: int) -> Topology:
    number = {(x, y): x * side + y for x in range(side) for y in range(side)}
    steps = [((x, y), ((x + dx) % side, (y + dy) % side)) for x, y in number for dx, dy in ((1, 0), (0, 1))]
    return machine_of(side * side, " ".join(f"{number[a]}-{number[b]}" for a, b in steps))


def texts(svg: str) -> str:
    return " ".join(re.findall(r"<text[^>]*>([^<]*)<", svg))


@pytest.mark.parametrize("name", MACHINES)
def test_devices_do_not_overlap(name: str) -> None:
    t = machine(name)
    lanes = fabric(t, t.kinds())
    spots = places(lanes)
    devices = [p for p in spots[: t.n] if p.at is not None]
    assert len(devices) == t.n
    for a, b in combinations(devices, 2):
        assert a.at is not None
        assert b.at is not None
        assert np.hypot(*(a.at - b.at)) > 1.5 * a.size


def test_a_dgx_1_is_two_quads_even_in_part() -> None:
    t = machine("dgx-1v").subset([1, 4, 5, 6])
    spots = places(fabric(t, ("nvlink",)))
    x = [float(p.at[0]) for p in spots[: t.n] if p.at is not None]
    assert x[0] < 0 < min(x[1:])
    assert [name for _, name in framed(t, spots)] == ["quad 0", "quad 1"]


def test_a_box_with_a_switch_is_a_circle_around_it() -> None:
    t = machine("dgx-a100")
    spots = places(fabric(t, ("nvlink",)))
    centre = spots[8].at
    assert centre is not None
    distances = [float(np.hypot(*(p.at - centre))) for p in spots[:8] if p.at is not None]
    assert distances == pytest.approx([distances[0]] * 8)


def test_a_torus_is_laid_out_or_a_circle() -> None:
    for t in (torus(4), machine_of(6, " ".join(f"{a}-{b}" for a, b in combinations(range(6), 2)))):
        spots = np.array([p.at for p in places(fabric(t, ("nvlink",)))])
        assert len(np.unique(np.round(spots, 6), axis=0)) == t.n


def test_curves_run_from_rim_to_rim_and_arrows_point_along_them() -> None:
    a, b, hub = (Position(np.array(at, float), 0.2, 1.0) for at in ((0, 0), (4, 0), (2, 3)))
    for stops, lane in (((a, b), 0.0), ((a, b), 1.0), ((a, hub, b), 0.5), ((a, hub, hub, b), 0.0)):
        line = curve(stops, lane, crowd=3)
        assert np.hypot(*line[0]) >= 0.2
        assert np.hypot(*(line[-1] - np.array([4, 0]))) == pytest.approx(0.22, abs=0.04)
        head = arrow_head(line, 0.1)
        assert np.array_equal(head[0], line[-1])
        assert np.dot(head[0] - head[1:].mean(axis=0), line[-1] - line[-2]) > 0
    assert curve((a, hub, b), 0.0, crowd=1)[:, 1].max() > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MACHINES, "torus"])
@pytest.mark.parametrize("collective", ["broadcast", "allgather"])
def test_every_machine_is_drawn(name: str, collective: str, tmp_path: Path) -> None:
    if name in ("dgx-a100:9", "dgx-1v:2") and collective == "allgather":
        pytest.skip("drawn once, as they are large")
    t = torus(3) if name == "torus" else machine(name)
    packing = pack(t, collective)
    file = tmp_path / "trees.svg"
    draw_packing(packing, t, str(file))
    said = texts(file.read_text())
    assert f"on {t.name}" in said
    if packing.certificate.kind != "trivial":
        assert f"{float(packing.rate / 1000):.4g} GB/s" in said
        assert "bound" in said
        assert f"method {packing.reason.partition(':')[0]}" in said
    if len(packing.trees) > 24:
        assert "the 24 thickest drawn" in said


@pytest.mark.slow
def test_a_picture_is_the_same_twice_and_comes_as_png_and_pdf(tmp_path: Path) -> None:
    t = machine("dgx-1v")
    packing = pack(t, "broadcast")
    for ending in ("svg", "png", "pdf"):
        files = [tmp_path / f"{i}.{ending}" for i in range(2)]
        for file in files:
            draw_packing(packing, t, str(file))
        assert files[0].read_bytes() == files[1].read_bytes()
    assert (tmp_path / "0.png").read_bytes().startswith(b"\x89PNG")
    said = texts((tmp_path / "0.svg").read_text())
    assert said.count("33.3%  50 GB/s") == said.count("16.7%  25 GB/s") == 2
    assert "equal to the bound" in said


def test_the_figure_of_speed_ups(tmp_path: Path) -> None:
    t = machine("dgx-1p")
    draw_subsets(survey(t), t, 10_000, str(tmp_path / "s.svg"))
    said = texts((tmp_path / "s.svg").read_text())
    for words in ("15 unique connected subsets", "broadcast 1.40", "allreduce 1.71", "0,1,2,4,7", "PCIe at 10 GB/s"):
        assert words in said


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    t = machine("dgx-1v")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ArgumentError, match=r"pip install 'blinkmpi\[plot\]'"):
        draw_packing(pack(t, "broadcast"), t, str(tmp_path / "x.svg"))


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    t = machine("dgx-1v")
    (tmp_path / "x.svg").mkdir()
    with pytest.raises(ArgumentError, match="cannot write"):
        draw_packing(pack(t, "broadcast"), t, str(tmp_path / "x.svg"))
