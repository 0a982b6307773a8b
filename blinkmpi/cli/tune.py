"""The command ``tune``: all ranks measure, rank 0 prints and keeps it: a table, or what steps cost on CPU ranks."""

import argparse
import datetime
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..lang.algorithms import Algorithm
from ..lang.source import algorithm_from_root, check_asked
from ..planning.tuned_table import TunedTable, file_of, read
from ..program.call import collective_named
from ..trees.tree import COLLECTIVES, Collective
from ..util.cache_folder import cache_dir, keep
from ..util.text import parse_size
from .machine import world as ranks_of

TIMED = ("allreduce", "broadcast", "allgather")
TUNED = tuple(c for c in COLLECTIVES if c != "barrier")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument(
        "collectives",
        nargs="*",
        metavar="C",
        help=f"default: all of {', '.join(TUNED)}; on CPU ranks {', '.join(TIMED)}",
    )
    what = "smallest vector; K M G are 2^10 2^20 2^30; default 1K, on CPU ranks 1M"
    parser.add_argument("-b", dest="begin", help=what)
    parser.add_argument("-e", dest="end", help="largest vector; default 1G, on CPU ranks 64M")
    parser.add_argument("-f", dest="factor", type=int, help="factor between two sizes; default 4, on CPU ranks 2")
    parser.add_argument("-o", metavar="FILE", dest="output", help="write the table here, not to the cache")
    what = "measure an algorithm of one's own too, such as x.py:NAME,PARAMETER=VALUE (docs/lang.md); may be repeated"
    parser.add_argument("--algorithm", action="append", default=[], metavar="FILE", help=what)
    what = "nccl: time calls that `blinkmpi nccl run` may make beside NCCL's, and keep which are faster"
    parser.add_argument("--beside", choices=("nccl",), help=what)
    parser.add_argument("-q", dest="quiet", action="store_true", help="no line per size")


def run(args: argparse.Namespace) -> int:
    """Measure on all ranks."""
    world = ranks_of(args)
    from ..communicator import Communicator
    from ..measure.tune import tune as measure
    from ..transport.cuda.kernels.compiler import kernels_digest

    if args.beside:
        return _beside_nccl(args, world)
    made = [algorithm_from_root(world, source) for source in args.algorithm]
    names = [collective_named(c) for c in args.collectives]
    for one in made:
        check_asked(one, None if not names or one.collective in names else names[0], max(one.root, 0))
    with Communicator(world, algorithms=made) as comm:
        if comm.context.gpus is None:
            return _time_steps(args, comm, names, made)
        names = names or list(dict.fromkeys((*TUNED, *(collective_named(one.collective) for one in made))))
        sizes = sizes_of(args, "1K", "1G", 4)
        gpus = comm.context.cuda()
        for one in made:
            comm.plan(one.collective, max(one.root, 0))
            if one.scheme not in gpus.plans.written(one.collective, one.root):
                raise ArgumentError(f"--algorithm: {one.name} cannot carry calls on these GPUs, whose plan has no "
                                    f"{one.scheme}; leave it out")  # fmt: skip

        def say(text: str) -> None:
            if world.rank == 0 and not args.quiet:
                print(text, flush=True)

        rules = measure(comm, names, sizes=sizes, say=say)
        if world.rank == 0:
            path = Path(args.output) if args.output else file_of(cache_dir(), gpus.gpu.name, gpus.machine)
            fresh = TunedTable(
                gpus.gpu.name, gpus.machine.n, gpus.machine.name, datetime.date.today().isoformat(),
                dict(gpus.gpu.versions), (), kernels_digest(),
            )  # fmt: skip
            before = read(path)
            if before is not None and before.kernels != fresh.kernels:
                print(f"what {path} had was measured with other kernels, and is dropped", file=sys.stderr)
                before = None
            keep(path, (before or fresh).joined(rules, gpus.plans.algorithms).to_json())
            for r in rules:
                kind = f"{'registered' if r.registered else 'any'}{', 8/16-bit floats' if r.widened else ''}"
                print(f"{r.collective:15} from {r.min_bytes:>10} B {kind:27} "
                      f"{r.scheme}/{r.protocol} chunk {r.chunk_bytes} ctas {r.ctas or 'default'}")  # fmt: skip
            print(f"kept in {path}", file=sys.stderr)
    return 0


def _beside_nccl(args: argparse.Namespace, world: Any) -> int:
    """Measure which calls are faster than NCCL's, and keep the table for unchanged programs."""
    from ..communicator import Communicator
    from ..nccl import table
    from ..nccl.beside import Nccl, measure
    from ..nccl.binder import COLLECTIVES
    from ..transport.cuda.kernels.compiler import kernels_digest

    if args.algorithm:
        raise ArgumentError("tune --beside nccl takes no --algorithm: such calls are not made in NCCL's place")
    names: list[str] = [collective_named(c) for c in args.collectives] or list(COLLECTIVES)
    if unknown := [name for name in names if name not in COLLECTIVES]:
        raise ArgumentError(f"tune --beside nccl {unknown[0]}: expected one of {', '.join(COLLECTIVES)}")
    sizes = sizes_of(args, "1K", "4M", 2)

    def say(text: str) -> None:
        if world.rank == 0 and not args.quiet:
            print(text, flush=True)

    with Communicator(world) as comm:
        gpus = comm.context.cuda()
        nccl = Nccl(world)
        found = measure(comm, nccl, names, sizes, say)
        nccl.close()
        if world.rank == 0:
            path = Path(args.output) if args.output else table.file_of(cache_dir(), gpus.gpu.name, gpus.machine)
            made = table.FasterTable(
                gpus.gpu.name, gpus.machine.n, gpus.machine.name, datetime.date.today().isoformat(), nccl.version,
                table.variables(), kernels_digest(), tuple(names), table.rows_of(found),
            )  # fmt: skip
            if (before := table.read(path)) is not None:
                made = before.joined(made)
            keep(path, made.to_json())
            for row in made.rows:
                print(f"{row.collective:15} {row.dtype:9} to {row.most_bytes:>9} B: {row.gain:.2f} times as fast")
            print(f"kept in {path}", file=sys.stderr)
    return 0


def sizes_of(args: argparse.Namespace, begin: str, end: str, usual: int) -> list[int]:
    """The sizes that were asked for, by what is usual where nothing was said.

    Raises:
        ArgumentError: for sizes that would have no end.
    """
    factor = usual if args.factor is None else args.factor
    if factor < 2:
        raise ArgumentError(f"-f {factor}: the factor between two sizes is at least 2; leave -f out for {usual}")
    begin, end = args.begin or begin, args.end or end
    sizes, most = [parse_size(begin)], parse_size(end)
    if not 1 <= sizes[0] <= most:
        raise ArgumentError(f"-b {begin} -e {end}: expected sizes from 1 byte on, the second not below the first")
    while sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return sizes


def _time_steps(args: argparse.Namespace, comm: Any, names: Sequence[Collective], made: Sequence[Algorithm]) -> int:
    """Time the steps of calls on CPU ranks, and keep what they cost for the predictions of later jobs.

    Args:
        comm: of these ranks, whatever its calls take.
        made: algorithms whose steps are timed, too.
    """
    from ..communicator import Communicator
    from ..forecast.rates import file_of as steps_file
    from ..forecast.rates import read as read_steps
    from ..measure.steps import time_steps

    context, sizes = comm.context, sizes_of(args, "1M", "64M", 2)
    if not context.forecasts:
        raise ArgumentError(
            f"tune is for GPUs ({context.why_no_gpus}), or for CPU ranks of one node whose calls C executes "
            f"({comm.executor}); start it there"
        )
    theirs = [collective_named(one.collective) for one in made]
    names = names or list(dict.fromkeys((*map(collective_named, TIMED), *theirs)))
    start = time.perf_counter()
    with Communicator(comm) as plain:
        found = time_steps(plain, names, sizes)
    for one, name in zip(made, theirs, strict=True):
        with Communicator(comm, algo=f"{name}:{one.scheme}", algorithms=[one]) as own:
            found = found.beside(time_steps(own, [name], sizes, root=max(one.root, 0)))
    spent = time.perf_counter() - start
    if comm.context.rank == 0:
        path = Path(args.output) if args.output else steps_file(cache_dir(), found.hardware)
        before = read_steps(path, found.hardware)
        keep(path, (before.joined(found) if before else found).to_json())
        for c in () if args.quiet else found.costs:
            print(f"{c.collective:10} {c.nbytes:>10} B {'in' if c.in_place else 'out of'} place: {c.us:8.2f} us/MiB "
                  f"({c.low_us:.2f} to {c.high_us:.2f})  {c.kind}")  # fmt: skip
        print(f"a meeting of the ranks takes {found.meeting_us:.2f} us")
        print(f"timed in {spent:.2f} s, kept in {path}", file=sys.stderr)
    return 0
