"""The commands about one call: ``explain`` how it runs, ``simulate`` it. Only rank 0 runs this."""

import argparse
import json
from typing import Any, cast

from msgspec.structs import replace

from ..bench.nccl_tests import OP_NAMES, call_of_size, dtype_named
from ..bench.verification import count_wrong, fill
from ..errors import ArgumentError
from ..lang.algorithms import Algorithm, shares_memory
from ..lang.source import algorithm_for, check_asked
from ..planning.algorithms import chunk_of_algorithm, named_in, with_algorithms
from ..planning.beside_mpi import slower
from ..planning.explain import Explanation, explanation, link_text
from ..planning.memory_rows import SLOTS as MEMORY_SLOTS
from ..planning.plan import Plan, Rule
from ..planning.planner import make_plan, planned_with
from ..planning.selection import choose, program_for
from ..planning.slots import LINK_SLOTS, Gpus
from ..program.call import REDUCTIONS, Call, collective_named
from ..program.cost_model import price, timeline
from ..program.interpreter import run
from ..program.ir import Program, Wire
from ..program.reduction import dtype_of
from ..program.routes import Routes, cheapest_routes
from ..program.timeline import trace_of
from ..topology.model import Topology
from ..trees.tree import COLLECTIVES, Collective
from ..util.chrome_trace import add as add_to_trace
from ..util.chrome_trace import create as create_trace
from ..util.codec import plain
from ..util.settings import read
from ..util.text import parse_size, plural, size_text, time_text
from .output import show

RUN_BYTES = 16 << 20  # vectors up to here are really run by `simulate`, for all ranks in this process
BUSIEST = 8
TRACED, SIMULATED = 1 << 18, "simulated"  # chunks on links in a trace, and the name of its job
ALGORITHM = "an algorithm of one's own: x.py, x.py:NAME, x.xml (MSCCL's) or x.json (docs/lang.md)"


def add_collective(command: argparse.ArgumentParser) -> None:
    """Which collective and root."""
    command.add_argument("--collective", metavar="C", help=", ".join(COLLECTIVES))
    command.add_argument("--root", type=int, default=0, help="for broadcast, reduce, gather, scatter")


def add_call(command: argparse.ArgumentParser) -> None:
    """The flags of a call."""
    add_collective(command)
    command.add_argument("--bytes", default="64M", help="largest buffer of the call; K M G are 2^10 2^20 2^30")
    command.add_argument("--dtype", default="float32", help="element type, by NumPy's or nccl-tests' name")
    command.add_argument("--op", default="sum", help=", ".join(OP_NAMES))
    command.add_argument("--algorithm", metavar="FILE", help=ALGORITHM)


def add_trace(command: argparse.ArgumentParser) -> None:
    """Where a trace goes."""
    what = "write every chunk on every link as a trace, for Perfetto or chrome://tracing"
    command.add_argument("--trace", metavar="FILE", help=what)


def explain(args: argparse.Namespace, topology: Topology, *, mpi: bool, gpus: Gpus = "") -> int:
    """Say how the call runs, and why; ``mpi`` and ``gpus`` as for :func:`.make_plan`."""
    made = _algorithm(args, topology)
    call = _call(args, topology, made)
    known = slower(call, len(topology.nodes)) if mpi else ""
    plan = _plan(topology, call, mpi=mpi, gpus=gpus)
    if made is not None:
        why = "--algorithm" if args.algorithm else "BLINKMPI_ALGO"
        plan = with_algorithms(plan, (), {call.collective: made}, gpus, why=why)
    rule = choose(plan, call, registered=bool(gpus))
    return _show(args, explanation(plan, topology, call, rule=rule, live=[known] if known else []))


def explain_live(args: argparse.Namespace, comm: Any, made: Algorithm | None) -> int:
    """Say how the ranks of a communicator of ours run the call."""
    from ..runtime import inspection

    return _show(args, inspection.explanation(comm.context, _call(args, comm.machine, made)))


def _show(args: argparse.Namespace, found: Explanation) -> int:
    print(found.to_json() if args.json else found.text(), end="" if args.json else "\n")
    return 0


def simulate(args: argparse.Namespace, topology: Topology) -> int:
    """Run the call on every rank's data, if it is short, and predict its time; 1 if a result is wrong."""
    made = _algorithm(args, topology, custom=True)
    call = _call(args, topology, made)
    if made is None:
        plan = _plan(topology, call)
        rule = choose(plan, call)
        packing = plan.packing(call.collective, call.root, rule.scheme)
        routes: Routes
        program, bound = program_for(plan, call, rule), packing.bound
        routes, scheme, narrow = packing, packing.scheme, plan.wire == "operand"
    else:
        multicast, bound = shares_memory(topology), None
        chunk_bytes, depth = MEMORY_SLOTS if multicast else LINK_SLOTS
        rule = Rule(call.collective, 0, made.scheme, chunk_bytes, depth)
        chunk_bytes = chunk_of_algorithm(made, call, rule, multicast=multicast)
        program = made.program(call, chunk_bytes=chunk_bytes, depth=depth, multicast=multicast)
        routes, scheme = cheapest_routes(program.channels, topology, multicast=multicast), made.scheme
        narrow = False
    cost = price(program, routes, topology)
    if args.trace:
        crossings = timeline(program, routes, topology, most=TRACED)
        create_trace(args.trace, SIMULATED)
        add_to_trace(args.trace, SIMULATED, trace_of(crossings, topology, f"{call.text} on {topology.name}, simulated"))
    small = 0 < call.nbytes <= RUN_BYTES
    wrong = _run(program, made, narrow=narrow) if small else None
    if args.json:
        busy = [{"src": s, "dst": d, "kind": k, "seconds": t} for s, d, k, t in cost.busy]
        body = {"format": "blinkmpi.simulation", "version": 1, "machine": topology.name, "call": plain(call),
                "scheme": scheme, "seconds": cost.seconds, "algbw": cost.algbw,
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
        "on": f"{plural(topology.n, 'rank')} of {topology.name}, scheme {scheme}",
        "result": result,
        "predicted": time_text(cost.seconds) if cost.seconds else "nothing travels",
        "algbw": f"{cost.algbw:.4g} GB/s"
        + (f" of {float(bound / 1000):.4g} possible" if cost.algbw and bound else ""),
        "busbw": f"{cost.algbw * call.bus_factor:.4g} GB/s",
    }  # fmt: skip
    show(cli_show.simulation(facts, rows, len(cost.busy) - len(rows)))
    return int(bool(wrong))


def _plan(topology: Topology, call: Call, *, mpi: bool = False, gpus: Gpus = "") -> Plan:
    """A plan for one call, by ``BLINKMPI_ALGO`` and ``BLINKMPI_WIRE`` as in a job."""
    settings = read()
    plan = make_plan(
        topology, algo=named_in(settings.algo, (), topology.n).rest, mpi=mpi, gpus=gpus,
        collectives=planned_with(call.collective, gpus), roots=[max(call.root, 0)], seconds=settings.plan_s,
    )  # fmt: skip
    return replace(plan, wire=cast(Wire, settings.wire)) if settings.wire else plan


def _run(program: Program, made: Algorithm | None, *, narrow: bool) -> int:
    """Run ``program`` on every rank's data; the number of wrong elements. ``narrow``: see :func:`.reference`."""
    if made is not None and made.collective == "custom":
        return _run_custom(program, made)
    import numpy as np

    call = program.call
    sends = [np.empty(call.send_count, dtype_of(call.dtype)) if call.sends(rank) else None for rank in range(call.n)]
    for rank, data in enumerate(sends):
        if data is not None:
            fill(data, rank, call.dtype)
    results = run(program, sends)
    return sum(count_wrong(call, r, got, narrow=narrow) for r, got in enumerate(results) if got is not None)


def _run_custom(program: Program, made: Algorithm) -> int:
    """As :func:`_run`, for a collective that the algorithm defines: on zeros and ones, compared chunk by chunk."""
    import numpy as np

    call, goal = program.call, made.flow.goal
    width, dtype = call.counts[0], dtype_of(call.dtype)
    data = [np.arange(call.send_length(r), dtype=np.int64) * 7 // (r + 3) % 2 for r in range(call.n)]
    results = run(program, [one.astype(dtype) if one.size else None for one in data])
    folds = {"prod": np.multiply.reduce, "min": np.minimum.reduce, "max": np.maximum.reduce}.get(call.op, np.add.reduce)
    wrong = 0
    for rank, outputs in enumerate(goal.wanted):
        for i, want in enumerate(outputs):
            if want and (got := results[rank]) is not None:
                parts = [data[r][c * width : (c + 1) * width] for r, c in want]
                expected = folds(parts).astype(dtype)
                wrong += int((got[i * width : (i + 1) * width] != expected).sum())
    return wrong


def _algorithm(args: argparse.Namespace, topology: Topology, *, custom: bool = False) -> Algorithm | None:
    """What ``--algorithm`` names, which says what collective is called, and from which root; else what is named in
    ``BLINKMPI_ALGO`` for the collective.

    Args:
        custom: whether it may be one of the user's own.

    Raises:
        ArgumentError: for one that is no algorithm of a call, or for another collective or root than the flags say.
    """
    if args.algorithm is None:
        return named_in(read().algo, (), topology.n).asked.get(collective_named(args.collective or "allreduce"))
    made = algorithm_for(args.algorithm, topology.n)
    if made.collective != "custom" or not custom:
        check_asked(made, args.collective, args.root)
    return made


def _call(args: argparse.Namespace, topology: Topology, made: Algorithm | None) -> Call:
    """The call that the flags describe."""
    if made is not None and made.collective == "custom":
        if args.op not in ("sum", "prod", "min", "max"):
            raise ArgumentError(f"op {args.op!r}: expected sum, prod, min or max for a collective of one's own")
        return made.call_of_bytes(parse_size(args.bytes), dtype=dtype_named(args.dtype), op=args.op)
    collective = collective_named(args.collective or "allreduce") if made is None else cast(Collective, made.collective)
    root = args.root if made is None else max(made.root, 0)
    if not 0 <= root < topology.n:
        raise ArgumentError(f"root {root}: {topology.name} has ranks 0..{topology.n - 1}; choose one of these")
    if collective in REDUCTIONS and args.op not in OP_NAMES:
        raise ArgumentError(f"op {args.op!r}: expected one of {', '.join(OP_NAMES)}; choose one of these")
    if collective == "barrier":
        return Call("barrier", topology.n, (0,), "int8")
    nbytes, dtype = parse_size(args.bytes), dtype_named(args.dtype)
    return call_of_size(collective, topology.n, nbytes, dtype, args.op, root)
