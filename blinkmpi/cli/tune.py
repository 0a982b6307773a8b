"""The command ``tune``: all ranks measure, rank 0 prints and keeps the table."""

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..lang.source import algorithm_from_root, check_asked
from ..planning.tuned_table import TunedTable, file_of, read
from ..program.call import collective_named
from ..trees.tree import COLLECTIVES
from ..util.cache_folder import cache_dir, keep
from ..util.text import parse_size

TUNED = tuple(c for c in COLLECTIVES if c not in ("barrier", "alltoall"))


def add_tune(sub: Any) -> None:
    """The command's flags."""
    what = "measure which scheme, protocol and chunk is fastest on these GPUs, and keep the table for later jobs"
    command = sub.add_parser("tune", help=what, description=what)
    command.add_argument("collectives", nargs="*", metavar="C", help=f"default: all of {', '.join(TUNED)}")
    command.add_argument("-b", dest="begin", default="1K", help="smallest vector; K M G are 2^10 2^20 2^30")
    command.add_argument("-e", dest="end", default="1G", help="largest vector")
    command.add_argument("-f", dest="factor", type=int, default=4, help="factor between two sizes")
    command.add_argument("-o", metavar="FILE", dest="output", help="write the table here, not to the cache")
    what = "measure an algorithm of one's own too, such as x.py:NAME (docs/lang.md); may be repeated"
    command.add_argument("--algorithm", action="append", default=[], metavar="FILE", help=what)
    command.add_argument("-q", dest="quiet", action="store_true", help="no line per size")


def tune(args: argparse.Namespace, world: Any) -> int:
    """Measure on all ranks."""
    from ..communicator import Communicator
    from ..measure.tune import tune as measure
    from ..transport.cuda.device import kernels_digest

    made = [algorithm_from_root(world, source) for source in args.algorithm]
    names = [collective_named(c) for c in args.collectives]
    for one in made:
        check_asked(one, None if not names or one.collective in names else names[0], max(one.root, 0))
    names = names or list(dict.fromkeys((*TUNED, *(collective_named(one.collective) for one in made))))
    size, end = parse_size(args.begin), parse_size(args.end)
    sizes = [size]
    while sizes[-1] * args.factor <= end:
        sizes.append(sizes[-1] * args.factor)
    with Communicator(world, algorithms=made) as comm:
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
                print(f"{r.collective:15} from {r.min_bytes:>10} B {'registered' if r.registered else 'any':10} "
                      f"{r.scheme}/{r.protocol} chunk {r.chunk_bytes} ctas {r.ctas or 'default'}")  # fmt: skip
            print(f"kept in {path}", file=sys.stderr)
    return 0
