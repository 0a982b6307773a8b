"""What a repeated Allreduce of tiny tensors costs on CPU ranks: ``python benchmarks/call_cost.py -o FILE``.

K tensors of different lengths are reduced one after another, in a cycle that repeats, as a training step reduces its
gradients. K goes through sizes below and above what a communicator remembers of its calls. Our calls and those of plain
mpi4py run in the same job on the same buffers, cycle by cycle in turn, and every result is checked. A time is
microseconds per call: the median over the cycles of the slowest rank's time, divided by K.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks.jobs import SETTINGS, mpirun, python_path, run_job  # noqa: E402
from blinkmpi.bench import environment as meta  # noqa: E402
from blinkmpi.bench.document import write_new  # noqa: E402

DISTINCT = (10, 64, 65, 160, 1000)
SHORTEST = 64  # elements of the first tensor; each of the others has one more
CALLS = 4000  # of each library and number of tensors, at least
FEWEST_CYCLES = 9
WARMUP_CYCLES = 2
STATISTIC = "median over cycles of the slowest rank's time, per call"


def cycles_of(distinct: int) -> int:
    """How many cycles are timed."""
    return max(FEWEST_CYCLES, CALLS // distinct)


# ---------------------------------------------------------------- a rank


def seconds_of_cycles(world: Any, cycles: Sequence[Callable[[], None]], count: int) -> list[list[float]]:
    """Seconds of each of ``count`` cycles of every library, of the slowest rank; the libraries take turns."""
    found: list[list[float]] = [[] for _ in cycles]
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(count):
            for cycle, seconds in zip(cycles, found, strict=True):
                world.Barrier()
                start = time.perf_counter()
                cycle()
                seconds.append(time.perf_counter() - start)
    finally:
        if collecting:
            gc.enable()
    ranks = world.allgather(found)
    return [[max(times) for times in zip(*(of[i] for of in ranks), strict=True)] for i in range(len(cycles))]


def measured(world: Any, mpi: Any, comm: Any, distinct: int) -> dict[str, Any]:
    """The row of one number of tensors."""
    import numpy as np

    sends = [np.full(SHORTEST + i, world.rank + 1, np.float32) for i in range(distinct)]
    receives = [np.empty_like(send) for send in sends]
    pairs = list(zip(sends, receives, strict=True))
    total = sum(range(1, world.size + 1))

    def ours() -> None:
        for send, receive in pairs:
            comm.Allreduce(send, receive)

    def plain() -> None:
        for send, receive in pairs:
            world.Allreduce(send, receive)

    wrong = []
    for cycle in (ours, plain):
        for receive in receives:
            receive.fill(-1)
        for _ in range(WARMUP_CYCLES):
            cycle()
        wrong.append(world.allreduce(sum(int((receive != total).sum()) for receive in receives), op=mpi.SUM))
    count = cycles_of(distinct)
    sides = []
    for seconds, bad in zip(seconds_of_cycles(world, (ours, plain), count), wrong, strict=True):
        us = [s / distinct * 1e6 for s in seconds]
        sides.append({"us": median(us), "spread_us": [min(us), median(us), max(us)], "wrong": bad})
    lengths = [SHORTEST, SHORTEST + distinct - 1]
    from blinkmpi.runtime.inspection import choice

    how = choice(comm.context, "allreduce", SHORTEST * 4)
    return {"distinct": distinct, "lengths": lengths, "cycles": count, "ours": sides[0], "mpi": sides[1],
            "ratio": sides[1]["us"] / sides[0]["us"], "how": how}  # fmt: skip


def rank(distinct: Sequence[int], file: Path) -> None:
    """Measure on all ranks; rank 0 writes ``file``."""
    from mpi4py import MPI

    from blinkmpi.communicator import Communicator

    world = MPI.COMM_WORLD
    with Communicator(world) as comm:
        rows = [measured(world, MPI, comm, k) for k in distinct]
        library = str(MPI.Get_library_version()).split(",")[0].strip("\0\n ")
        facts = {"versions": meta.versions(library, comm.executor), "env": meta.environment()}
        facts["machine"] = {"name": comm.machine.name, "fingerprint": comm.machine.fingerprint}
    if world.rank == 0:
        file.write_text(json.dumps({"rows": rows, **facts}), encoding="utf-8")


# ---------------------------------------------------------------- the driver


def document(n: int, found: dict[str, Any], began: datetime) -> dict[str, Any]:
    """The file."""
    ours = {**meta.commit(), "date": began.isoformat(timespec="seconds"), "ranks": n, "collective": "allreduce"}
    ours |= {"dtype": "float32", "op": "sum", "memory": "host", "compare": ["mpi"], "statistic": STATISTIC}
    ours |= {"hardware": meta.hardware(), "versions": found["versions"], "machine": found["machine"]}
    return {
        "call_cost": {"shortest": SHORTEST, "warmup_cycles": WARMUP_CYCLES},
        "args": [meta.without_folders(word) for word in sys.argv],
        "env": found["env"],
        "results": found["rows"],
        "blinkmpi": ours,
    }


def table(found: dict[str, Any]) -> str:
    """A line for each number of tensors."""
    lines = [f"{'tensors':>8} {'ours us':>9} {'mpi4py us':>10} {'ratio':>6} {'wrong':>6}"]
    for row in found["results"]:
        wrong = row["ours"]["wrong"] + row["mpi"]["wrong"]
        times = f"{row['ours']['us']:9.2f} {row['mpi']['us']:10.2f}"
        lines.append(f"{row['distinct']:8d} {times} {row['ratio']:6.2f} {wrong:6d}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job, print the table, write the file if one is named; 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(description="The cost of repeated Allreduces of tiny tensors of many lengths.")
    parser.add_argument("-np", type=int, default=2, dest="n", metavar="N", help="ranks (default 2)")
    parser.add_argument("--distinct", default=",".join(map(str, DISTINCT)), metavar="LIST",
                        help="numbers of tensors (default %(default)s)")  # fmt: skip
    parser.add_argument("-o", dest="output", metavar="FILE", help="write the JSON; an existing file is kept")
    parser.add_argument("--budget", type=float, default=300, metavar="SECONDS", help="for the job (default 300)")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank is not None:
        rank([int(k) for k in args.distinct.split(",")], args.rank)
        return 0
    began = datetime.now().astimezone()
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as folder:
        file = Path(folder) / "result.json"
        words = [sys.executable, str(Path(__file__).resolve()), "--distinct", args.distinct, "--rank", str(file)]
        why, said = run_job([*mpirun(args.n), *words], {**SETTINGS, "PYTHONPATH": python_path()}, args.budget)
        if why:
            print(f"{said}\ncall_cost: error: {why}", file=sys.stderr)
            return 2
        found = document(args.n, json.loads(file.read_text(encoding="utf-8")), began)
    print(table(found))
    if args.output:
        print(f"wrote {write_new(args.output, json.dumps(found, indent=1))}")
    return int(any(row[side]["wrong"] for row in found["results"] for side in ("ours", "mpi")))


if __name__ == "__main__":
    sys.exit(main())
