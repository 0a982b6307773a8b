"""The command ``simulate``: run a call on every rank's data in this process, and predict its time."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ..bench.verification import count_wrong, fill
from ..errors import ArgumentError
from ..lang.algorithms import shares_memory
from ..planning.algorithms import chunk_of_algorithm
from ..planning.defaults import rule_of
from ..planning.explain import link_text
from ..planning.in_switch import packing_in_switch
from ..planning.memory_rows import SLOTS as MEMORY_SLOTS
from ..planning.plan import Rule, chunk_for
from ..planning.selection import choose, program_for
from ..planning.slots import LINK_SLOTS
from ..program import interpreter
from ..program.check import check
from ..program.cost_model import price, timeline
from ..program.ir import Program
from ..program.lower import lower
from ..program.reduction import dtype_of
from ..program.routes import Routes, cheapest_routes
from ..topology.model import Topology
from ..util.codec import plain
from ..util.settings import read
from ..util.text import plural, size_text, time_text
from .calls import add_call, algorithm_of, call_of, plan_for
from .machine import add_machine, on_machine
from .output import show

if TYPE_CHECKING:
    from ..lang.algorithms import Algorithm

RUN_BYTES = 16 << 20  # vectors up to here are really run, for all ranks in this process
BUSIEST = 8
TRACED, SIMULATED = 1 << 18, "simulated"  # chunks on links in a trace, and the name of its job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add_machine(parser)
    add_call(parser)
    what = "write every chunk on every link as a trace, for Perfetto or chrome://tracing"
    parser.add_argument("--trace", metavar="FILE", help=what)
    what = "an allreduce whose sums the machine's switches make (SHARP), which nothing here executes"
    parser.add_argument("--in-switch", action="store_true", help=what)


def run(args: argparse.Namespace) -> int:
    """Answer; the exit code."""
    return on_machine(args, lambda topology, _: simulate(args, topology))


def simulate(args: argparse.Namespace, topology: Topology) -> int:
    """Run the call on every rank's data, if it is short, and predict its time; 1 if a result is wrong."""
    if args.in_switch and args.algorithm:
        raise ArgumentError("--in-switch takes trees of its own; leave --algorithm out")
    made = None if args.in_switch else algorithm_of(args, topology, custom=True)
    call = call_of(args, topology, made)
    routes: Routes
    if args.in_switch:
        packing = packing_in_switch(topology, call.collective, read().plan_s)
        rule = rule_of(packing, topology, call)
        program = lower(packing, call, chunk_bytes=chunk_for(packing, call, rule), depth=rule.depth)
        check(program, switches=len(topology.switches))
        routes, scheme, bound, narrow = packing, packing.scheme, packing.bound, False
    elif made is None:
        plan = plan_for(topology, call)
        rule = choose(plan, call)
        packing = plan.packing(call.collective, call.root, rule.scheme)
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
        from ..program.timeline import trace_of
        from ..util import chrome_trace

        crossings = timeline(program, routes, topology, most=TRACED)
        chrome_trace.create(args.trace, SIMULATED)
        found = trace_of(crossings, topology, f"{call.text} on {topology.name}, simulated")
        chrome_trace.add(args.trace, SIMULATED, found)
    small = 0 < call.nbytes <= RUN_BYTES
    wrong = _wrong(program, made, narrow=narrow) if small else None
    if args.json:
        busy = [{"src": s, "dst": d, "kind": k, "seconds": t} for s, d, k, t in cost.busy]
        body = {"format": "blinkmpi.simulation", "version": 1, "machine": topology.name, "call": plain(call),
                "scheme": scheme, "seconds": cost.seconds, "algbw": cost.algbw,
                "busbw": cost.algbw * call.bus_factor, "busy": busy, "wrong": wrong}  # fmt: skip
        print(json.dumps({**body, **({"executed": False} if args.in_switch else {})}, indent=1))
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
    how = ", not executed here" if args.in_switch else ""
    facts = {
        "call": f"{call.collective} of {size_text(call.nbytes)}, {call.dtype} {call.op}".rstrip(),
        "on": f"{plural(topology.n, 'rank')} of {topology.name}, scheme {scheme}{how}",
        "result": result,
        "predicted": time_text(cost.seconds) if cost.seconds else "nothing travels",
        "algbw": f"{cost.algbw:.4g} GB/s"
        + (f" of {float(bound / 1000):.4g} possible" if cost.algbw and bound else ""),
        "busbw": f"{cost.algbw * call.bus_factor:.4g} GB/s",
    }  # fmt: skip
    show(cli_show.simulation(facts, rows, len(cost.busy) - len(rows)))
    return int(bool(wrong))


def _wrong(program: Program, made: Algorithm | None, *, narrow: bool) -> int:
    """Run ``program`` on every rank's data; the number of wrong elements. ``narrow``: see :func:`.reference`."""
    if made is not None and made.collective == "custom":
        return _wrong_custom(program, made)
    import numpy as np

    call = program.call
    sends = [np.empty(call.send_count, dtype_of(call.dtype)) if call.sends(rank) else None for rank in range(call.n)]
    for rank, data in enumerate(sends):
        if data is not None:
            fill(data, rank, call.dtype)
    results = interpreter.run(program, sends)
    return sum(count_wrong(call, r, got, narrow=narrow) for r, got in enumerate(results) if got is not None)


def _wrong_custom(program: Program, made: Algorithm) -> int:
    """As :func:`_wrong`, for a collective that the algorithm defines: on zeros and ones, compared chunk by chunk."""
    import numpy as np

    call, goal = program.call, made.flow.goal
    width, dtype = call.counts[0], dtype_of(call.dtype)
    data = [np.arange(call.send_length(r), dtype=np.int64) * 7 // (r + 3) % 2 for r in range(call.n)]
    results = interpreter.run(program, [one.astype(dtype) if one.size else None for one in data])
    folds = {"prod": np.multiply.reduce, "min": np.minimum.reduce, "max": np.maximum.reduce}.get(call.op, np.add.reduce)
    wrong = 0
    for rank, outputs in enumerate(goal.wanted):
        for i, want in enumerate(outputs):
            if want and (got := results[rank]) is not None:
                parts = [data[r][c * width : (c + 1) * width] for r, c in want]
                expected = folds(parts).astype(dtype)
                wrong += int((got[i * width : (i + 1) * width] != expected).sum())
    return wrong
