"""Time the planner on all kinds of machines: ``python benchmarks/planner/treegen.py [--max-gpus N] [--max-seconds S]``.

Plans every row in a process of its own, verified, and writes ``results/treegen.json`` and ``results/treegen.svg``: time
beside that of a fixed loop (so that a slow machine can be told from slow code), trees, depth, rate, bound, peak memory.
A row that runs out of time is stopped, and larger machines of its family are not tried. ``--plot`` draws from the file.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from methods import calibration, size_of
from methods import head as of_planner

from blinkmpi.bench.environment import versions
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Device, Link, Topology
from blinkmpi.trees.packing import pack

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "treegen.json"
COLLECTIVES = ("allgather", "broadcast", "allreduce")
LANE_MBPS = 25_000
START_SECONDS = 20  # for a process to start, build its machine and run the loop
REPEAT_SECONDS = 1.0
FORESTCOLL = {
    "what": "ForestColl's public Python code (commit 3c13aee), AllGather, on two cores of an AMD EPYC",
    "seconds": {
        "DGX-1V": {8: 0.092}, "DGX-1P": {8: 0.078},
        "A100": {8: 0.15, 16: 6.2, 32: 51.4, 64: 581.8}, "MI250": {16: 0.73, 32: 43.0, 64: 593.7},
    },
}  # fmt: skip


class Family(NamedTuple):
    """Machines of one kind: the sizes to try, the GPUs of a size, and how to build it."""

    sizes: tuple[int, ...]
    gpus: Callable[[int], int]
    build: Callable[[int], Topology]


def boxes(name: str) -> Callable[[int], Topology]:
    """So many boxes of the catalogue."""
    return lambda count: machine(f"{name}:{count}" if count > 1 else name)


def slow_card(count: int) -> Topology:
    """A100 boxes, one GPU's network card at 10 instead of 25 GB/s."""
    t = machine(f"dgx-a100:{count}")
    slow = {k for k in t.links if k.kind == "net" and 0 in (k.src, k.dst)}
    links = [msgspec.structs.replace(k, lane_mbps=10_000) if k in slow else k for k in t.links]
    return msgspec.structs.replace(t, name=f"{t.name}, one slow card", links=tuple(links)).check()


def half_bundle(count: int) -> Topology:
    """MI250 boxes, one bundle of xGMI links at half its lanes."""
    t = boxes("mi250")(count)
    links = [msgspec.structs.replace(k, lanes=2) if {k.src, k.dst} == {0, 1} else k for k in t.links]
    return msgspec.structs.replace(t, name=f"{t.name}, half a bundle", links=tuple(links)).check()


def torus(side: int, dimensions: int) -> Topology:
    """GPUs on a torus, one NVLink to every neighbour."""
    number = {at: i for i, at in enumerate(product(range(side), repeat=dimensions))}
    pairs = set()
    for at, i in number.items():
        for axis in range(dimensions):
            for step in (1, -1):
                pairs.add((i, number[*at[:axis], (at[axis] + step) % side, *at[axis + 1 :]]))
    name = f"torus {'x'.join([str(side)] * dimensions)}"
    return direct(name, len(number), dict.fromkeys(sorted(pairs), 1))


def scattered(n: int, *, even: bool) -> Topology:
    """A ring and as many chords again, of 1 to 4 lanes; ``even`` links are equally fast both ways."""
    rng = random.Random(n)
    lanes: dict[tuple[int, int], int] = {}
    chords = [tuple(rng.sample(range(n), 2)) for _ in range(2 * n)]
    for u, v in [*((i, (i + 1) % n) for i in range(n)), *chords]:
        lanes[u, v] = rng.randint(1, 4)
        lanes[v, u] = lanes[u, v] if even else rng.randint(1, 4)
    return direct(f"random {n}{'' if even else ', uneven'}", n, lanes)


def direct(name: str, n: int, lanes: dict[tuple[int, int], int]) -> Topology:
    """GPUs with NVLinks between them."""
    links = tuple(Link(u, v, "nvlink", k, LANE_MBPS) for (u, v), k in lanes.items())
    return Topology(name, tuple(Device("gpu", 0, i) for i in range(n)), (), links).check()


POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
FAMILIES = {
    "DGX-1P": Family((1, 2, 4, 8), lambda k: 8 * k, boxes("dgx-1p")),
    "DGX-1V": Family((1, 2, 4, 8), lambda k: 8 * k, boxes("dgx-1v")),
    "DGX-2": Family((1, 2, 4, 8), lambda k: 16 * k, boxes("dgx-2")),
    "PCIe": Family((1, 2, 4, 8), lambda k: 8 * k, boxes("pcie-8")),
    "H100": Family((1, 2, 4, 8), lambda k: 8 * k, boxes("hgx-h100")),
    "A100": Family(POWERS, lambda k: 8 * k, boxes("dgx-a100")),
    "MI250": Family(POWERS[:-1], lambda k: 16 * k, boxes("mi250")),
    "A100, one slow card": Family((2, 4, 8, 16, 32), lambda k: 8 * k, slow_card),
    "MI250, half a bundle": Family((1, 2, 4), lambda k: 16 * k, half_bundle),
    "torus, 2 dimensions": Family((4, 8, 16, 32), lambda k: k**2, lambda k: torus(k, 2)),
    "torus, 3 dimensions": Family((3, 4, 8, 10), lambda k: k**3, lambda k: torus(k, 3)),
    "random": Family((8, 16, 32, 64, 128, 256), lambda k: k, lambda k: scattered(k, even=True)),
    "random, uneven": Family((8, 16, 32, 64), lambda k: k, lambda k: scattered(k, even=False)),
}


def main(argv: list[str] | None = None) -> int:
    """Run, write, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--max-gpus", type=int, default=1024)
    parser.add_argument("--max-seconds", type=float, default=60.0, help="for one row")
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES), metavar="F")
    parser.add_argument("--collectives", nargs="*", choices=COLLECTIVES, default=COLLECTIVES, metavar="C")
    parser.add_argument("-o", dest="output", type=Path, default=RESULT, metavar="FILE")
    parser.add_argument("--plot", action="store_true", help="draw from the file that is there")
    parser.add_argument("--row", nargs=3, metavar=("F", "SIZE", "C"), help="plan one row here and print it as JSON")
    args = parser.parse_args(argv)
    if args.row:
        print(json.dumps(planned(args.row[0], int(args.row[1]), args.row[2])))
        return 0
    if not args.plot:
        args.output.parent.mkdir(exist_ok=True)
        found = head(args)
        for row in rows(args):
            found["rows"].append(row)
            print(line_of(row), flush=True)
            args.output.write_text(json.dumps(found, indent=1) + "\n")
    found = json.loads(args.output.read_text())
    draw(found, args.output.with_suffix(".svg"))
    return 0


def head(args: argparse.Namespace) -> dict[str, Any]:
    """Everything in the file but the rows."""
    found, names = versions("", None), ("python", "blinkmpi", "numpy")
    return {
        **of_planner("treegen"),
        "versions": {**{name: found[name] for name in names}, "scipy": metadata.version("scipy")},
        "max_gpus": args.max_gpus,
        "max_seconds": args.max_seconds,
        "calibration": "best of 3 of a loop of 3 million steps, before and after each row",
        "reference": FORESTCOLL,
        "rows": [],
    }


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows in turn, each by a process of its own, small machines of a family first."""
    for name, collective in product(args.families, args.collectives):
        family = FAMILIES[name]
        late = False
        for size in family.sizes:
            if family.gpus(size) > args.max_gpus:
                break
            row = {"family": name, "size": size, "gpus": family.gpus(size), "collective": collective}
            if late:
                yield {**row, "failed": "not tried: a smaller machine of this family took too long"}
                continue
            outcome = row_of(name, size, collective, args.max_seconds)
            late = outcome.get("failed", "").startswith("stopped")
            yield {**row, **outcome}


def row_of(name: str, size: int, collective: str, max_seconds: float) -> dict[str, Any]:
    """Plan in another process, stopped when it takes too long."""
    argv, limit = [sys.executable, __file__, "--row", name, str(size), collective], max_seconds + START_SECONDS
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"stopped after {max_seconds:g} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def planned(name: str, size: int, collective: str) -> dict[str, Any]:
    """One row: the first planning, and the best of as many as fit into a second, each from a machine built anew."""
    import scipy.optimize  # what planning would import in its first call
    import scipy.sparse.csgraph  # noqa: F401

    before, at_start = calibration(), peak_bytes()
    built, times = 0.0, list[float]()
    while not times or sum(times) + times[-1] < REPEAT_SECONDS:
        begin = time.perf_counter()
        t = FAMILIES[name].build(size)
        start = time.perf_counter()
        built = start - begin
        packing = pack(t, collective)
        times.append(time.perf_counter() - start)
    peak, loop = peak_bytes(), min(before, calibration())
    return {
        "machine": t.name, "seconds": min(times), "first_seconds": times[0], "build_seconds": built,
        "calibration_seconds": loop, "seconds_in_loops": min(times) / loop,
        "method": packing.reason.partition(":")[0], **size_of(packing), "bound_mbps": str(packing.bound),
        "of_bound": float(packing.rate / packing.bound), "optimal": packing.optimal,
        "certificate": packing.certificate.kind, "peak_bytes": peak, "planning_bytes": peak - at_start,
        "reason": packing.reason,
    }  # fmt: skip


def peak_bytes() -> int:
    """The most memory that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def line_of(row: dict[str, Any]) -> str:
    """A row as a line on the terminal."""
    start = f"{row['family']:22} {row['gpus']:5} GPUs {row['collective']:10}"
    if "failed" in row:
        return f"{start} {row['failed']}"
    return (
        f"{start} {row['seconds'] * 1e3:9.1f} ms  {row['trees']:5} trees  depth {row['depth']:3}  "
        f"{row['rate_gbps']:8.2f} GB/s  {row['of_bound']:7.2%}  {row['peak_bytes'] >> 20:5} MiB  {row['method']}"
    )


def draw(found: dict[str, Any], path: Path) -> None:
    """Planning time against GPUs, a panel for each collective; hollow where the bound is not met."""
    from matplotlib import colormaps, rc_context
    from matplotlib.figure import Figure

    done = [row for row in found["rows"] if "failed" not in row]
    shown = [c for c in COLLECTIVES if any(row["collective"] == c for row in done)]
    if not shown:
        raise SystemExit("no row was planned, so there is nothing to draw; give rows more time or allow more GPUs")
    figure = Figure(figsize=(5.4 * len(shown) + 2.6, 5.6))
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    paint = {name: colormaps["tab20"](i * 2 % 20 + i * 2 // 20) for i, name in enumerate(FAMILIES)}
    for axes, collective in zip(panels, shown, strict=True):
        for name, colour in paint.items():
            some = [row for row in done if row["family"] == name and row["collective"] == collective]
            x, y = [row["gpus"] for row in some], [row["seconds"] for row in some]
            axes.plot(x, y, color=colour, linewidth=1.5, label=name, zorder=2)
            face = [colour if row["optimal"] else "white" for row in some]
            axes.scatter(x, y, s=34, facecolors=face, edgecolors=[colour] * len(some), zorder=3)
        if collective == "allgather":
            for name, points in found["reference"]["seconds"].items():
                x, y = [int(n) for n in points], list(points.values())
                axes.plot(x, y, color=paint[name], linewidth=1.0, linestyle=":", marker="x", zorder=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(collective, weight="bold")
        axes.set_xlabel("GPUs")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.grid(color="#e8e8e8", zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("seconds to plan and prove")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center right", frameon=False, fontsize=9)
    loop = min(row["calibration_seconds"] for row in done)
    code = (found["commit"] or "?")[:12]
    facts = f"{found['hardware']['cpu']}, the fixed loop takes {loop * 1e3:.0f} ms; code {code}"
    notes = "filled: the bound is met; hollow: it is not; dotted crosses: ForestColl's public Python code"
    figure.suptitle("Planning time of TreeGen", x=0.05, ha="left", weight="bold", fontsize=14)
    figure.text(0.05, 0.915, f"{facts}. {notes}", fontsize=8.5, color="#666666")
    figure.subplots_adjust(left=0.05 + 0.02 / len(shown), right=1 - 2.4 / figure.get_figwidth(), top=0.84, bottom=0.1)
    with rc_context({"svg.hashsalt": "blinkmpi", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
