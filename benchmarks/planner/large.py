"""Plan for machines of 65 to 4096 GPUs: ``python benchmarks/planner/large.py``.

Every collective on the machines of ``large_machines.py``: those that data centres are built of, and 40 that are drawn,
with parts that are dead or slow. Each packing is proved by ``pack`` itself. Writes ``results/treegen-large.json``:
rate, bound, depth, CPU time and memory of each, in a process of its own.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import time
from pathlib import Path
from typing import Any

from large_machines import USUAL, drawn
from methods import head

from blinkmpi.errors import NoPackingError, TopologyError
from blinkmpi.topology.model import Topology
from blinkmpi.trees.packing import pack

RESULT = Path(__file__).resolve().parents[1] / "results" / "treegen-large.json"
COLLECTIVES = ("allreduce", "broadcast", "allgather", "reduce", "reduce_scatter", "gather", "scatter", "alltoall")
Job = tuple[str | int, str]  # a machine's name or seed, and a collective


def built(which: str | int) -> tuple[str, Topology]:
    """A machine and what it is called."""
    name, plan = (which, USUAL[which]()) if isinstance(which, str) else drawn(which)
    return name, plan.done(name)


def judged(job: Job) -> dict[str, Any]:
    """One packing."""
    which, collective = job
    name, t = built(which)
    row: dict[str, Any] = {"machine": name, "seed": which, "ranks": t.n, "collective": collective}
    if isinstance(which, str):
        row.pop("seed")
    start = time.process_time()
    try:
        found = pack(t, collective, root=t.n // 3)
    except (NoPackingError, TopologyError) as error:
        return row | {"outcome": "as scatters" if collective == "alltoall" else "none", "error": str(error)[:200]}
    seconds, memory = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return row | {
        "scheme": found.scheme, "rate_gbps": float(found.rate) / 1000, "bound_gbps": float(found.bound) / 1000,
        "of_bound": float(found.rate / found.bound), "trees": len(found.trees), "depth": found.depth,
        "seconds": round(seconds, 3), "memory_mb": memory >> 10,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--drawn", type=int, default=40, help="machines that are drawn")
    parser.add_argument("-o", dest="output", type=Path, default=RESULT, metavar="FILE")
    args = parser.parse_args(argv)
    jobs: list[Job] = [(which, collective) for which in (*USUAL, *range(args.drawn)) for collective in COLLECTIVES]
    rows = []
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for row in pool.imap(judged, jobs):
            rows.append(row)
            print(json.dumps(row), flush=True)
    args.output.write_text(json.dumps({**head("treegen-large"), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
