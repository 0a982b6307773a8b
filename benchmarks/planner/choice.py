"""Is the plan's choice the fastest one? ``python benchmarks/planner/choice.py [--machines dgx-1v ...]``.

For every collective on some machines, and vectors of 4 KiB to 1 GiB, it prices the row of the selection table that the
call takes, and every other scheme that a plan could hold, each with the chunks that the cost model's closed form finds
best for it. Prices are the simulator's. Writes ``results/choice.json``: a row for each call, with the seconds of every
scheme and how much longer the choice takes than the fastest.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from drawn_machines import drawn
from methods import head

from blinkmpi.planning.by_size import SIZES
from blinkmpi.planning.defaults import rule_of
from blinkmpi.planning.plan import Rule, chunk_for
from blinkmpi.planning.planner import all_packings, make_plan
from blinkmpi.planning.selection import choose
from blinkmpi.program.call import Call, call_of_bytes
from blinkmpi.program.cost_model import price
from blinkmpi.program.lower import lower
from blinkmpi.topology.importers import load
from blinkmpi.topology.model import Topology
from blinkmpi.trees.tree import Collective, Packing

RESULT = Path(__file__).resolve().parents[1] / "results" / "choice.json"
MACHINES = (
    "dgx-1p", "dgx-1v", "dgx-1v/0,1,2,3,4,5,6", "dgx-1v/1,4,5,6", "dgx-1v/0,2,3,5,6,7", "dgx-2", "dgx-a100", "hgx-h200",
    "pcie-8", "mi250", "dgx-1p:2", "dgx-1v:2", "dgx-a100:2", "dgx-a100:4", "hgx-h100:2", "~torus:5", "~irregular:3",
    "~bridges:4", "~unlike_boxes:2", "~rail_boxes:7", "~dragonfly:6", "~asymmetric:12",
)  # fmt: skip
COLLECTIVES: tuple[Collective, ...] = (
    "broadcast", "reduce", "allreduce", "allgather", "reduce_scatter", "gather", "scatter",
)  # fmt: skip
NEAR = 1.03


def machine_of(name: str) -> Topology:
    """A machine of the catalogue, some of its GPUs after a slash; or one that is drawn: ``~family:seed``."""
    if name.startswith("~"):
        family, _, seed = name[1:].partition(":")
        return drawn(family, int(seed))
    spec, _, gpus = name.partition("/")
    t = load(spec)
    return t.subset([int(g) for g in gpus.split(",")]) if gpus else t


def seconds(packing: Packing, t: Topology, call: Call, rule: Rule) -> float:
    """The simulator's prediction for a packing by a rule."""
    program = lower(packing, call, chunk_bytes=chunk_for(packing, call, rule), depth=rule.depth)
    return price(program, packing, t).seconds


def offers(packings: Sequence[Packing], t: Topology, call: Call) -> Iterator[tuple[str, float]]:
    """Each scheme and its time, with its own best chunks."""
    for packing in packings:
        yield packing.scheme, seconds(packing, t, call, rule_of(packing, t, call))


def judged(job: tuple[str, Collective]) -> list[dict[str, Any]]:
    """All sizes of one collective on a machine."""
    name, collective = job
    t = machine_of(name)
    begin = time.perf_counter()
    plan = make_plan(t, collectives=(collective,), roots=(0,))
    planned = time.perf_counter() - begin
    packings, _ = all_packings(t, collective, 0)
    rows = []
    for nbytes in SIZES:
        call = call_of_bytes(collective, t.n, max(nbytes, 4 * t.n))
        rule = choose(plan, call)
        taken = seconds(plan.packing(collective, call.root, rule.scheme), t, call, rule)
        others = dict(offers(packings, t, call))
        least = min(taken, *others.values())
        rows.append({
            "machine": name, "ranks": t.n, "collective": collective, "bytes": nbytes, "chosen": rule.scheme,
            "chunk_bytes": rule.chunk_bytes, "seconds": taken, "fastest": least, "longer": taken / least,
            "schemes": others, "planning_seconds": round(planned, 3),
        })  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    """Price everything and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machines", nargs="*", default=list(MACHINES), metavar="M")
    parser.add_argument("--collectives", nargs="*", default=list(COLLECTIVES), choices=COLLECTIVES, metavar="C")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("-o", dest="output", type=Path, default=RESULT, metavar="FILE")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for some in pool.map(judged, [(m, c) for m in args.machines for c in args.collectives]):
            rows += some
            for row in some:
                if row["longer"] > NEAR:
                    print(json.dumps(row), flush=True)
    near = sum(row["longer"] <= NEAR for row in rows)
    args.output.write_text(json.dumps({**head("choice"), "near": near, "rows": rows}, indent=1) + "\n")
    print(f"{near} of {len(rows)} calls are within 3 % of the fastest scheme")
    return 0


if __name__ == "__main__":
    sys.exit(main())
