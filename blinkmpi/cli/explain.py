"""The command ``explain``: say how a call runs, and why."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..planning.algorithms import with_algorithms
from ..planning.beside_mpi import slower
from ..planning.explain import Explanation, explanation
from ..planning.selection import choose
from ..planning.slots import Gpus
from ..topology.model import Topology
from .calls import add_call, algorithm_of, call_of, plan_for
from .machine import add_machine, kind_of, on_machine, world
from .output import by_rank_0, or_fail

if TYPE_CHECKING:
    from ..lang.algorithms import Algorithm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add_machine(parser)
    add_call(parser)


def run(args: argparse.Namespace) -> int:
    """Answer; the exit code."""
    changes = args.gpus, args.drop_link, args.scale, args.rate, args.switch, args.sharp
    if args.topology is None and not any(changes):
        ranks = world(args)
        if ranks.size > 1:
            return _explain_live(args, ranks)

    def answer(topology: Topology, ranks: int) -> int:
        mpi, gpus = kind_of(topology, ranks)
        return explain(args, topology, mpi=mpi, gpus=gpus)

    return on_machine(args, answer)


def explain(args: argparse.Namespace, topology: Topology, *, mpi: bool, gpus: Gpus = "") -> int:
    """Say how the call runs, and why; ``mpi`` and ``gpus`` as for :func:`.make_plan`."""
    made = algorithm_of(args, topology)
    call = call_of(args, topology, made)
    known = slower(call, len(topology.nodes)) if mpi else ""
    plan = plan_for(topology, call, mpi=mpi, gpus=gpus)
    if made is not None:
        why = "--algorithm" if args.algorithm else "BLINKMPI_ALGO"
        plan = with_algorithms(plan, (), {call.collective: made}, gpus, why=why)
    rule = choose(plan, call, registered=bool(gpus))
    return _show(args, explanation(plan, topology, call, rule=rule, live=[known] if known else []))


def _explain_live(args: argparse.Namespace, world: Any) -> int:
    """Make a communicator of the ranks, as a job does, and explain its call: with its GPUs, tables and settings."""
    from ..communicator import Communicator
    from ..lang.source import algorithm_from_root, check_asked

    own: dict[str, Any] = {}
    made = algorithm_from_root(world, args.algorithm) if args.algorithm else None
    if made is not None:
        check_asked(made, args.collective, args.root)
        own = {"algo": f"{made.collective}:{made.scheme}", "algorithms": [made]}
    with Communicator(world, **own) as comm:
        return by_rank_0(world, lambda: or_fail(lambda: _of_ranks(args, comm, made)))


def _of_ranks(args: argparse.Namespace, comm: Any, made: Algorithm | None) -> int:
    """Say how the ranks of a communicator of ours run the call."""
    from ..runtime import inspection

    return _show(args, inspection.explanation(comm.context, call_of(args, comm.machine, made)))


def _show(args: argparse.Namespace, found: Explanation) -> int:
    print(found.to_json() if args.json else found.text(), end="" if args.json else "\n")
    return 0
