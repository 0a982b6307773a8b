"""The command line: ``blinkmpi topo | plan | explain | simulate | subsets | advise | doctor | bench | tune | top |
launch | plot``, and ``lang`` for chunk programs.

With TOPOLOGY, a machine of the catalogue or a file, a command needs no MPI. Without it, the command asks the ranks that
``mpirun`` started (this process alone without ``mpirun``). Rank 0 prints, and its exit code is the job's.
"""

import argparse
import contextlib
import errno
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from .. import __version__
from ..errors import NO_MPI, ArgumentError, BlinkError
from ..lang.source import algorithm_from_root, check_asked
from ..planning.slots import Gpus
from ..topology.importers import load, modify
from ..topology.model import Topology
from ..util.launcher import launched_rank
from ..util.text import brief
from . import advise as cli_advise
from . import calls as cli_calls
from . import doctor as cli_doctor
from . import lang as cli_lang
from . import launch as cli_launch
from . import plan as cli_trees
from . import top as cli_top
from . import topo as cli_topo
from . import tune as cli_tune
from .output import by_rank_0, mpi, own_rank

LONGEST_ERROR = 2000  # letters; what a file of the user has in it may be longer


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Errors of ours end as one line on stderr and code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    if own_rank() != 0 and not _for_all_ranks(words):
        return 0  # rank 0 answers, with the job's exit code
    args = _parser(with_bench="bench" in words[:1]).parse_args(words)
    try:
        code = _answer(args)
        if sys.stdout is not None:  # it is closed
            sys.stdout.flush()
        return code
    except BlinkError as error:
        return _fail(error)
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        _drop_output()
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        return _fail(ArgumentError(f"cannot write the answer: {error.strerror}; make room, or write it elsewhere"))
    except KeyboardInterrupt:
        if launched_rank(os.environ) is not None:
            raise
        print("blinkmpi: interrupted", file=sys.stderr)
        return 130


def _drop_output() -> None:
    """Let what is still to be written to stdout go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _answer(args: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    if args.command == "bench" and args.sweep is not None:
        from ..bench.sweep.command import run as run_sweep

        return run_sweep(args, library=cli_launch.version_text())
    if args.command == "bench":
        from ..bench.command import run as run_bench

        return run_bench(args, _world(args))
    if args.command == "doctor":
        return cli_doctor.doctor(args)
    if args.command == "launch":
        return cli_launch.launch(args)
    if args.command == "top":
        return cli_top.top(args)
    if args.command == "tune":
        return cli_tune.tune(args, _world(args))
    if args.command == "lang":
        return cli_lang.lang(args)
    if args.command == "plot":
        from ..bench.plot_sizes import draw

        draw(args.results, args.output, in_place=args.in_place)
        return 0
    if args.command == "plan" and args.diff:
        return cli_topo.plan_diff(args)
    if args.topology is None:
        return _live(args)
    return _command(args, _changed(args, load(args.topology)), ranks=0)


def _for_all_ranks(words: Sequence[str]) -> bool:
    """Whether a command that can be parsed needs the other ranks too."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            args = _parser(with_bench="bench" in words[:1]).parse_args(words)
        except SystemExit:
            return False
    alone = args.command in ("launch", "plot", "lang", "top") or (args.command == "plan" and args.diff)
    return args.command in ("bench", "doctor", "tune") or (not alone and args.topology is None)


def _parser(*, with_bench: bool) -> argparse.ArgumentParser:
    what = "Collectives from packed spanning trees: look and ask."
    parser = argparse.ArgumentParser(prog="blinkmpi", description=what)
    parser.add_argument("--version", action="version", version=f"blinkmpi {__version__}")
    sub = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    machine = _machine_flags()
    for name, what in (
        ("topo", "show a machine: devices, links, rates"),
        ("plan", "pack trees and prove their rate"),
        ("explain", "say how a call runs, and why"),
        ("simulate", "run a call in this process and predict its time"),
        ("subsets", "list every part of a machine that a job may get, trees beside rings"),
        ("advise", "say which GPUs to ask a scheduler for, the best sets first"),
    ):
        command = sub.add_parser(name, help=what, description=what, parents=[machine])
        if name in ("topo", "plan", "subsets"):
            command.add_argument("-o", metavar="FILE", dest="output", help=f"write the {name}'s file")
        if name == "plan":
            cli_calls.add_collective(command)
        if name == "topo":
            cli_topo.add_topo(command)
        if name == "plan":
            cli_trees.add_plan(command)
            cli_topo.add_plan_diff(command)
        if name == "subsets":
            cli_trees.add_subsets(command)
        if name == "advise":
            cli_advise.add_advise(command)
        if name in ("explain", "simulate"):
            cli_calls.add_call(command)
        if name == "simulate":
            cli_calls.add_trace(command)
    if with_bench:
        from ..bench.command import add_parser

        add_parser(sub)
    else:
        sub.add_parser("bench", help="time and check collectives, beside other libraries")
    cli_doctor.add_doctor(sub)
    cli_tune.add_tune(sub)
    cli_top.add_top(sub)
    cli_launch.add_launch(sub)
    cli_lang.add_lang(sub)
    what = "draw what bench measured: time, bus bandwidth and ratios against size"
    picture = sub.add_parser("plot", help=what, description=what)
    picture.add_argument("results", nargs="+", metavar="RESULT", help="files that bench -J wrote")
    picture.add_argument("-o", metavar="FILE", dest="output", required=True, help="the picture: .svg, .png or .pdf")
    picture.add_argument("--in-place", action="store_true", help="the calls in place, not those out of place")
    return parser


def _machine_flags() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("topology", nargs="?", metavar="TOPOLOGY", help="dgx-1v, dgx-a100, cpu:4, a file; default: here")
    flags.add_argument("--gpus", metavar="LIST", help="take these devices alone: 1,4,5,6 or 0-3")
    flags.add_argument("--drop-link", action="append", default=[], metavar="A-B", help="without the links of a pair")
    flags.add_argument("--scale", action="append", default=[], metavar="KIND=F", help="links of a kind at this factor")
    flags.add_argument("--json", action="store_true", help="print JSON")
    return flags


def _world(args: argparse.Namespace) -> Any:
    """The ranks that mpirun started."""
    found, why = mpi()
    if found is None:
        what = "to start ranks with" if args.command in ("bench", "tune") else "to ask about the live machine"
        instead = "" if args.command in ("bench", "tune") else "name a TOPOLOGY such as cpu:4, or "
        raise ArgumentError(f"{args.command}: there is no MPI {what} ({why.strip().splitlines()[0]}); {instead}"
                            f"{NO_MPI}")  # fmt: skip
    return found.COMM_WORLD


def _changed(args: argparse.Namespace, topology: Topology) -> Topology:
    return modify(topology, gpus=args.gpus, drop_link=args.drop_link, scale=args.scale)


def _live(args: argparse.Namespace) -> int:
    """Gather the machine on all ranks, run the command on rank 0, and give every rank its exit code."""
    world = _world(args)
    if args.command == "explain" and world.size > 1 and not (args.gpus or args.drop_link or args.scale):
        return _explain_live(args, world)
    node = world.Split_type(mpi()[0].COMM_TYPE_SHARED)
    try:
        if args.command == "topo" and args.measure:
            return cli_topo.measure(args, world, node)
        topology = _changed(args, cli_topo.live_machine(world, node))
    finally:
        node.Free()

    return by_rank_0(world, lambda: _or_fail(lambda: _command(args, topology, ranks=world.size)))


def _explain_live(args: argparse.Namespace, world: Any) -> int:
    """Make a communicator of the ranks, as a job does, and explain its call: with its GPUs, tables and settings."""
    from ..communicator import Communicator

    own: dict[str, Any] = {}
    made = algorithm_from_root(world, args.algorithm) if args.algorithm else None
    if made is not None:
        check_asked(made, args.collective, args.root)
        own = {"algo": f"{made.collective}:{made.scheme}", "algorithms": [made]}
    with Communicator(world, **own) as comm:
        return by_rank_0(world, lambda: _or_fail(lambda: cli_calls.explain_live(args, comm, made)))


def _or_fail(answer: Callable[[], int]) -> int:
    try:
        return answer()
    except BlinkError as error:
        return _fail(error)


def _fail(error: BlinkError) -> int:
    if own_rank() == 0:
        print(f"blinkmpi: error: {brief(str(error), LONGEST_ERROR)}", file=sys.stderr)
    else:
        time.sleep(1)  # mpirun ends the job at the first failure: rank 0 speaks before that
    return 2


def _command(args: argparse.Namespace, topology: Topology, *, ranks: int) -> int:
    live_gpus = ranks > 0 and all(device.kind == "gpu" for device in topology.devices)
    by_mpi = ranks > 0 and not live_gpus
    gpus: Gpus = "" if not live_gpus else "onehop" if len(topology.nodes) == 1 else "nodes"
    match args.command:
        case "topo":
            return cli_topo.topo(args, topology)
        case "plan":
            return cli_trees.plan(args, topology, mpi=by_mpi, gpus=gpus)
        case "subsets":
            return cli_trees.subsets(args, topology)
        case "advise":
            return cli_advise.advice(args, topology, ranks=ranks)
        case "explain":
            return cli_calls.explain(args, topology, mpi=by_mpi, gpus=gpus)
    return cli_calls.simulate(args, topology)
