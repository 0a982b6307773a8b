"""The command line: ``blinkmpi topo | plan | explain | simulate | subsets | doctor | bench | tune | top | launch |
plot``, and ``lang`` for chunk programs.

With TOPOLOGY, a machine of the catalogue or a file, a command needs no MPI. Without it, the command asks the ranks that
``mpirun`` started (this process alone without ``mpirun``). Rank 0 prints, and its exit code is the job's.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..bench.nccl_tests import OP_NAMES, call_of_size, dtype_named
from ..bench.verification import count_wrong, fill
from ..errors import ArgumentError, BlinkError
from ..planning.explain import explanation, link_text
from ..planning.selection import choose, make_plan, program_for
from ..program.call import REDUCTIONS, Call, collective_named
from ..program.cost_model import price, timeline
from ..program.interpreter import run
from ..program.ir import Program
from ..program.reduction import dtype_of
from ..program.timeline import trace_of
from ..topology.importers import load, modify
from ..topology.model import Topology
from ..trees.tree import COLLECTIVES
from ..util.chrome_trace import add as add_to_trace
from ..util.chrome_trace import create as create_trace
from ..util.codec import plain
from ..util.settings import read
from ..util.text import brief, parse_size, plural, size_text, time_text
from . import doctor as cli_doctor
from . import lang as cli_lang
from . import launch as cli_launch
from . import plan as cli_trees
from . import top as cli_top
from . import topo as cli_topo
from . import tune as cli_tune
from .output import by_rank_0, mpi, own_rank, show

RUN_BYTES = 16 << 20  # vectors up to here are really run by `simulate`, for all ranks in this process
BUSIEST = 8
TRACED, SIMULATED = 1 << 18, "simulated"  # chunks on links in a trace, and the name of its job
LONGEST_ERROR = 2000  # letters; what a file of the user has in it may be longer


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Errors of ours end as one line on stderr and code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    if own_rank() != 0 and not _for_all_ranks(words):
        return 0  # rank 0 answers, with the job's exit code
    args = _parser(with_bench="bench" in words[:1]).parse_args(words)
    try:
        if args.command == "bench" and args.sweep is not None:
            from ..bench.sweep.command import run as run_sweep

            return run_sweep(args, library=cli_launch.version_text())
        if args.command == "bench":
            from ..bench.command import run as run_bench

            return run_bench(args, _world())
        if args.command == "doctor":
            return cli_doctor.doctor(args)
        if args.command == "launch":
            return cli_launch.launch(args)
        if args.command == "top":
            return cli_top.top(args)
        if args.command == "tune":
            return cli_tune.tune(args, _world())
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
        return _command(args, _changed(args, load(args.topology)), live=False)
    except BlinkError as error:
        return _fail(error)
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


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
    ):
        command = sub.add_parser(name, help=what, description=what, parents=[machine])
        if name in ("topo", "plan", "subsets"):
            command.add_argument("-o", metavar="FILE", dest="output", help=f"write the {name}'s file")
        if name in ("plan", "explain", "simulate"):
            default = None if name == "plan" else "allreduce"
            command.add_argument("--collective", metavar="C", default=default, help=", ".join(COLLECTIVES))
            command.add_argument("--root", type=int, default=0, help="for broadcast, reduce, gather, scatter")
        if name == "topo":
            cli_topo.add_topo(command)
        if name == "plan":
            cli_trees.add_plan(command)
            cli_topo.add_plan_diff(command)
        if name == "subsets":
            cli_trees.add_subsets(command)
        if name in ("explain", "simulate"):
            command.add_argument("--bytes", default="64M", help="largest buffer of the call; K M G are 2^10 2^20 2^30")
            command.add_argument("--dtype", default="float32", help="element type, by NumPy's or nccl-tests' name")
            command.add_argument("--op", default="sum", help=", ".join(OP_NAMES))
        if name == "simulate":
            what = "write every chunk on every link as a trace, for Perfetto or chrome://tracing"
            command.add_argument("--trace", metavar="FILE", help=what)
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


def _world() -> Any:
    """The ranks that mpirun started."""
    found, why = mpi()
    if found is None:
        raise ArgumentError(f"there is no MPI to ask about the live machine ({why}); name a TOPOLOGY such as cpu:4, "
                            "or install one: pip install blinkmpi[mpi]")  # fmt: skip
    return found.COMM_WORLD


def _changed(args: argparse.Namespace, topology: Topology) -> Topology:
    return modify(topology, gpus=args.gpus, drop_link=args.drop_link, scale=args.scale)


def _live(args: argparse.Namespace) -> int:
    """Gather the machine on all ranks, run the command on rank 0, and give every rank its exit code."""
    world = _world()
    node = world.Split_type(mpi()[0].COMM_TYPE_SHARED)
    try:
        if args.command == "topo" and args.measure:
            return cli_topo.measure(args, world, node)
        topology = _changed(args, cli_topo.live_machine(world, node))
    finally:
        node.Free()

    def answer() -> int:
        try:
            return _command(args, topology, live=True)
        except BlinkError as error:
            return _fail(error)

    return by_rank_0(world, answer)


def _fail(error: BlinkError) -> int:
    if own_rank() == 0:
        print(f"blinkmpi: error: {brief(str(error), LONGEST_ERROR)}", file=sys.stderr)
    else:
        time.sleep(1)  # mpirun ends the job at the first failure: rank 0 speaks before that
    return 2


def _command(args: argparse.Namespace, topology: Topology, *, live: bool) -> int:
    by_mpi = live and all(device.kind == "cpu" for device in topology.devices)
    match args.command:
        case "topo":
            return cli_topo.topo(args, topology)
        case "plan":
            return cli_trees.plan(args, topology, mpi=by_mpi)
        case "subsets":
            return cli_trees.subsets(args, topology)
        case "explain":
            return _explain(args, topology, by_mpi)
    return _simulate(args, topology)


def _explain(args: argparse.Namespace, topology: Topology, by_mpi: bool) -> int:
    call = _call(args, topology)
    seconds = read().plan_s
    plan = make_plan(topology, mpi=by_mpi, collectives=[call.collective], roots=[max(call.root, 0)], seconds=seconds)
    found = explanation(plan, topology, call)
    print(found.to_json() if args.json else found.text(), end="" if args.json else "\n")
    return 0


def _simulate(args: argparse.Namespace, topology: Topology) -> int:
    call = _call(args, topology)
    plan = make_plan(topology, collectives=[call.collective], roots=[max(call.root, 0)], seconds=read().plan_s)
    packing = plan.packing(call.collective, call.root, choose(plan, call).scheme)
    program = program_for(plan, call, choose(plan, call))
    cost = price(program, packing, topology)
    if args.trace:
        crossings = timeline(program, packing, topology, most=TRACED)
        title = f"{call.text} on {topology.name}, simulated"
        create_trace(args.trace, SIMULATED)
        add_to_trace(args.trace, SIMULATED, trace_of(crossings, topology, title))
    small = 0 < call.nbytes <= RUN_BYTES
    wrong = _run(program) if small else None
    if args.json:
        busy = [{"src": s, "dst": d, "kind": k, "seconds": t} for s, d, k, t in cost.busy]
        body = {"format": "blinkmpi.simulation", "version": 1, "machine": topology.name, "call": plain(call),
                "scheme": packing.scheme, "seconds": cost.seconds, "algbw": cost.algbw,
                "busbw": cost.algbw * call.bus_factor, "busy": busy, "wrong": wrong}  # fmt: skip
        print(json.dumps(body, indent=1))
        return int(bool(wrong))
    from . import show as cli_show

    if small:
        result = "every element right, against NumPy" if not wrong else f"{wrong} ELEMENTS WRONG"
    elif call.nbytes:
        result = f"not run: more than {size_text(RUN_BYTES)}; smaller vectors are run on every rank's data and checked"
    else:
        result = "nothing to compare"
    busiest = sorted(cost.busy, key=lambda row: (-row[3], row[:2]))
    rows = [(link_text(topology, s, d, k), t / cost.seconds) for s, d, k, t in busiest[:BUSIEST]]
    facts = {
        "call": f"{call.collective} of {size_text(call.nbytes)}, {call.dtype} {call.op}".rstrip(),
        "on": f"{plural(topology.n, 'rank')} of {topology.name}, scheme {packing.scheme}",
        "result": result,
        "predicted": time_text(cost.seconds) if cost.seconds else "nothing travels",
        "algbw": f"{cost.algbw:.4g} GB/s"
        + (f" of {float(packing.bound / 1000):.4g} possible" if cost.algbw and packing.bound else ""),
        "busbw": f"{cost.algbw * call.bus_factor:.4g} GB/s",
    }
    show(cli_show.simulation(facts, rows, len(cost.busy) - len(rows)))
    return int(bool(wrong))


def _run(program: Program) -> int:
    """Run ``program`` on every rank's data; the number of wrong elements."""
    import numpy as np

    call = program.call
    sends = [np.empty(call.send_count, dtype_of(call.dtype)) if call.sends(rank) else None for rank in range(call.n)]
    for rank, data in enumerate(sends):
        if data is not None:
            fill(data, rank, call.dtype)
    results = run(program, sends)
    return sum(count_wrong(call, r, got) for r, got in enumerate(results) if got is not None)


def _call(args: argparse.Namespace, topology: Topology) -> Call:
    """The call that the flags describe."""
    collective = collective_named(args.collective)
    if not 0 <= args.root < topology.n:
        raise ArgumentError(f"root {args.root}: {topology.name} has ranks 0..{topology.n - 1}; choose one of these")
    if collective in REDUCTIONS and args.op not in OP_NAMES:
        raise ArgumentError(f"op {args.op!r}: expected one of {', '.join(OP_NAMES)}; choose one of these")
    if collective == "barrier":
        return Call("barrier", topology.n, (0,), "int8")
    nbytes, dtype = parse_size(args.bytes), dtype_named(args.dtype)
    return call_of_size(collective, topology.n, nbytes, dtype, args.op, args.root)
