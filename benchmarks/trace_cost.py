"""What a trace costs a call on CPU ranks: ``python benchmarks/trace_cost.py -o FILE [--against CHECKOUT]``.

One job has three communicators: a plain one, one that measures times (``BLINKMPI_TIMES``) and one that is traced
(``BLINKMPI_TRACE``). They make the same Allreduce in turn, call by call, so that what changes on the machine in the
meantime changes all of them; each result is checked. A ratio is the median over the turns of a communicator's time
divided by the plain one's beside it; a time is that of the slowest rank.

With ``--against``, the plain calls of another checkout, from before there were counters, are measured in jobs that take
turns with this one's: what the counters cost where nothing is traced. There a time is the least of all calls.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__" and "--rank" not in sys.argv:
    sys.path.insert(0, str(ROOT))  # this checkout; a rank takes the one of PYTHONPATH

MANY_BYTES = 500 << 20  # short calls have so many more turns that they reduce so much
SIZES = tuple(1 << k for k in range(20, 27))
HOW = {"plain": {}, "times": {"BLINKMPI_TIMES": "1"}, "trace": {"BLINKMPI_TRACE": "{folder}/trace.json"}}


def rank(sizes: Sequence[int], turns: int, modes: Sequence[str], algo: str, file: Path) -> None:
    """Measure on all ranks; rank 0 writes ``file``."""
    import numpy as np
    from mpi4py import MPI

    import blinkmpi

    world, comms = MPI.COMM_WORLD, []
    for mode in modes:
        variables = {name: value.format(folder=file.parent) for name, value in HOW[mode].items()}
        os.environ.update(variables)
        comms.append(blinkmpi.Communicator(world, algo=algo or None))
        for name in variables:
            del os.environ[name]
    rows = []
    for nbytes in sizes:
        x, y = np.full(nbytes // 4, world.rank + 1, np.float32), np.empty(nbytes // 4, np.float32)
        count = max(turns, MANY_BYTES // nbytes)
        seconds = np.zeros((count + 1, len(comms)))  # the first turn warms up
        wrong = 0
        for turn in range(count + 1):
            for i in range(len(comms)):
                which = (i + turn) % len(comms)
                y.fill(-1)
                world.Barrier()
                start = time.perf_counter()
                comms[which].Allreduce(x, y)
                seconds[turn, which] = time.perf_counter() - start
                wrong += int((y != sum(range(1, world.size + 1))).sum())
        slowest = world.allreduce(seconds, op=MPI.MAX) if world.size == 1 else np.max(world.allgather(seconds), axis=0)
        row = {"bytes": nbytes, "wrong": world.allreduce(wrong), "us": (slowest[1:] * 1e6).tolist()}
        rows.append(row)
    facts = {"machine": comms[0].machine.name, "executor": comms[0].executor, "code": blinkmpi.__file__}
    for comm in comms:
        comm.Free()
    if world.rank == 0:
        file.write_text(json.dumps({"rows": rows, **facts}), encoding="utf-8")


def job(n: int, checkout: Path, words: Sequence[str], limit: float, folder: str) -> dict[str, Any]:
    """Run one job of a checkout; what its rank 0 wrote."""
    from benchmarks.jobs import SETTINGS, load, mpirun, run_job

    file = Path(folder) / "rank.json"
    file.unlink(missing_ok=True)
    argv = [*mpirun(n), sys.executable, str(Path(__file__).resolve()), *words, "--rank", str(file)]
    why, said = run_job(argv, {**SETTINGS, "PYTHONPATH": str(checkout)}, limit)
    found = load(file)
    if why or found is None:
        raise SystemExit(f"{said}\n{why or 'no result'}")
    if not Path(found["code"]).is_relative_to(checkout):
        raise SystemExit(f"{found['code']} was measured, not {checkout}: install blinkmpi in place, or not at all")
    return found


def ratios(found: dict[str, Any], modes: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each size: the medians, and of each mode the ratio to the plain call beside it, with its quartiles."""
    rows = []
    for row in found["rows"]:
        columns = list(zip(*row["us"], strict=True))
        made: dict[str, Any] = {"bytes": row["bytes"], "turns": len(row["us"]), "wrong": row["wrong"]}
        for mode, column in zip(modes, columns, strict=True):
            beside = [a / b for a, b in zip(column, columns[0], strict=True)]
            made[mode] = {
                "us": median(column),
                "least_us": min(column),
                "ratio": median(beside),
                "quartiles": quantiles(beside, n=4)[::2],
                "least_ratio": min(column) / min(columns[0]),
            }
        rows.append(made)
    return rows


def against(args: argparse.Namespace, words: Sequence[str], folder: str) -> list[dict[str, Any]]:
    """A row for each size: plain calls here and in the other checkout, in jobs that take turns."""
    times: dict[int, dict[str, list[float]]] = {}
    for turn in range(args.rounds):
        both = [("here", ROOT), ("before", args.against.resolve())]
        for name, checkout in both[:: 1 - 2 * (turn % 2)]:
            for row in job(args.n, checkout, [*words, "--modes", "plain"], args.limit, folder)["rows"]:
                by = times.setdefault(row["bytes"], {"here": [], "before": []})
                by[name].append(min(us for (us,) in row["us"]))
    return [
        {"bytes": nbytes, "rounds": args.rounds, "here_us": min(by["here"]), "before_us": min(by["before"]),
         "ratio": min(by["here"]) / min(by["before"]), "times": by}
        for nbytes, by in times.items()
    ]  # fmt: skip


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a trace costs a call on CPU ranks.")
    add = parser.add_argument
    add("-np", type=int, default=4, dest="n", metavar="N", help="ranks (default 4)")
    add("--sizes", default=",".join(map(str, SIZES)), metavar="LIST", help="bytes (default 1 to 64 MiB)")
    add("--turns", type=int, default=30, metavar="N", help="calls of each communicator and size, at least (default 30)")
    add("--algo", default="", help="the scheme, as BLINKMPI_ALGO (default: the plan's)")
    add("--against", type=Path, metavar="CHECKOUT", help="also measure this checkout's plain calls")
    add("--rounds", type=int, default=5, metavar="N", help="jobs of each checkout (default 5)")
    add("--limit", type=float, default=300, metavar="SECONDS", help="for a job (default 300)")
    add("-o", dest="output", metavar="FILE", help="write the JSON; an existing file is kept")
    add("--modes", default=",".join(HOW), help=argparse.SUPPRESS)
    add("--rank", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the file if one is named; 1 if a result was wrong."""
    args = arguments(argv)
    modes = args.modes.split(",")
    if args.rank is not None:
        rank([int(size) for size in args.sizes.split(",")], args.turns, modes, args.algo, args.rank)
        return 0
    from benchmarks import jobs

    began, words = datetime.now().astimezone(), ["--sizes", args.sizes, "--turns", str(args.turns), "--algo", args.algo]
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as folder:
        found = job(args.n, ROOT, words, args.limit, folder)
        rows = ratios(found, modes)
        other = against(args, words, folder) if args.against else []
    print(f"{'bytes':>10} {'plain us':>10} times, trace: median of ratios (ratio of the least times)")
    for row in rows:
        cells = [f"{row[mode]['ratio']:>8.4f} ({row[mode]['least_ratio']:.4f})" for mode in modes[1:]]
        wrong = f"  {row['wrong']} WRONG" if row["wrong"] else ""
        print(f"{row['bytes']:>10} {row['plain']['us']:>10.1f} {' '.join(cells)}{wrong}")
    for row in other:
        print(f"{row['bytes']:>10} {row['here_us']:>10.1f} us here, {row['before_us']:.1f} before: {row['ratio']:.4f}")
    head = {"trace_cost": {"algo": args.algo, "modes": HOW}, "against": other}
    statistic = "median over turns of the slowest rank's time; ratios to the plain call of the same turn"
    facts = {"collective": "allreduce", "dtype": "float32", "op": "sum", "memory": "host", "ranks": args.n}
    facts |= {"machine": found["machine"], "executor": found["executor"], "statistic": statistic}
    made = jobs.document(head, rows, [], began, **facts)
    if args.output:
        jobs.write(args.output, made)
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
