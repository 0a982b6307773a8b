"""What faster AllReduces are worth to training on parts of a DGX-1V: ``python benchmarks/training/figure.py``.

The paper's last figure (Blink section 5.4) by simulation. The model's gradients become ready in the order and in the
shares of a step that ``measure.py --gradients`` has recorded; a step's time is given, such as one published for a V100.
DDP averages them bucket by bucket, one after another, each as soon as its gradients are ready. An AllReduce takes what
the cost model says: along our plan for the set of GPUs, or along NCCL's rings on the same links, or along a ring over
PCIe where NVLinks form none. All 46 unique sets of 3 to 8 GPUs of a DGX-1V are simulated, each as often as it occurs.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.paper.simulated import nccl_rings, seconds_of  # noqa: E402
from benchmarks.planner.methods import head  # noqa: E402
from blinkmpi.planning.subsets import PCIE_MBPS, Allocations, connected  # noqa: E402
from blinkmpi.topology.machines import machine  # noqa: E402
from blinkmpi.topology.model import Topology  # noqa: E402
from blinkmpi.trees.packing import pack  # noqa: E402
from blinkmpi.util.figure import COLOURS, new_figure, save  # noqa: E402

MACHINE = "dgx-1v"
RESULTS = ROOT / "benchmarks" / "results"
SOURCE, RESULT, PICTURE = RESULTS / "training-np2.json", RESULTS / "training-sets.json", RESULTS / "training-sets.svg"
FEWEST = 3  # GPUs: of two, there is no choice
BATCH = 32  # images of a GPU
# Images a second of one V100 in training ResNet-50 v1.5 with PyTorch 21.03, as NVIDIA publishes them:
# github.com/NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5, "DGX-1 16GB"
V100_IMAGES_PER_S = {"float32": 367, "mixed precision": 1200}
STEPS_MS = (5, 7, 10, 14, 20, 30, 50, 70, 100, 150, 200, 300, 500)  # of computing, for the second picture
Seconds = Callable[[int], float]  # of an AllReduce of so many bytes


class Timeline(NamedTuple):
    """The end of a step's computing, and the buckets that are averaged meanwhile: (bytes, when ready), by time."""

    end: float
    buckets: list[tuple[int, float]]


def timeline(row: dict[str, Any], step_s: float) -> Timeline:
    """The recorded step, stretched to ``step_s``."""
    ready = row["gradients"]["ready"]
    itemsize = sum(row["bucket_bytes"]) // row["parameters"]
    scale = step_s / ready[-1][1]
    left, found = list(row["bucket_bytes"]), []
    for count, at in ready:
        left[0] -= count * itemsize
        if left[0] <= 0:
            found.append((row["bucket_bytes"][len(found)], at * scale))
            left.pop(0)
    if left:
        raise SystemExit(f"{row['model']}: gradients and buckets disagree; measure again with --gradients")
    return Timeline(step_s, found)


def step_seconds(line: Timeline, allreduce: Seconds) -> float:
    """A step's time when each bucket is averaged once it is ready and the one before is done."""
    end = 0.0
    for nbytes, ready in line.buckets:
        end = max(end, ready) + allreduce(nbytes)
    return max(end, line.end)


def libraries(part: Topology) -> tuple[Seconds, Seconds, str]:
    """AllReduce by our plan and by NCCL's rings, and what the rings run on."""
    packing, rings = pack(part, "allreduce"), nccl_rings(part, "allreduce")
    return cache(lambda nbytes: seconds_of(packing, part, nbytes)), cache(rings.seconds), rings.links


def simulated(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each set of GPUs."""
    whole, found = connected(machine(MACHINE))
    return [of_set(whole, some, rows) for some in found if len(some.ranks) >= FEWEST]


def of_set(whole: Topology, some: Allocations, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Steps of ResNet-50 at the published rates, and of every model at a range of rates."""
    ours, rings, links = libraries(whole.subset(some.ranks))
    vector = sum(rows[0]["bucket_bytes"])
    row: dict[str, Any] = {
        "gpus": some.ranks, "alike": some.alike, "rings_on": links, "bytes": vector, "trees_ms": ours(vector) * 1e3,
        "rings_ms": rings(vector) * 1e3, "published": {}, "steps": {},
    }  # fmt: skip

    def times(measured: dict[str, Any], step_s: float) -> dict[str, float]:
        line = timeline(measured, step_s)
        found = {"compute_ms": step_s * 1e3}
        for name, allreduce in (("trees", ours), ("rings", rings)):
            found[f"{name}_ms"] = step_seconds(line, allreduce) * 1e3
            found[f"{name}_behind_ms"] = (step_s + sum(allreduce(nbytes) for nbytes, _ in line.buckets)) * 1e3
        return found

    for measured in rows:
        if measured["model"] == "resnet50":
            row["published"] = {name: times(measured, BATCH / rate) for name, rate in V100_IMAGES_PER_S.items()}
        row["steps"][measured["model"]] = [times(measured, ms / 1e3) for ms in STEPS_MS]
    return row


def saved(one: dict[str, float], what: str = "ms") -> float:
    """The part of a step's time that trees save; ``behind_ms`` where communication begins when computing has ended."""
    return 1 - one[f"trees_{what}"] / one[f"rings_{what}"]


def draw(rows: Sequence[dict[str, Any]], models: Sequence[str], path: Path) -> None:
    """Steps of ResNet-50 on every set; and what is saved, by model and time of computing."""
    figure = new_figure(11, 7.6)
    above, below = figure.subplots(2, 1, height_ratios=(3, 2))
    places = range(len(rows))
    one = [row["published"]["mixed precision"] for row in rows]
    above.bar(
        places, [r["rings_behind_ms"] for r in one], color="#c9c9c9", label="NCCL's rings (ring over PCIe: hatched)"
    )
    for place, row, times in zip(places, rows, one, strict=True):
        if row["rings_on"] == "PCIe":
            above.bar(place, times["rings_behind_ms"], color="#c9c9c9", hatch="///", edgecolor="white")
    above.bar(places, [r["trees_behind_ms"] for r in one], width=0.5, color=COLOURS[0], label="blinkmpi's plan")
    above.axhline(one[0]["compute_ms"], color=COLOURS[1], linewidth=1, label="computing alone")
    above.set_xticks(list(places), [",".join(map(str, r["gpus"])) for r in rows], rotation=90, fontsize=6.5)
    above.set_ylabel("ms a step")
    title = f"ResNet-50, mixed precision, {BATCH} images a GPU, averaging behind computing; sets of GPUs of a DGX-1V"
    above.set_title(title, fontsize=10, loc="left", pad=24)
    above.margins(x=0.01)
    for i, model in enumerate(models):
        by_step = [[saved(row["steps"][model][k]) for row in rows] for k in range(len(STEPS_MS))]
        below.plot(STEPS_MS, [100 * max(some) for some in by_step], color=COLOURS[i], label=f"{model}, best set")
        means = [100 * statistics.mean(some) for some in by_step]
        below.plot(STEPS_MS, means, color=COLOURS[i], linestyle="--", label=f"{model}, mean of sets")
    below.set_xscale("log")
    below.set_xticks(STEPS_MS, [str(ms) for ms in STEPS_MS])
    below.minorticks_off()
    below.set_xlabel("ms of computing in a step")
    below.set_ylabel("% of a step's time saved")
    below.set_title("Averaging beside computing, as DDP does", fontsize=10, loc="left")
    for axes in (above, below):
        axes.legend(fontsize=8, frameon=False, ncols=3, **({"loc": "lower left", "bbox_to_anchor": (0, 1.0)}
                                                           if axes is above else {}))  # fmt: skip
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    save(figure, str(path))


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """What the sets have in common, as a table for the page."""

    def of(name: str, parts: Sequence[float], about: str) -> str:
        return f"| {name} | {statistics.mean(parts):.1%} | {max(parts):.1%} | {about} |"

    lines = ["| what | less time, mean of the sets | at most | |", "|---|---:|---:|---|"]
    without = sum(row["rings_on"] == "PCIe" for row in rows)
    about = f"{len(rows)} sets, {without} of them with no ring of NVLinks"
    lines.append(of(f"an AllReduce of {rows[0]['bytes'] / 1e6:.0f} MB", [1 - row["trees_ms"] / row["rings_ms"]
                                                                      for row in rows], about))  # fmt: skip
    for name, rate in V100_IMAGES_PER_S.items():
        for what, how in (("ms", "averaging beside computing, as DDP does"), ("behind_ms", "averaging behind it")):
            steps = [saved(row["published"][name], what) for row in rows]
            about = f"{BATCH} images a GPU at {rate} a second; {how}"
            lines.append(of(f"a step of ResNet-50, {name}", steps, about))
    for model in rows[0]["steps"]:
        by_time = [[saved(row["steps"][model][k]) for row in rows] for k in range(len(STEPS_MS))]
        best = max(range(len(STEPS_MS)), key=lambda k: max(by_time[k]))
        lines.append(
            of(f"a step of {model}", by_time[best], f"if it computes for {STEPS_MS[best]} ms; beside computing")
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Simulate, write the file and the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, default=SOURCE, metavar="FILE", help="of measure.py --gradients")
    parser.add_argument("--plot", action="store_true", help="draw from the file that is there")
    options = parser.parse_args()
    if not options.plot:
        source = json.loads(options.source.read_text())
        rows = [row for row in source["results"] if "gradients" in row and row["dtype"] == "float32"]
        if not any(row["model"] == "resnet50" for row in rows):
            raise SystemExit(f"{options.source} has no gradients of resnet50; measure with --gradients")
        facts = {"machine": MACHINE, "batch": BATCH, "v100_images_per_s": V100_IMAGES_PER_S,
                 "pcie_mbps": PCIE_MBPS, "source": options.source.name}  # fmt: skip
        found = {**head("training-sets"), **facts, "rows": simulated(rows)}
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
    rows = json.loads(RESULT.read_text())["rows"]
    draw(rows, list(rows[0]["steps"]), PICTURE)


if __name__ == "__main__":
    main()
