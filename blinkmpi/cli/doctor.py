"""The command ``doctor``: all ranks collect facts, rank 0 judges them and prints, and its exit code is the job's."""

import argparse
from typing import Any

from ..doctor.diagnosis import judge
from ..doctor.examination import clock_skew, examine, mpi_facts, own_gpu, self_test, try_pairs
from ..doctor.report import RankFacts, Report
from ..topology.live import exchange, this_process
from ..util.launcher import find_mpirun
from ..util.together import allgather
from .output import by_rank_0, show
from .output import mpi as mpi_module


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    what = "would a job run well here? MPI, GPUs, links, memory, settings; exit code 1 if something fails"
    parser.description = what
    parser.add_argument("--json", action="store_true", help="print JSON")
    what = "start no child job that tries MPI with GPU memory"
    parser.add_argument("--no-self-test", action="store_true", help=what)


def run(args: argparse.Namespace) -> int:
    """Examine every rank that mpirun started (or this process alone), print on rank 0; 1 if something fails."""
    mpi, lost = mpi_module()
    if mpi is None:
        part, lost = this_process(), lost.strip().splitlines()[0]
        return _print(args, judge([examine(part, rank=0, mpi=None, no_mpi=lost, gpu=own_gpu(0))]))
    world = mpi.COMM_WORLD.Dup()
    node = world.Split_type(mpi.COMM_TYPE_SHARED)
    try:
        seen = _all(mpi, world, node)
        tried = any(s.gpu is not None for s in seen) and not args.no_self_test
        return by_rank_0(world, lambda: _print(args, judge(seen, self_test(find_mpirun()) if tried else None)))
    finally:
        node.Free()
        world.Free()


def _all(mpi: Any, world: Any, node: Any) -> list[RankFacts]:
    """The facts of all ranks; collective."""
    import mpi4py

    parts = exchange(world, node, measure=False)
    part = parts[world.rank]
    place = f"{part.leader}/{part.place}"
    gpu = own_gpu(node.rank)
    pairs = try_pairs(world, place, gpu)
    skew = clock_skew(world)
    facts = mpi_facts(mpi, mpi4py.__version__)
    own = examine(part, rank=world.rank, mpi=facts, skew_s=skew, gpu=gpu, pairs=pairs, place=place)
    return allgather(world, own, RankFacts)


def _print(args: argparse.Namespace, report: Report) -> int:
    if args.json:
        print(report.to_json(), end="")
    else:
        from . import show as cli_show

        show(cli_show.doctor(report))
    return int(not report.healthy)
