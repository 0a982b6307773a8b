"""Times of the library's algorithms on CPU ranks: ``python benchmarks/lang/measure.py -np 4 -o FILE``.

Every algorithm that runs on so many ranks, what a call takes by default, and mpi4py's call, in one job, in turn on the
same buffers, out of place. A time is that of one call between two barriers of MPI, of the slowest rank: the median over
the iterations. A row is measured in several rounds that lie far apart in the run; it has the medians over the rounds.
With ``--nodes 2+2`` the job has such virtual nodes (``BLINKMPI_NODES``) and the algorithms that are for nodes. Each row
has what ``bench --predict`` says of it, too: by the steps of calls, timed first, or between nodes by the cost model.
"""

from __future__ import annotations

import argparse
import faulthandler
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks import jobs  # noqa: E402
from blinkmpi.bench.nccl_tests import call_of_size  # noqa: E402
from blinkmpi.lang import Algorithm, library  # noqa: E402
from blinkmpi.lang.written import Written  # noqa: E402
from blinkmpi.program.call import REDUCTIONS, Call  # noqa: E402

SIZES = (64 << 10, 1 << 20, 16 << 20)
LONG = 4 << 20  # bytes: vectors of at least so many have fewer iterations
DTYPE, OP = "float32", "sum"
SIDES = ("algorithm", "default", "mpi")


def algorithms(n: int, nodes: Sequence[int] = ()) -> list[Algorithm]:
    """Those of the library for ``n`` ranks; on nodes those that take ranks in a node, and otherwise the others."""
    found = []
    for written in (value for value in vars(library).values() if isinstance(value, Written)):
        if "k" in inspect.signature(written.body).parameters:
            found += [written(n, nodes[0])] if nodes else []
        elif not nodes and (written.ranks is None or n in written.ranks):
            found.append(written(n))
    return found


def call_for(made: Algorithm, nbytes: int) -> Call:
    """The call of an algorithm whose largest buffer has so many bytes."""
    collective: Any = made.collective
    return call_of_size(collective, made.n, nbytes, DTYPE, OP if collective in REDUCTIONS else "", made.root)


# ---------------------------------------------------------------- a rank


def rank(nodes: Sequence[int], sizes: Sequence[int], repeats: tuple[int, int, int], to: Path) -> None:
    """Measure on all ranks; rank 0 writes the file ``to``.

    Args:
        repeats: rounds, and iterations of a short and of a long row in each.
    """
    from mpi4py import MPI

    from blinkmpi.bench.layout import Buffers, Layout
    from blinkmpi.bench.peers import MpiPeer
    from blinkmpi.bench.time_host import measure
    from blinkmpi.bench.timing import Contender, Timing, call_facts, our_call
    from blinkmpi.communicator import Communicator
    from blinkmpi.runtime.inspection import choice, measure_steps, predict

    world = MPI.COMM_WORLD
    rounds, short, long = repeats
    chosen = algorithms(world.size, nodes)
    calls = {made: [call_for(made, size) for size in sizes] for made in chosen}
    buffers, peer = Buffers([call for some in calls.values() for call in some]), MpiPeer(world, MPI)
    for memory in buffers.whole:  # pages that nothing was written to yet are all one
        memory.fill(0)
    rows: dict[tuple[Algorithm, Call], dict[str, Any]] = {}

    def said(comm: Any, call: Call, rates: Any) -> dict[str, Any]:
        """How a call runs, what is predicted for it, and by what."""
        what = (comm.context, call.collective, call.nbytes)
        seconds, bound = predict(*what, **call_facts(call), rates=rates)
        return {
            "how": choice(*what, **call_facts(call)),
            "predicted_us": None if seconds is None else seconds * 1e6,
            "bound_us": None if bound is None else bound * 1e6,
            "predicted_by": "steps" if rates is not None else "cost model",
        }

    with ExitStack() as opened:
        default = opened.enter_context(Communicator(world))
        if nodes and [len(default.machine.ranks_of(node)) for node in default.machine.nodes] != list(nodes):
            raise SystemExit(f"{default.machine.name} is not {nodes}: set BLINKMPI_NODES for all ranks")
        one_each = {made.collective: calls[made] for made in chosen}
        for collective in one_each:
            default.plan(collective)
        every = [call for some in one_each.values() for call in some]
        usual = measure_steps(default.context, every, buffers.whole, default.Barrier)
        comms = {}
        for made in chosen:
            own = Communicator(world, algo=f"{made.collective}:{made.scheme}", algorithms=[made])
            comms[made] = opened.enter_context(own)
            own.plan(made.collective)
            rates = measure_steps(own.context, calls[made], buffers.whole, own.Barrier)
            for call in calls[made]:
                by_default = said(default, call, usual)
                rows[made, call] = {"algorithm": said(own, call, rates), "default": by_default, "rounds": []}
        for _ in range(rounds):
            for (made, call), row in rows.items():
                layout = Layout(call, world.rank, buffers, in_place=False, marker=MPI.IN_PLACE)
                ours = [Contender(layout, our_call(comm, layout)) for comm in (comms[made], default)]
                timing = Timing(iterations=long if call.nbytes >= LONG else short)
                found = measure(world, MPI, [*ours, peer.contender(call, buffers, in_place=False)], timing)
                row["rounds"].append([{"us": one.time_us, "wrong": one.wrong} for one in found])
        job = {"rows": [{"name": made.name, "collective": call.collective, "size": call.nbytes, **row}
                        for (made, call), row in rows.items()]}  # fmt: skip
        job |= jobs.rank_facts(MPI, default)
        job["cores"] = len(os.sched_getaffinity(0))
    if world.rank == 0:
        to.write_text(json.dumps(job), encoding="utf-8")


# ---------------------------------------------------------------- the driver


def row_of(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the file: medians over the rounds, of times and of what the others take in terms of the algorithm."""
    found = {key: row[key] for key in ("name", "collective", "size")}
    for i, side in enumerate(SIDES):
        times = [one[i]["us"] for one in row["rounds"]]
        wrong = sum(one[i]["wrong"] for one in row["rounds"])
        spread = [min(times), median(times), max(times)]
        found[side] = {"us": median(times), "spread_us": spread, "wrong": wrong, **row.get(side, {})}
        if i:
            found[side]["ratio"] = median(one[i]["us"] / one[0]["us"] for one in row["rounds"])
    return found


def wrong_in(row: dict[str, Any]) -> int:
    """Wrong elements of a row."""
    return sum(int(row[side]["wrong"]) for side in SIDES)


def document(args: argparse.Namespace, job: dict[str, Any], began: datetime) -> dict[str, Any]:
    """The file."""
    about = {"rounds": args.rounds, "iterations": [args.iters, args.long_iters], "nodes": args.nodes,
             "oversubscribed": args.n > job["cores"], "load": os.getloadavg()[0]}  # fmt: skip
    statistic = "median over rounds of the median over iterations of the slowest rank's time of one call, out of place"
    return jobs.document(
        {"lang_measured": about, "env": job["env"]}, [row_of(row) for row in job["rows"]], [], began, ranks=args.n,
        memory="host", dtype=DTYPE, op=OP, statistic=statistic, versions=job["versions"], machine=job["machine"],
    )  # fmt: skip


def table(made: dict[str, Any]) -> str:
    """The rows for a terminal."""
    heads = ("bytes", "bound", "predicted", "us", "default", "mpi", "wrong")
    lines = [f"{'algorithm':>20}" + "".join(f"{head:>10}" for head in heads)]
    for row in made["results"]:
        times = (row["default"]["bound_us"], row["algorithm"]["predicted_us"], *(row[side]["us"] for side in SIDES))
        cells = "".join(f"{'-' if us is None else f'{us:.1f}':>10}" for us in times)
        lines.append(f"{row['name']:>20}{row['size']:10}{cells}{wrong_in(row):10}")
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times of the library's algorithms on CPU ranks.")
    add = parser.add_argument
    add("-np", type=int, default=4, dest="n", metavar="N", help="ranks (default 4)")
    add("--nodes", default="", metavar="K+K", help="virtual nodes of as many ranks each; default one node")
    add("--sizes", default=",".join(map(str, SIZES)), metavar="LIST", help="bytes (default %(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="rounds of all rows (default 3)")
    add("--iters", type=int, default=15, metavar="N", help="timed calls of a short row in a round (default 15)")
    add("--long-iters", type=int, default=5, metavar="N", help="of one of 4 MiB and more (default 5)")
    add("--limit", type=float, default=140, metavar="SECONDS", help="for the job (default 140)")
    add("-o", dest="output", metavar="FILE", help="write the JSON; an existing file is kept")
    add("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    nodes = [int(k) for k in args.nodes.split("+")] if args.nodes else []
    if nodes and (sum(nodes) != args.n or len(set(nodes)) > 1 or len(nodes) < 2):
        parser.error(f"--nodes {args.nodes}: expected nodes of equal size with {args.n} ranks in all, such as 2+2")
    if args.n < 2:
        parser.error(f"-np {args.n}: take at least 2 ranks")
    args.sizes_of, args.nodes_of = [int(size) for size in args.sizes.split(",")], nodes
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the file if one is named; 0 if all ended well and nothing was wrong."""
    args = arguments(argv)
    if args.rank is not None:
        faulthandler.dump_traceback_later(args.limit, exit=True)
        rank(args.nodes_of, args.sizes_of, (args.rounds, args.iters, args.long_iters), args.rank)
        faulthandler.cancel_dump_traceback_later()
        return 0
    began = datetime.now().astimezone()
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as folder:
        file = Path(folder) / "rows.json"
        own = [str(Path(__file__).resolve()), *(sys.argv[1:] if argv is None else argv), "--rank", str(file)]
        settings = {**jobs.SETTINGS, "PYTHONPATH": jobs.python_path()}
        settings |= {"BLINKMPI_NODES": args.nodes} if args.nodes else {}
        why, said = jobs.run_job([*jobs.mpirun(args.n), sys.executable, *own], settings, args.limit)
        found = jobs.load(file)
    if why or found is None:
        print(f"{said}\nmeasure: error: {why or 'no result'}", file=sys.stderr)
        return 2
    made = document(args, found, began)
    print(table(made))
    if args.output:
        jobs.write(args.output, made)
    return int(any(map(wrong_in, made["results"])))


if __name__ == "__main__":
    sys.exit(main())
