"""The machine that a command is about: named, or the live one, which the ranks that ``mpirun`` started make.

Rank 0 answers; the others take part in finding the live machine.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import NO_MPI, ArgumentError
from ..planning.slots import Gpus
from ..topology.importers import load, modify, parse_rates
from ..topology.model import Topology
from .output import by_rank_0, mpi, or_fail

Answer = Callable[[Topology, int], int]  # of the machine and its live ranks, 0 for one that was named; the exit code


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Which machine, and what of it."""
    add = parser.add_argument
    text = "dgx-1v, dgx-a100:4, cpu:4, FILE, FILE:4; default: here"
    machine: Any = add("topology", nargs="?", metavar="TOPOLOGY", help=text)
    machine.completer = _machines
    add("--gpus", metavar="LIST", help="take these devices alone: 1,4,5,6 or 0-3")
    add("--drop-link", action="append", default=[], metavar="A-B", help="without the links of a pair")
    add("--scale", action="append", default=[], metavar="KIND=F", help="links of a kind at this factor")
    add("--rate", action="append", default=[], metavar="KIND=GB/s", help="one link of a kind, each way: nvlink=50")
    add("--sharp", metavar="KINDS", help="these switches reduce and multicast: nvswitch, nvswitch,net or none")
    add("--switch", action="store_true", help="NV# of a text of nvidia-smi leads to a switch, not to each GPU")
    add("--json", action="store_true", help="print JSON")


def _machines(prefix: str, **_: Any) -> list[str]:
    """What a shell may complete: machines of the catalogue, and files."""
    from glob import glob

    from ..topology.machines import names

    return [name for name in [*names(), *glob(f"{prefix}*")] if name.startswith(prefix)]


def on_machine(args: argparse.Namespace, answer: Answer) -> int:
    """Answer on the machine that the flags say, on rank 0, and give every rank its exit code."""
    rates = parse_rates(args.rate)
    if args.topology is not None:
        return answer(changed(args, named(args.topology, rates, switch=args.switch)), 0)
    if args.switch:
        raise ArgumentError(
            "--switch is for a file with the text of `nvidia-smi topo -m`; name the file, or leave it out"
        )
    from .live import live_machine

    ranks = world(args)
    node = ranks.Split_type(mpi()[0].COMM_TYPE_SHARED)
    try:
        found = live_machine(ranks, node)
        for kind, mbps in rates.items():
            found = found.at_rate(kind, mbps)
        found = changed(args, found)
    finally:
        node.Free()
    return by_rank_0(ranks, lambda: or_fail(lambda: answer(found, ranks.size)))


def named(spec: str, rates: Mapping[str, int], *, switch: bool = False) -> Topology:
    """The machine that a user names; what its reader had to guess is said on stderr."""
    found = load(spec, rates=rates, switch=switch)
    for remark in found.remarks:
        print(f"blinkmpi: {remark}", file=sys.stderr)
    return found


def changed(args: argparse.Namespace, topology: Topology) -> Topology:
    """The part of a machine, and at the rates, that the flags say."""
    return modify(topology, gpus=args.gpus, drop_link=args.drop_link, scale=args.scale, sharp=args.sharp)


def world(args: argparse.Namespace) -> Any:
    """The ranks that mpirun started.

    Raises:
        ArgumentError: without MPI.
    """
    found, why = mpi()
    if found is None:
        what = "to start ranks with" if args.command in ("bench", "tune") else "to ask about the live machine"
        instead = "" if args.command in ("bench", "tune") else "name a TOPOLOGY such as cpu:4, or "
        raise ArgumentError(f"{args.command}: there is no MPI {what} ({why.strip().splitlines()[0]}); {instead}"
                            f"{NO_MPI}")  # fmt: skip
    return found.COMM_WORLD


def kind_of(topology: Topology, ranks: int) -> tuple[bool, Gpus]:
    """Whether these live ranks may leave calls to MPI, and how their GPUs reach each other; see :func:`.make_plan`."""
    live_gpus = ranks > 0 and all(device.kind == "gpu" for device in topology.devices)
    gpus: Gpus = "" if not live_gpus else "onehop" if len(topology.nodes) == 1 else "nodes"
    return ranks > 0 and not live_gpus, gpus
