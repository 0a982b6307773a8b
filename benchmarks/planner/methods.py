"""Compare all planning methods: ``python benchmarks/planner/methods.py``.

Plans for DGX-1 machines by every method, times each, predicts a call with the cost model, and writes
``results/treegen-methods.json``.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from blinkmpi.bench.environment import commit, hardware
from blinkmpi.planning.plan import Rule, chunk_for
from blinkmpi.program.call import Call
from blinkmpi.program.cost_model import price
from blinkmpi.program.lower import lower
from blinkmpi.topology.machines import machine
from blinkmpi.topology.model import Topology
from blinkmpi.trees.packing import extra_methods, methods, pack
from blinkmpi.trees.pareto_front import fewest, pareto
from blinkmpi.trees.problem import MethodOptions
from blinkmpi.trees.tree import ROOTED, Packing

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "treegen-methods.json"
MACHINES = ("dgx-1v", "dgx-1p")
COLLECTIVES = ("broadcast", "allreduce", "allgather")
SIZES = (1 << 20, 64 << 20)
SLOT_BYTES, SLOTS = 128 << 10, 4
LIMITS: tuple[tuple[str, str, MethodOptions], ...] = (
    ("few, depth <= 2", "few", MethodOptions(max_depth=2)),
    ("few, depth <= 3", "few", MethodOptions(max_depth=3)),
    ("few, depth <= 4", "few", MethodOptions(max_depth=4)),
    ("few, 2 trees", "few", MethodOptions(max_trees=2)),
    ("hybrid, 64 MiB, 0.1 ms", "hybrid", MethodOptions(nbytes=64 << 20, switch_seconds=Fraction(1, 10_000))),
)


def main() -> int:
    """Run and write the file."""
    written(__doc__, None, RESULT, run)
    return 0


def run() -> dict[str, Any]:
    """Every method on every machine and collective, the fronts, and the least numbers of trees."""
    machines = [machine(name) for name in MACHINES]
    return {
        "calibration_seconds": calibration(time.thread_time),
        "rows": [row for t in machines for c in COLLECTIVES for row in rows_of(t, c)],
        "fronts": [front_of(t, c) for t in machines for c in COLLECTIVES],
        "fewest": [fewest_of(t, c) for t in machines for c in ("broadcast", "allreduce")],
    }


def calibration(clock: Callable[[], float] = time.perf_counter) -> float:
    """Best of 3 of a fixed loop, so that a slow machine can be told from slow code."""
    best = float("inf")
    for _ in range(3):
        start = clock()
        total = 0
        for i in range(3_000_000):
            total += i & 7
        best = min(best, clock() - start)
    return best


def rows_of(t: Topology, collective: str) -> list[dict[str, Any]]:
    """One row for each method, and for each limit of ``few``."""
    names = [*methods(t, collective), *extra_methods(t, collective)]
    asked = [(name, name, MethodOptions()) for name in names]
    asked += [one for one in LIMITS if one[1] in names]
    return [row_of(t, collective, *one) for one in asked]


def row_of(t: Topology, collective: str, label: str, method: str, options: MethodOptions) -> dict[str, Any]:
    """Plan, verified, best of 2 times from nothing; and what the cost model predicts for it."""
    seconds = float("inf")
    for _ in range(2):
        fresh = machine(t.name)
        start = time.thread_time()
        packing = pack(fresh, collective, method=method, options=options)
        seconds = min(seconds, time.thread_time() - start)
    best = pack(t, collective).bound
    return {
        "machine": t.name, "collective": collective, "method": label, **size_of(packing),
        "bound_gbps": float(packing.bound) / 1000, "of_bound": str(packing.rate / packing.bound),
        "of_nvlink_bound": float(packing.rate / best), "links": packing.links, "seconds": seconds,
        "predicted_gbps": {str(n): predicted(packing, t, n) for n in SIZES}, "reason": packing.reason,
    }  # fmt: skip


def size_of(packing: Packing) -> dict[str, Any]:
    """Trees, depth and rate."""
    rates = {"rate_mbps": str(packing.rate), "rate_gbps": float(packing.rate) / 1000}
    return {"trees": len(packing.trees), "depth": packing.depth, **rates}


def head(kind: str) -> dict[str, Any]:
    """What a planner's result file says of itself."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"format": f"blinkmpi.{kind}", "version": 1, "date": date, **commit(), "hardware": hardware()}


def predicted(packing: Packing, t: Topology, nbytes: int) -> float:
    """Bytes of the vector per second in GB/s by the cost model."""
    count = nbytes // 4 // (t.n if packing.collective == "allgather" else 1)
    op, root = "sum" if packing.collective == "allreduce" else "", packing.root if packing.collective in ROOTED else -1
    call = Call(packing.collective, t.n, (count,), "float32", op, root)
    chunk = chunk_for(packing, call, Rule(packing.collective, 0, packing.scheme, SLOT_BYTES, SLOTS))
    program = lower(packing, call, chunk_bytes=chunk, depth=SLOTS)
    return price(program, packing, t).algbw


def front_of(t: Topology, collective: str) -> dict[str, Any]:
    """The Pareto front and the time that it took."""
    start = time.thread_time()
    found = pareto(t, collective)
    seconds = time.thread_time() - start
    points = [size_of(p) for p in found]
    return {"machine": t.name, "collective": collective, "seconds": seconds, "points": points}


def fewest_of(t: Topology, collective: str) -> dict[str, Any]:
    """The least number of trees at the best rate, and what proves it."""
    start = time.thread_time()
    packing, result = fewest(t, collective)
    found = {"seconds": time.thread_time() - start, "trees": len(packing.trees), "reason": packing.reason}
    return {"machine": t.name, "collective": collective, **found, "at_least": result.least, "proof": result.proof}


def written(
    text: str | None, argv: list[str] | None, result: Path, made: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """The program of a result file that has no other flag than ``-o``; returns what it wrote.

    Args:
        text: the program's, of which the first line describes it.
        result: the file where nobody says another one; its name is the kind in its head.
        made: gives what is in it besides its head.
    """
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("-o", dest="output", type=Path, default=result, metavar="FILE")
    args = parser.parse_args(argv)
    found = {**head(result.stem), **made()}
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    sys.exit(main())
