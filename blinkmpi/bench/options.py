"""The flags of ``blinkmpi bench``: nccl-tests' names and defaults, and ours.

A flag of nccl-tests that has no meaning here is refused with the reason, never ignored. :func:`memory_for` refuses what
depends on whether the ranks have GPUs, as soon as that is known.
"""

import argparse
import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from ..errors import ArgumentError, BufferTypeError, SettingsError
from ..launch.command import LAUNCHERS
from ..program.call import REDUCTIONS, Call, collective_named
from ..program.reduction import check_op
from ..trees.tree import ROOTED, Collective
from ..util.settings import WIRES
from ..util.text import parse_size, quoted
from .nccl_tests import OP_NAMES, TEST_NAMES, TYPE_NAMES, call_of_size, dtype_named
from .timing import Timing

PEERS = ("mpi", "nccl", "symm_mem")
PEER_MEMORY = {"mpi": "host", "nccl": "gpu", "symm_mem": "gpu"}
MOST_SIZES = 100_000
EXECUTORS = ("auto", "c", "numpy")

# Flags of nccl-tests that only their default can be honoured for: (flags, default, reason).
_FIXED: tuple[tuple[tuple[str, ...], int, str], ...] = (
    (("-t", "--nthreads"), 1, "a rank is a process with one thread: start more ranks with mpirun -np"),
    (("-g", "--ngpus"), 1, "a rank has one device: start more ranks with mpirun -np"),
    (("-p", "--parallel_init"), 0, "there is one thread per rank to initialise"),
    (("-y", "--stream_null"), 0, "GPU ranks measure on a stream of their own, CPU ranks have none"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Register the flags."""
    add = parser.add_argument
    names = f"{', '.join(TEST_NAMES.values())}; MPI's names and the suffix _perf work too"
    add("collective", nargs="?", help=names)
    group = parser.add_argument_group("nccl-tests' flags")
    add = group.add_argument
    add("-b", "--minbytes", default="32M", metavar="SIZE", help="smallest size (default 32M)")
    add("-e", "--maxbytes", default="32M", metavar="SIZE", help="largest size (default 32M)")
    add("-i", "--stepbytes", default="1M", metavar="SIZE", help="step from size to size (default 1M)")
    add("-f", "--stepfactor", type=int, default=1, metavar="N", help="factor from size to size, if over 1")
    add(
        "-n", "--iters", type=int, metavar="N",
        help="timed iterations, exactly; default 20, fewer (at least 5) where a row would take over 3 s",
    )  # fmt: skip
    add("-w", "--warmup_iters", type=int, default=1, metavar="N", help="calls before the timed ones (default 1)")
    add("-m", "--agg_iters", type=int, default=1, metavar="N", help="calls per timed iteration (default 1)")
    add("-N", "--run_cycles", type=int, default=1, metavar="N", help="run everything N times, 0 for ever (default 1)")
    add("-o", "--op", default="sum", help=f"{', '.join(OP_NAMES)} or all (default sum)")
    add("-d", "--datatype", default="float", metavar="TYPE", help=f"{', '.join(TYPE_NAMES)} or all (default float)")
    add("-r", "--root", type=int, default=0, metavar="R", help="root, -1 for each in turn (default 0)")
    add("-c", "--check", type=int, default=1, metavar="N", help="checked calls per row, 0 for none (default 1)")
    add("-z", "--blocking", type=int, default=0, choices=(0, 1), help="GPUs: wait for each call (CPU: always)")
    add(
        "-a", "--average", type=int, choices=(0, 1, 2, 3),
        help="mean over iterations; of ranks: 0 rank 0, 1 average, 2 minimum, 3 maximum "
        "(default: the median over iterations of the slowest rank)",
    )  # fmt: skip
    add("-C", "--report_cputime", type=int, default=0, choices=(0, 1), help="processor time instead of elapsed time")
    add("-S", "--report_timestamps", type=int, default=0, choices=(0, 1), help="add the time of day to each row")
    add("-J", "--output_file", metavar="FILE", help="write nccl-tests' JSON; never overwrites, adds .0, .1, ...")
    add("-T", "--timeout", type=float, metavar="S", help="deadline of each of our calls in seconds")
    add("-I", "--per_iter_timing", type=int, default=0, choices=(0, 1), help="show every iteration's time")
    add("-u", "--unalign", type=int, default=0, metavar="N", help="start the buffers N elements off alignment")
    add("-M", "--memory_report", type=int, default=0, choices=(0, 1), help="report memory use")
    what = "GPUs: put the calls into a graph, launch it N times"
    add("-G", "--cudagraph", type=int, default=0, metavar="N", help=what)
    add(
        "-R", "--local_register", type=int, metavar="N",
        help="GPUs: 0 for plain buffers, 2 for symmetric ones, which peers reach (default 2)",
    )  # fmt: skip
    for flags, default, reason in _FIXED:
        add(*flags, type=int, default=default, metavar="N", help=f"only {default}: {reason}")
    group = parser.add_argument_group("flags of blinkmpi")
    add = group.add_argument
    add("--compare", default="", metavar="LIST", help=f"measure these in turn: {', '.join(PEERS)} (comma list)")
    add("--memory", choices=("host", "gpu"), help="where the buffers lie (default: gpu if the ranks have GPUs)")
    add("--persistent", action="store_true", help="GPUs: start one persistent request of ours again and again")
    add("--topology", metavar="TOPOLOGY", help="run the plan of this machine; rows are marked emulated")
    add("--gpus", metavar="LIST", help="devices of --topology, such as 1,4,5,6")
    add("--executor", metavar="LIST", help="one block of rows for each of auto, c, numpy (comma list)")
    add("--algo", metavar="TEXT", help="choice of schemes, as BLINKMPI_ALGO")
    add("--wire", choices=WIRES, help="how partial results of 16-bit floats travel, as BLINKMPI_WIRE")
    what = "run an algorithm of one's own: x.py, x.py:NAME,PARAMETER=VALUE, x.xml (MSCCL's) or x.json"
    add("--algorithm", metavar="FILE", help=what)
    add("--predict", action="store_true", help="add the predicted time and the bound")
    add("--format", choices=("nccl", "osu"), default="nccl", help="row format")
    add("--json", action="store_true", help="print the JSON instead of rows")
    group = parser.add_argument_group("many jobs, from one process without mpirun (docs/sweeps.md)")
    add = group.add_argument
    add("--sweep", metavar="FILE", help="start every run of this TOML file; -J FILE keeps all results, and resumes")
    add("--hostfile", metavar="FILE", help="with --sweep: the machines, if neither the scheduler's nor this one")
    add("--launcher", choices=LAUNCHERS, help="with --sweep: the launcher; default: mpirun of the MPI that mpi4py has")
    add("--dry-run", action="store_true", help="with --sweep: print the command lines")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What the flags ask for, checked."""

    collective: Collective
    sizes: tuple[int, ...]
    series: tuple[tuple[str, str, int], ...]  # (dtype, op, root) in the order of nccl-tests
    timing: Timing
    peers: tuple[str, ...]
    executors: tuple[str, ...]
    minimum_bandwidth: float | None

    def calls(self, n: int, series: tuple[str, str, int]) -> list[Call]:
        """The rows of one series."""
        dtype, op, root = series
        return [call_of_size(self.collective, n, size, dtype, op, root) for size in self.sizes]


def read(args: argparse.Namespace, n: int) -> BenchOptions:
    """Check the flags for a job of ``n`` ranks.

    Raises:
        ArgumentError, BufferTypeError, SettingsError: naming the flag and what it may be.
    """
    if args.algorithm is not None and args.algo is not None:
        raise ArgumentError("--algorithm and --algo both say what calls take; leave one out")
    for flag, given in (("--hostfile", args.hostfile), ("--launcher", args.launcher), ("--dry-run", args.dry_run)):
        if given:
            raise ArgumentError(f"{flag} goes with --sweep alone; leave it out, or give --sweep FILE")
    if args.collective is None:
        raise ArgumentError(f"which collective? Give one of {', '.join(TEST_NAMES.values())}, or --sweep FILE")
    collective = collective_named(args.collective)
    if collective not in TEST_NAMES:
        raise ArgumentError(f"bench cannot time {collective}; use one of {', '.join(TEST_NAMES.values())}")
    for flags, default, reason in _FIXED:
        if getattr(args, flags[1].removeprefix("--")) != default:
            raise ArgumentError(f"{'/'.join(flags)} can only be {default}: {reason}; leave the flag out")
    from_zero = dict.fromkeys(("warmup_iters", "run_cycles", "check", "unalign", "cudagraph"), 0)
    for name, least in {"iters": 1, "agg_iters": 1, **from_zero}.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ArgumentError(f"--{name} {value}: must be at least {least}")
    if args.local_register not in (None, 0, 2):
        raise ArgumentError(
            f"--local_register {args.local_register}: NCCL alone registers so; use 0 for plain buffers, 2 for symmetric"
        )
    if args.cudagraph and args.blocking:
        raise ArgumentError("--blocking 1 waits for each call, which a graph cannot: leave one of -z and -G out")
    if args.timeout is not None and not args.timeout > 0:
        raise ArgumentError(f"--timeout {args.timeout}: must be more than 0 seconds")
    timing = Timing(args.iters, args.warmup_iters, args.agg_iters, args.check, args.average,
                    bool(args.report_cputime), bool(args.blocking), args.cudagraph)  # fmt: skip
    return BenchOptions(
        collective=collective,
        sizes=tuple(_sizes(args)),
        series=tuple(_series(args, collective, n)),
        timing=timing,
        peers=_listed("--compare", args.compare, PEERS),
        executors=_listed("--executor", args.executor or "auto", EXECUTORS),
        minimum_bandwidth=_minimum_bandwidth(),
    )


def memory_for(args: argparse.Namespace, options: BenchOptions, *, gpu: bool) -> str:
    """Where the buffers lie, ``host`` or ``gpu``, for ranks that have GPUs or not.

    Raises:
        ArgumentError: for what such ranks cannot do.
    """
    memory: str = args.memory or ("gpu" if gpu else "host")
    if memory == "gpu" and not gpu:
        raise ArgumentError("--memory gpu: the ranks of this job have no GPUs; leave it out")
    for peer in options.peers:
        if PEER_MEMORY[peer] != memory:
            remedy = "add --memory host" if memory == "gpu" else "leave it out"
            raise ArgumentError(f"--compare {peer}: it is measured on {PEER_MEMORY[peer]} memory only; {remedy}")
    if memory == "host":
        asked = (
            ("-G/--cudagraph", args.cudagraph, "CPU ranks have no CUDA graphs to launch"),
            ("-R/--local_register", args.local_register, "CPU ranks have no device memory to register"),
            ("--persistent", args.persistent, "a call on CPU ranks blocks, and a request would only be in its way"),
        )
        for flag, value, reason in asked:
            if value:
                raise ArgumentError(f"{flag} is for buffers in GPU memory: {reason}; leave the flag out")
    return memory


def _sizes(args: argparse.Namespace) -> Iterator[int]:
    low, high, step = (parse_size(getattr(args, name)) for name in ("minbytes", "maxbytes", "stepbytes"))
    if high < low:
        raise ArgumentError(f"--minbytes {args.minbytes} is more than --maxbytes {args.maxbytes}; exchange them")
    if args.stepfactor < 1 or (args.stepfactor > 1 and low < 1) or (args.stepfactor == 1 and step < 1):
        raise ArgumentError(
            f"--minbytes {args.minbytes} --stepbytes {args.stepbytes} --stepfactor {args.stepfactor}: the sizes would "
            "never reach the largest; start at 1 or more with a factor, or step by 1 byte or more"
        )
    size = low
    for rows in count():
        if size > high:
            break
        if rows == MOST_SIZES:
            raise ArgumentError(f"--minbytes {args.minbytes} --maxbytes {args.maxbytes} --stepbytes {args.stepbytes}: "
                                f"more than {MOST_SIZES} sizes; take larger steps")  # fmt: skip
        yield size
        size = size * args.stepfactor if args.stepfactor > 1 else size + step


def _series(args: argparse.Namespace, collective: Collective, n: int) -> Iterator[tuple[str, str, int]]:
    dtypes = list(TYPE_NAMES.values()) if args.datatype == "all" else [dtype_named(args.datatype)]
    ops = [""]
    if collective in REDUCTIONS:
        ops = list(OP_NAMES) if args.op == "all" else [args.op]
        if args.op not in (*OP_NAMES, "all"):
            why = "a scaled sum belongs to NCCL's device API" if args.op == "mulsum" else "it is unknown"
            raise BufferTypeError(f"--op {args.op}: {why}; use one of {', '.join(OP_NAMES)}, all")
        if collective in ("scan", "exscan"):
            ops = [op for op in ops if op != "avg"]
            if not ops:
                raise BufferTypeError(f"--op avg: a {collective} folds another number of vectors on each rank; use sum")
    if not -1 <= args.root < n:
        raise ArgumentError(f"--root {args.root}: {n} ranks run, so it is 0..{n - 1}, or -1 for each in turn")
    roots = [-1]
    if collective in ROOTED:
        roots = list(range(n)) if args.root == -1 else [args.root]
    found = 0
    for dtype in dtypes:
        for op in ops:
            if op and (args.op != "all" and args.datatype != "all"):
                check_op(op, dtype)
            if op and not _defined(op, dtype):
                continue
            for root in roots:
                found += 1
                yield dtype, op, root
    if not found:
        raise BufferTypeError(f"--op {args.op} is defined for none of --datatype {args.datatype}")


def _defined(op: str, dtype: str) -> bool:
    try:
        check_op(op, dtype)
    except BufferTypeError:
        return False
    return True


def _listed(flag: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
    for name in names:
        if name not in known:
            raise ArgumentError(f"{flag} {name}: not available; use {', '.join(known)}")
    return names


def _minimum_bandwidth() -> float | None:
    for name in ("BLINKMPI_TESTS_MIN_BW", "NCCL_TESTS_MIN_BW"):
        text: Any = os.environ.get(name)
        if text is None:
            continue
        with contextlib.suppress(ValueError):
            if 0 <= (found := float(text)) < math.inf:
                return found
        raise SettingsError(f"{name}={quoted(text)}: expected a bus bandwidth in GB/s, such as 3.5")
    return None
