"""The commands that show and compare without planning: ``topo``, ``topo --diff``, ``plan --diff``. Rank 0 alone."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Sequence
from pathlib import Path

from .bootstrap import read_plan
from .cli_out import show, write
from .codec import plain
from .doctor_look import own_gpu
from .errors import ArgumentError
from .plan_diff import DETAILS, PlanDifference, plan_differences
from .settings import read
from .topology import from_gpus, gather, gather_gpus
from .topology.diff import differences
from .topology.gather import Comm
from .topology.importers import load, on_gpus_of
from .topology.model import Topology
from .topology.nccl import write_xml
from .topology.probe import Nvml, probe, probe_all


def add_topo(command: argparse.ArgumentParser) -> None:
    """The flags of ``topo`` besides those of all commands."""
    command.add_argument("--diff", metavar="OTHER", help="what another machine (a name or a file) has differently")
    command.add_argument("--on", metavar="REAL", help="with the PCI ids of this machine's GPUs (to tell NCCL)")
    command.add_argument("--plot", metavar="FILE", help="draw the machine: .svg, .png or .pdf")


def add_plan_diff(command: argparse.ArgumentParser) -> None:
    """``plan --diff A B``."""
    command.add_argument("--diff", nargs=2, metavar=("A", "B"), help="what plan file B has differently from A")
    command.add_argument("--trees", action="store_true", help="with --diff: every tree and the load of every link")


def live_machine(world: Comm, node: Comm) -> Topology:
    """The machine of a job: its GPUs, if every rank has one, else its CPU ranks; collective.

    One process alone sees all GPUs of the machine that NVML shows. BLINKMPI_GPU_DISABLE=1 leaves the CPU ranks.

    Raises:
        BlinkError: as ``topology.gather`` does.
    """
    shown = () if read().gpu_disable else Nvml().buses()
    alone = len(world.allgather(None)) == 1
    if shown and alone:
        facts = probe_all()
        return from_gpus(facts, hosts=[socket.gethostname()] * len(facts))
    gpu = own_gpu(node.rank) if shown else "NVML shows none"
    return gather_gpus(world, node, gpu if isinstance(gpu, str) else probe(gpu.bus_id)).topology or gather(world, node)


def topo(args: argparse.Namespace, topology: Topology) -> int:
    """Show a machine, write it (``.xml``: for NCCL), draw it, or compare it with another."""
    if args.on:
        topology = on_gpus_of(topology, load(args.on))
    if args.output:
        write(args.output, write_xml(topology) if args.output.endswith(".xml") else topology.to_json())
    if args.plot:
        from .plot_machine import draw_machine

        draw_machine(topology, args.plot)
    if args.diff:
        other = load(args.diff)
        found = [(d.what, d.one, d.other) for d in differences(topology, other)]
        return _compared(args, "topology-diff", (topology.name, other.name), ("what",), found)
    if args.json:
        print(topology.to_json(), end="")
    elif not (args.output or args.plot):
        from .topology.show import render

        show(render(topology))
    return 0


def plan_diff(args: argparse.Namespace) -> int:
    """Compare two plans' files."""
    if args.topology is not None or args.output or args.collective:
        raise ArgumentError("plan --diff A B compares two files of plans; leave out TOPOLOGY, -o and --collective")
    one, other = (read_plan(path) for path in args.diff)
    found = plan_differences(one, other)
    rows: list[tuple[str, ...]] = [(d.collective, d.what, d.one, d.other) for d in found]
    if not args.json and not args.trees:
        rows = _brief(found)
    code = _compared(args, "plan-diff", tuple(args.diff), ("collective", "what"), rows)
    if not args.json and len(rows) < len(found):
        print(f"\n {len(found)} in all, with trees and loads of links: --trees, --json")
    return code


def _brief(found: Sequence[PlanDifference]) -> list[tuple[str, ...]]:
    """Without trees and links; what is the same from several roots is said once."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for d in found:
        name, _, root = d.collective.partition(" from ")
        if not d.what.startswith(DETAILS):
            rows.setdefault((name, d.what, d.one, d.other), []).append(root)
    return [
        (name + (f" from {','.join(roots)}" if roots[0] else ""), *rest)
        for (name, *rest), roots in sorted(rows.items(), key=lambda row: row[0][0])
    ]


def _compared(
    args: argparse.Namespace, kind: str, names: Sequence[str], heads: Sequence[str], rows: Sequence[tuple[str, ...]]
) -> int:
    """Print differences; 1 if there are some, as ``diff`` does."""
    if args.json:
        keys = (*heads, "one", "other")
        body = {"format": f"blinkmpi.{kind}", "version": 1, "one": names[0], "other": names[1],
                "differences": plain([dict(zip(keys, row, strict=True)) for row in rows])}  # fmt: skip
        print(json.dumps(body, indent=1))
    else:
        from . import cli_show

        show(cli_show.compared([Path(name).name for name in names], heads, rows))
    return int(bool(rows))
