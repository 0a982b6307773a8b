"""Short calls beside plain mpi4py: ``python benchmarks/small_calls.py -np 4 -o small-np4.json``.

All collectives from 8 B to 1 MiB in one job of CPU ranks, ours and mpi4py's blocking methods in turn on the same
buffers. A time is that of one call between two barriers of MPI, of the slowest rank: the median over the iterations.
A row is measured in several rounds that lie far apart in the run, and its ratio is the median of their ratios, so that
what else the machine does for a moment counts little. With ``--hosts 2`` the ranks run on so many hosts, which are
namespaces of this machine (as in ``hosts.py``), joined by unshaped virtual links. More ranks than cores are marked.

``communicators``, beside the collectives, are ``Split`` and ``Dup`` with the ``Free`` behind them: without a call on
the communicator, and with an Allreduce of 32 B, the first call of ours, which opens it.
"""

import argparse
import faulthandler
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks import jobs  # noqa: E402
from benchmarks.jobs import PLACES, SETTINGS, load, mpirun, python_path, run_job  # noqa: E402
from blinkmpi.bench.nccl_tests import TEST_NAMES, call_of_size  # noqa: E402
from blinkmpi.program.call import REDUCTIONS, Call, collective_named  # noqa: E402
from blinkmpi.trees.tree import ROOTED  # noqa: E402

SIZES = (8, 64, 512, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
BARRIER = "barrier"
OF_BLOCKS = {"gatherv": "Gatherv", "scatterv": "Scatterv", "allgatherv": "Allgatherv", "alltoallv": "Alltoallv"}
COMMUNICATORS = "communicators"
COLLECTIVES = (*TEST_NAMES, *OF_BLOCKS, BARRIER, COMMUNICATORS)
MADE: dict[str, Callable[[Any], Any]] = {"split": lambda comm: comm.Split(0, comm.rank), "dup": lambda comm: comm.Dup()}
FIRST_CALLS = (0, 32)  # bytes of the call on a communicator before it is freed; 0: none
DTYPE, OP = "float32", "sum"
WARMUP = 3
GOAL = 0.97  # of mpi4py's speed


def calls_of(n: int, collectives: Sequence[str], sizes: Sequence[int]) -> list[tuple[str, Call]]:
    """The rows: what holds less than an element for each rank is left out, and each call stands there once.

    A v-variant has equal blocks, whose lengths and places are passed, and the name of its own.
    """
    found: list[tuple[str, Call]] = []
    for name in collectives:
        if name in (BARRIER, COMMUNICATORS):
            continue
        collective = collective_named(name.removesuffix("v") if name in OF_BLOCKS else name)
        op, root = OP if collective in REDUCTIONS else "", 0 if collective in ROOTED else -1
        rows = (call_of_size(collective, n, size, DTYPE, op, root) for size in sizes)
        found += dict.fromkeys((name if name in OF_BLOCKS else collective, call) for call in rows if call.total)
    return found


def with_blocks(call: Call, arguments: tuple[Any, ...], kind: Any) -> list[Any]:
    """The arguments of a v-variant: where a buffer has a block for each rank, their lengths, places and type, too."""
    count, n = call.counts[0], call.n
    blocks = [count] * n, [r * count for r in range(n)], kind
    whole = {"gather": (1,), "allgather": (1,), "scatter": (0,)}.get(call.collective, (0, 1))
    return [[a, *blocks] if i in whole and hasattr(a, "dtype") else a for i, a in enumerate(arguments)]


# ---------------------------------------------------------------- a rank


def rank(hosts: Sequence[int], collectives: Sequence[str], sizes: Sequence[int], repeats: tuple[int, int], to: Path) -> None:  # fmt: skip  # noqa: E501
    """Measure on all ranks; rank 0 writes the file ``to``.

    Args:
        hosts: ranks of each host, to check where they run; empty for one host.
        repeats: rounds, and iterations of a row in each.
    """
    import numpy as np
    from mpi4py import MPI

    from blinkmpi.bench.layout import Buffers, Layout
    from blinkmpi.bench.peers import MpiPeer
    from blinkmpi.bench.time_host import measure
    from blinkmpi.bench.timing import Contender, Timing, call_facts, our_call
    from blinkmpi.communicator import Communicator
    from blinkmpi.runtime.inspection import choice

    world = MPI.COMM_WORLD
    if hosts:
        from tests.hosts.rank import check_layout

        check_layout(world, tuple(hosts))
    rounds, iterations = repeats
    timing = Timing(iterations=iterations, warmup=WARMUP)
    calls = calls_of(world.size, collectives, sizes)
    buffers = Buffers([*(call for _, call in calls), Call("broadcast", world.size, (1,), DTYPE, root=0)])
    peer = MpiPeer(world, MPI)
    found: dict[tuple[str, int, str], dict[str, Any]] = {}

    def once(comm: Any, name: str, call: Call, place: str) -> None:
        layout = Layout(call, world.rank, buffers, in_place=place == PLACES[1], marker=MPI.IN_PLACE)
        if name in OF_BLOCKS:
            arguments = (*with_blocks(call, layout.arguments, MPI.FLOAT), *([call.root] if call.root >= 0 else []))
            pair = [Contender(layout, partial(getattr(of, OF_BLOCKS[name]), *arguments)) for of in (comm, world)]
            note(name, call.nbytes, place, measure(world, MPI, pair, timing))
            return
        contenders = [Contender(layout, our_call(comm, layout)), peer.contender(call, buffers, in_place=layout.in_place)]  # fmt: skip  # noqa: E501
        note(call.collective, call.nbytes, place, measure(world, MPI, contenders, timing))
        found[call.collective, call.nbytes, place]["how"] = choice(
            comm.context, call.collective, call.nbytes, **call_facts(call)
        )

    def barrier(comm: Any) -> None:
        layout = Nothing()
        pair = [Contender(layout, comm.Barrier), Contender(layout, world.Barrier)]  # type: ignore[arg-type]
        note(BARRIER, 0, PLACES[0], measure(world, MPI, pair, timing))

    def made(comm: Any, name: str, size: int) -> None:
        sent, received = np.ones(size, np.uint8).view(DTYPE), np.zeros(size, np.uint8).view(DTYPE)

        def once(parent: Any) -> None:
            child = MADE[name](parent)
            if size:
                child.Allreduce(sent, received)
            child.Free()

        layout = Nothing()
        pair = [Contender(layout, partial(once, parent)) for parent in (comm, world)]  # type: ignore[arg-type]
        note(name, size, PLACES[0], measure(world, MPI, pair, timing))

    def note(collective: str, size: int, place: str, pair: Sequence[Any]) -> None:
        row = found.setdefault((collective, size, place), {"ours": [], "mpi": []})
        for side, one in zip(("ours", "mpi"), pair, strict=True):
            row[side].append({"us": one.time_us, "spread_us": one.spread, "wrong": one.wrong or 0})

    with Communicator(world) as comm:
        todo: list[Callable[[], None]] = [partial(once, comm, *c, p) for c in calls for p in PLACES if has(c[1], p)]
        todo += [partial(barrier, comm)] if BARRIER in collectives else []
        children = [(name, size) for name in MADE for size in FIRST_CALLS] if COMMUNICATORS in collectives else []
        todo += [partial(made, comm, *child) for child in children]
        for _ in range(rounds):
            for work in todo:
                work()
        facts = {"rows": [{"collective": c, "size": s, "place": p, **row} for (c, s, p), row in found.items()]}
        facts |= jobs.rank_facts(MPI, comm)
        facts["cores"] = len(os.sched_getaffinity(0))
    if world.rank == 0:
        to.write_text(json.dumps(facts), encoding="utf-8")


def has(call: Call, place: str) -> bool:
    """Whether a call differs in place: a broadcast has one buffer."""
    return place == PLACES[0] or call.collective != "broadcast"


class Nothing:
    """The layout of a call without data."""

    in_place = False

    def prepare(self) -> None:
        """There is nothing to write."""

    def wrong(self) -> Any:
        """Nor to check."""
        from blinkmpi.bench.verification import Wrong

        return Wrong(0, ())


# ---------------------------------------------------------------- the driver


def row_of(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the file, of its rounds: medians of the times, and of the ratios of the rounds."""
    sides = {
        side: {"us": median(one["us"] for one in row[side]), "spread_us": spread([one["us"] for one in row[side]]),
               "wrong": sum(one["wrong"] for one in row[side])}
        for side in ("ours", "mpi")
    }  # fmt: skip
    ratios = [theirs["us"] / ours["us"] for ours, theirs in zip(row["ours"], row["mpi"], strict=True)]
    facts = {name: row[name] for name in ("collective", "size", "place", "how") if name in row}
    return {**facts, **sides, "ratio": median(ratios), "ratios": ratios}


def spread(values: Sequence[float]) -> list[float]:
    """Minimum, median and maximum."""
    return [min(values), median(values), max(values)]


def wrong_in(row: dict[str, Any]) -> int:
    """Wrong elements of a row."""
    found: int = row["ours"]["wrong"] + row["mpi"]["wrong"]
    return found


def job(args: argparse.Namespace, file: Path) -> tuple[str, str]:
    """Run the ranks; (what went wrong, or nothing; what they said)."""
    words = ["--collectives", args.collectives, "--sizes", args.sizes, "--rounds", str(args.rounds)]
    words += ["--iters", str(args.iters), "--limit", str(args.limit), "--rank", str(file)]
    own = [str(Path(__file__).resolve()), "-np", str(args.n), *words]
    settings = {**SETTINGS, "PYTHONPATH": python_path()}
    if args.hosts == 1:
        return run_job([*mpirun(args.n), sys.executable, *own], settings, args.limit)
    from tests.hosts.world import World

    with World(args.hosts) as world:
        argv = [sys.executable, *own, "--hosts", str(args.hosts)]
        outcome = world.run(layout(args), argv, timeout=args.limit, env=settings)
    why = f"no end after {args.limit:.0f} s" if outcome.timed_out else f"exit status {outcome.rc}" if outcome.rc else ""
    return why, outcome.output


def layout(args: argparse.Namespace) -> tuple[int, ...]:
    """Ranks of each host."""
    each, more = divmod(args.n, args.hosts)
    return tuple(each + (i < more) for i in range(args.hosts))


def document(args: argparse.Namespace, found: dict[str, Any], began: datetime) -> dict[str, Any]:
    """The file."""
    head = {"small_calls": {"rounds": args.rounds, "iterations": args.iters, "warmup": WARMUP, "goal": GOAL,
                            "hosts": args.hosts, "oversubscribed": args.n > found["cores"],
                            "niceness": os.nice(0), "load": os.getloadavg()[0]},
            "env": found["env"]}  # fmt: skip
    rows = [row_of(row) for row in found["rows"]]
    head["communicators"] = [row for row in rows if row["collective"] in MADE]
    rows = [row for row in rows if row["collective"] not in MADE]
    statistic = "median over rounds of the median over iterations of the slowest rank's time of one call"
    return jobs.document(head, rows, [], began, ranks=args.n, memory="host",
                         dtype=DTYPE, op=OP, compare=["mpi"], statistic=statistic, versions=found["versions"],
                         machine=found["machine"])  # fmt: skip


def table(made: dict[str, Any]) -> str:
    """Ratios to mpi4py by collective and size, and what lies below the goal."""
    rows = made["results"]
    sizes = sorted({row["size"] for row in rows})
    lines = [f"{'mpi4py / ours':>30}" + "".join(f"{size:>9}" for size in sizes)]
    for collective, place in dict.fromkeys((row["collective"], row["place"]) for row in rows):
        own = {row["size"]: row for row in rows if (row["collective"], row["place"]) == (collective, place)}
        cells = [f"{own[size]['ratio']:9.2f}" if size in own else f"{'':>9}" for size in sizes]
        lines.append(f"{collective:>17} {place:>12}" + "".join(cells))
        lines.append(f"{'us':>30}" + "".join(f"{own[s]['ours']['us']:9.1f}" if s in own else " " * 9 for s in sizes))
    lines += communicators(made)
    if not rows:
        return "\n".join(lines[1:])
    ratios = [row["ratio"] for row in rows]
    below = sum(ratio < GOAL for ratio in ratios)
    lines.append(f"{len(rows)} rows, mean {geometric_mean(ratios):.2f}, least {min(ratios):.2f}, {below} below {GOAL}")
    return "\n".join(lines)


def communicators(made: dict[str, Any]) -> list[str]:
    """A line for each way to make a communicator and free it, with a call on it or without."""
    return [
        f"{row['collective']:>17} {'32 B' if row['size'] else 'no call':>12}{row['ratio']:9.2f}"
        f"  {row['ours']['us']:.1f} us, mpi4py {row['mpi']['us']:.1f}"
        for row in made["communicators"]
    ]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Short calls beside plain mpi4py.")
    add = parser.add_argument
    add("-np", type=int, default=2, dest="n", metavar="N", help="ranks (default 2)")
    add("--hosts", type=int, default=1, metavar="N", help="hosts, made of namespaces (default 1)")
    add("--collectives", default=",".join(COLLECTIVES), metavar="LIST", help="default all")
    add("--sizes", default=",".join(map(str, SIZES)), metavar="LIST", help="bytes (default %(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="rounds of all rows (default 5)")
    add("--iters", type=int, default=40, metavar="N", help="timed calls of a row in a round (default 40)")
    add("--limit", type=float, default=300, metavar="SECONDS", help="for the job (default 300)")
    add("-o", dest="output", metavar="FILE", help="write the JSON; an existing file is kept")
    add("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.n < 2 or not 1 <= args.hosts <= args.n:
        parser.error(f"-np {args.n} --hosts {args.hosts}: take at least 2 ranks, and a rank for each host")
    if unknown := set(args.collectives.split(",")) - set(COLLECTIVES):
        parser.error(f"--collectives {', '.join(sorted(unknown))}: known are {', '.join(COLLECTIVES)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the file if one is named; 0 if all ended well and nothing was wrong."""
    args = arguments(argv)
    if args.rank is not None:
        faulthandler.dump_traceback_later(args.limit, exit=True)
        sizes = [int(size) for size in args.sizes.split(",")]
        where = layout(args) if args.hosts > 1 else ()
        rank(where, args.collectives.split(","), sizes, (args.rounds, args.iters), args.rank)
        faulthandler.cancel_dump_traceback_later()
        return 0
    began = datetime.now().astimezone()
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as folder:
        file = Path(folder) / "rows.json"
        why, said = job(args, file)
        found = load(file)
    if why or found is None:
        print(f"{said}\nsmall_calls: error: {why or 'no result'}", file=sys.stderr)
        return 2
    made = document(args, found, began)
    print(table(made))
    if args.output:
        jobs.write(args.output, made)
    return int(any(map(wrong_in, made["results"])))


if __name__ == "__main__":
    sys.exit(main())
