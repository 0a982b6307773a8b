"""The commands ``topo`` (with ``--diff`` and ``--measure``) and ``plan --diff``, which plan nothing."""

import argparse
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..doctor.examination import own_gpu
from ..errors import ArgumentError
from ..planning.diff import DETAILS, PlanDifference, plan_differences
from ..runtime.bootstrap import read_plan
from ..topology.diff import differences
from ..topology.gpu import GpuFacts
from ..topology.gpu_topology import from_gpus
from ..topology.importers import load, on_gpus_of
from ..topology.live import gather, gather_gpus
from ..topology.measured import applied, driver_of, file_of, kept, with_measured
from ..topology.model import Topology
from ..topology.nccl import processor, write_xml
from ..topology.network_rate import MessagingComm
from ..topology.probe import Nvml, probe, probe_all
from ..util.cache_folder import cache_dir, keep
from ..util.codec import plain
from ..util.progress import StderrBar
from ..util.settings import read
from ..util.together import Comm
from .output import show, write


def add_topo(command: argparse.ArgumentParser) -> None:
    """The flags of ``topo`` besides those of all commands."""
    command.add_argument("--diff", metavar="OTHER", help="what another machine (a name or a file) has differently")
    command.add_argument("--on", metavar="REAL", help="with the PCI ids of this machine's GPUs (to tell NCCL)")
    command.add_argument("--plot", metavar="FILE", help="draw the machine: .svg, .png or .pdf")
    command.add_argument("--measure", nargs="?", const="kept", choices=("kept", "again"), metavar="again",
                         help="measure the live machine's links, or show what was measured before")  # fmt: skip


def add_plan_diff(command: argparse.ArgumentParser) -> None:
    """``plan --diff A B``."""
    command.add_argument("--diff", nargs=2, metavar=("A", "B"), help="what plan file B has differently from A")
    command.add_argument("--trees", action="store_true", help="with --diff: every tree and the load of every link")


def live_machine(world: MessagingComm, node: Comm) -> Topology:
    """The machine of a job: its GPUs, if every rank has one, else its CPU ranks; collective.

    One process alone sees all GPUs of the machine that NVML shows. BLINKMPI_GPU_DISABLE=1 leaves the CPU ranks.

    Raises:
        BlinkError: as ``topology.gather`` does.
    """
    shown = () if read().gpu_disable else Nvml().buses()
    alone = len(world.allgather(None)) == 1
    if shown and alone:
        facts = probe_all()
        found = from_gpus(facts, hosts=[socket.gethostname()] * len(facts))
        return applied(world, found, facts[0], cache_dir())
    _, own, machine = _gathered(world, node)
    return machine if isinstance(own, str) else applied(world, machine, own, cache_dir())


def _gathered(world: MessagingComm, node: Comm) -> tuple[Any, GpuFacts | str, Topology]:
    """This rank's GPU, its facts, and the machine; None for the GPU, and why, if some rank has none; collective."""
    gpu = own_gpu(node.rank) if not read().gpu_disable and Nvml().buses() else "NVML shows none"
    facts = gpu if isinstance(gpu, str) else probe(gpu.bus_id)
    found, reason = gather_gpus(world, node, facts, per_gpu=read().ranks_per_gpu)
    if found is None or isinstance(gpu, str):
        return None, reason, gather(world, node)
    return gpu, facts, found


def measure(args: argparse.Namespace, world: Any, node: Comm) -> int:
    """Measure the links of the live machine, or show what was measured before; collective, rank 0 prints."""
    from ..measure.links import document, measure_gpus, measure_memory

    for flag in ("gpus", "drop_link", "scale", "on", "plot", "diff"):
        if getattr(args, flag):
            name = "--" + flag.replace("_", "-")
            raise ArgumentError(f"--measure measures the machine as it is; leave out {name}, or write the machine "
                                "with -o and give that file to a second command")  # fmt: skip
    gpu, facts, machine = _gathered(world, node)
    before = kept(world, machine, facts, cache_dir()) if gpu and args.measure == "kept" else None
    path = ""
    if before is None:
        with _MeasureProgress(shown=world.rank == 0) as bar:
            if gpu is None:
                found = document(machine, measure_memory(world, node, bar.say), "", {})
            else:
                from ..transport.cuda.link_rates import Rates

                rows = measure_gpus(world, node, machine, lambda me, n: Rates(gpu, me, n), bar.say)
                found = document(machine, rows, driver_of(facts), gpu.versions)
        if world.rank == 0 and gpu and all(device.uuid for device in machine.devices):
            file = file_of(cache_dir(), (device.uuid for device in machine.devices), found.driver)
            keep(file, found.to_json())
            path = f", kept in {file}"
        note = f"measured now{path}"
    else:
        found, note = before, f"measured {before.date}, from the cache; --measure=again measures again"
    if world.rank == 0:
        if args.output:
            write(args.output, with_measured(machine, found).to_json())
        if args.json:
            print(found.to_json(), end="")
        elif not args.output:
            from ..measure.show import render

            show(render(machine, found, note))
    return 0


class _MeasureProgress(StderrBar):
    """The progress of measuring on rank 0's stderr: a bar on a terminal, else a line for every tenth."""

    tenths = -1

    def say(self, done: int, total: int, text: str) -> None:
        """Show that ``done`` of ``total`` traffic patterns are done, and which comes next."""
        tenths = 10 * done // total
        if self.bar is not None:
            self.update(completed=done, total=total, description=f"measuring {text}")
        elif self.shown and tenths > self.tenths:
            self.tenths = tenths
            print(f"measuring [{'#' * tenths}{'.' * (10 - tenths)}] {done}/{total} {text}", file=sys.stderr, flush=True)


def topo(args: argparse.Namespace, topology: Topology) -> int:
    """Show a machine, write it (``.xml``: for NCCL), draw it, or compare it with another."""
    if args.measure:
        raise ArgumentError("--measure measures the live machine: leave out TOPOLOGY, and start a rank for each GPU "
                            "(mpirun -np 8 blinkmpi topo --measure)")  # fmt: skip
    if args.on:
        topology = on_gpus_of(topology, load(args.on))
    if args.output:
        write(args.output, write_xml(topology, processor()) if args.output.endswith(".xml") else topology.to_json())
    if args.plot:
        from ..plot.machine import draw_machine

        draw_machine(topology, args.plot)
    if args.diff:
        other = load(args.diff)
        found = [(d.what, d.one, d.other) for d in differences(topology, other)]
        return _compared(args, "topology-diff", (topology.name, other.name), ("what",), found)
    if args.json:
        print(topology.to_json(), end="")
    elif not (args.output or args.plot):
        from ..topology.show import render

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
    """The rows without trees and links; roots with the same difference share a row."""
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
        from . import show as cli_show

        show(cli_show.compared([Path(name).name for name in names], heads, rows))
    return int(bool(rows))
