"""What ``explain`` and ``simulate`` have in common: the flags of a call, and the call and the plan that they say."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from ..bench.nccl_tests import OP_NAMES, call_of_size, dtype_named
from ..errors import ArgumentError
from ..planning.algorithms import named_in
from ..planning.plan import Plan
from ..planning.planner import make_plan, planned_with
from ..planning.slots import Gpus
from ..program.call import REDUCTIONS, Call, collective_named
from ..program.ir import Wire
from ..topology.model import Topology
from ..trees.tree import COLLECTIVES, Collective
from ..util.settings import read
from ..util.text import parse_size

if TYPE_CHECKING:
    from ..lang.algorithms import Algorithm

ALGORITHM = "an algorithm of one's own: x.py, x.py:NAME,PARAMETER=VALUE, x.xml (MSCCL's) or x.json (docs/lang.md)"


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


def plan_for(topology: Topology, call: Call, *, mpi: bool = False, gpus: Gpus = "") -> Plan:
    """A plan for one call, by ``BLINKMPI_ALGO`` and ``BLINKMPI_WIRE`` as in a job."""
    settings = read()
    plan = make_plan(
        topology, algo=named_in(settings.algo, (), topology.n).rest, mpi=mpi, gpus=gpus,
        collectives=planned_with(call.collective, gpus), roots=[max(call.root, 0)], seconds=settings.plan_s,
    )  # fmt: skip
    return replace(plan, wire=cast(Wire, settings.wire)) if settings.wire else plan


def algorithm_of(args: argparse.Namespace, topology: Topology, *, custom: bool = False) -> Algorithm | None:
    """What ``--algorithm`` names, which says what collective is called, and from which root; else what is named in
    ``BLINKMPI_ALGO`` for the collective.

    Args:
        custom: whether it may be one of the user's own.

    Raises:
        ArgumentError: for one that is no algorithm of a call, or for another collective or root than the flags say.
    """
    if args.algorithm is None:
        return named_in(read().algo, (), topology.n).asked.get(collective_named(args.collective or "allreduce"))
    from ..lang.source import algorithm_for, check_asked

    made = algorithm_for(args.algorithm, topology.n)
    if made.collective != "custom" or not custom:
        check_asked(made, args.collective, args.root)
    return made


def call_of(args: argparse.Namespace, topology: Topology, made: Algorithm | None) -> Call:
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
