"""No symbol of a picture lies over another: the boxes of circles and texts, as the renderer measures them."""

from itertools import combinations
from typing import Any

import pytest

from blinkmpi.plot.machine import machine_figure
from blinkmpi.plot.trees import packing_figure
from blinkmpi.topology.importers import modify
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees import pack
from blinkmpi.trees.in_switch.packing import pack_in_switch
from tests.unit.trees.networks import dragonfly, torus
from tests.unit.trees.tiers import fat_tree, leaf_spine

MACHINES: dict[str, Topology] = {
    "dragonfly": dragonfly(groups=5, routers=4, hosts=2),
    "dragonfly of nine groups": dragonfly(groups=9, routers=4, hosts=2),
    "torus": torus(4, 4),
    "long torus": torus(3, 8),
    "large torus": torus(8, 8),
    "torus of three dimensions": torus(4, 4, 4),
    "NVL72": machine("gb200-nvl72"),
    "MI300X": machine("mi300x"),
    "PCIe box": machine("pcie-8"),
    "bridged": machine("h200-nvl"),
    "cube mesh": machine("dgx-1v"),
    "part of a cube mesh": modify(machine("dgx-1v"), gpus="1,4,5,6"),
    "two cube meshes": machine("dgx-1v:2"),
    "MI250": machine("mi250"),
    "box": machine("hgx-h100"),
    "boxes": machine("dgx-a100:4"),
    "many boxes": machine("dgx-a100:9"),
    "DGX-2": machine("dgx-2"),
    "CPU ranks": machine("cpu:4"),
    "leaf and spine": leaf_spine([4] * 6, 3, 2, 200_000)[0].done(),
    "fat tree": fat_tree(2, 2, 2, 4).done(),
}


LEAST = 1.0  # pixels: the radius of a circle in the smallest of the pictures of one tree
NEAR = 6  # pixels, twice: how far the middle of a word in a circle is from the circle's


@pytest.fixture(autouse=True)
def _drawing() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra: pip install 'blinkmpi[plot]'")


def symbols(figure: Any) -> tuple[list[tuple[Any, Any]], list[Any], Any]:
    """The circles with the boxes of the texts in them, the boxes of all other texts, and that of the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.patches import Circle

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    circles: list[tuple[Any, Any]] = []
    free = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    words = [text.get_window_extent(renderer) for text in free if text.get_text()]
    for axes in figure.axes:
        boxes = [text.get_window_extent(renderer) for text in (*axes.texts, axes.title) if text.get_text()]
        for patch in (p for p in axes.patches if isinstance(p, Circle)):
            (x, y), (rim, _) = axes.transData.transform([patch.center, (patch.center[0] + patch.radius, 0)])
            middles = [(abs(box.x0 + box.x1 - 2 * x) + abs(box.y0 + box.y1 - 2 * y), box) for box in boxes]
            far, word = min(middles, key=lambda pair: pair[0], default=(0, None))
            if word is not None and far < NEAR:
                boxes.remove(word)
            circles.append(((x, y, rim - x), word if far < NEAR else None))
        words += boxes
    return circles, words, figure.bbox


def assert_apart(figure: Any) -> None:
    """Circles do not touch, words in them fit, other words touch neither circles nor words, and nothing is cut off."""
    circles, words, whole = symbols(figure)
    assert circles
    assert min(r for (_, _, r), _ in circles) > LEAST
    for (x, y, r), word in circles:
        assert whole.x0 <= x - r
        assert x + r <= whole.x1
        assert word is None or (word.width**2 + word.height**2) ** 0.5 <= 2.04 * r
        for box in words:
            near = min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1)
            assert (near[0] - x) ** 2 + (near[1] - y) ** 2 > r**2, "a word lies over a circle"
    for ((x, y, r), _), ((u, v, s), _) in combinations(circles, 2):
        assert (x - u) ** 2 + (y - v) ** 2 > (r + s) ** 2, "circles lie over one another"
    for one, other in combinations(words, 2):
        assert not one.overlaps(other), "words lie over one another"
    for box in words:
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1, "a word is cut off"
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1, "a word is cut off"


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_symbols_of_a_machine_lie_beside_one_another(name: str) -> None:
    assert_apart(machine_figure(MACHINES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "dragonfly", "torus", "torus of three dimensions", "MI300X", "PCIe box", "cube mesh", "two cube meshes", "box",
    "boxes", "CPU ranks", "leaf and spine",
])  # fmt: skip
@pytest.mark.parametrize("collective", ["broadcast", "allreduce"])
def test_symbols_of_trees_lie_beside_one_another(name: str, collective: str) -> None:
    assert_apart(packing_figure(pack(MACHINES[name], collective), MACHINES[name]))


@pytest.mark.parametrize("name", ["box", "NVL72"])
def test_symbols_of_sums_in_switches_lie_beside_one_another(name: str) -> None:
    assert_apart(packing_figure(pack_in_switch(MACHINES[name]), MACHINES[name]))


def test_a_device_that_is_alone_on_its_node_is_named_by_that_node() -> None:
    figure = machine_figure(MACHINES["dragonfly"])
    words = [text.get_text() for text in figure.axes[0].texts]
    assert sorted(w for w in words if w.isdigit()) == sorted(map(str, range(40)))
