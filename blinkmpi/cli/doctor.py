"""The command ``doctor``: all ranks collect facts, rank 0 judges them and prints, and its exit code is the job's."""

import argparse
import sys
from types import ModuleType
from typing import Any

from ..doctor.diagnosis import judge
from ..doctor.examination import clock_skew, decode, encode, examine, mpi_facts, own_gpu, self_test, try_pairs
from ..doctor.report import RankFacts, Report
from ..topology.gather import exchange, this_process
from ..util.launcher import find_mpirun
from .output import show


def add_doctor(sub: Any) -> None:
    """The command's flags."""
    what = "would a job run well here? MPI, GPUs, links, memory, settings; exit code 1 if something fails"
    command = sub.add_parser("doctor", help="see whether a job would run well here", description=what)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "--no-self-test", action="store_true", help="start no child job that tries MPI with GPU memory"
    )


def doctor(args: argparse.Namespace) -> int:
    """Examine every rank that mpirun started (or this process alone), print on rank 0; 1 if something fails."""
    mpi, lost = _mpi()
    if mpi is None:
        part = this_process()
        return _print(args, judge([examine(part, rank=0, mpi=None, no_mpi=lost, gpu=own_gpu(0))]))
    world = mpi.COMM_WORLD.Dup()
    node = world.Split_type(mpi.COMM_TYPE_SHARED)
    try:
        seen = _all(mpi, world, node)
        code = 0
        if world.rank == 0:
            try:
                with_gpu = any(s.gpu is not None for s in seen)
                test = self_test(find_mpirun()) if with_gpu and not args.no_self_test else None
                code = _print(args, judge(seen, test))
            finally:
                world.bcast(code, 0)
        else:
            code = int(world.bcast(None, 0))
        return code
    finally:
        node.Free()
        world.Free()


def _mpi() -> tuple[ModuleType | None, str]:
    """mpi4py's module, or why it cannot be imported."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return None, str(error).strip().splitlines()[0]
    return MPI, ""


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
    return [decode(text) for text in world.allgather(encode(own))]


def _print(args: argparse.Namespace, report: Report) -> int:
    if args.json:
        print(report.to_json(), end="")
    else:
        from . import show as cli_show

        show(cli_show.doctor(report))
    sys.stdout.flush()
    return int(not report.healthy)
