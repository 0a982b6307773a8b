"""The command ``topo``: show, write, draw, compare or measure a machine."""

import argparse
import sys
from typing import Any

from ..errors import ArgumentError
from ..planning.in_switch import allreduce_bounds
from ..topology.importers import load, on_gpus_of
from ..topology.model import Topology
from ..util.progress import StderrBar
from ..util.together import Comm
from .differences import compared
from .machine import add_machine, on_machine, world
from .output import mpi, show, write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add_machine(parser)
    parser.add_argument("-o", metavar="FILE", dest="output", help="write the topo's file")
    parser.add_argument("--diff", metavar="OTHER", help="what another machine (a name or a file) has differently")
    parser.add_argument("--on", metavar="REAL", help="with the PCI ids of this machine's GPUs (to tell NCCL)")
    parser.add_argument("--plot", metavar="FILE", help="draw the machine: .svg, .png or .pdf")
    parser.add_argument("--measure", nargs="?", const="kept", choices=("kept", "again"), metavar="again",
                         help="measure the live machine's links, or show what was measured before")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Answer; the exit code."""
    if args.topology is not None or not args.measure:
        return on_machine(args, lambda topology, _: topo(args, topology))
    ranks = world(args)
    node = ranks.Split_type(mpi()[0].COMM_TYPE_SHARED)
    try:
        return measure(args, ranks, node)
    finally:
        node.Free()


def topo(args: argparse.Namespace, topology: Topology) -> int:
    """Show a machine, write it (``.xml``: for NCCL), draw it, or compare it with another."""
    if args.measure:
        raise ArgumentError("--measure measures the live machine: leave out TOPOLOGY, and start a rank for each GPU "
                            "(mpirun -np 8 blinkmpi topo --measure)")  # fmt: skip
    if args.on:
        topology = on_gpus_of(topology, load(args.on))
    if args.output:
        from ..topology.nccl import processor, write_xml

        write(args.output, write_xml(topology, processor()) if args.output.endswith(".xml") else topology.to_json())
    if args.plot:
        from ..plot.machine import draw_machine

        draw_machine(topology, args.plot)
    if args.diff:
        from ..topology.diff import differences

        other = load(args.diff)
        found = [(d.what, d.one, d.other) for d in differences(topology, other)]
        return compared(args, "topology-diff", (topology.name, other.name), ("what",), found)
    if args.json:
        print(topology.to_json(), end="")
    elif not (args.output or args.plot):
        from ..topology.show import render

        show(render(topology))
        if topology.sharp:
            from . import show as cli_show

            show(cli_show.facts("An allreduce on these links", allreduce_bounds(topology)))
    return 0


def measure(args: argparse.Namespace, world: Any, node: Comm) -> int:
    """Measure the links of the live machine, or show what was measured before; collective, rank 0 prints."""
    from ..measure.links import document, measure_gpus, measure_memory
    from ..topology.measured import driver_of, file_of, kept, with_measured
    from ..util.cache_folder import cache_dir, keep
    from .live import gathered

    for flag in ("gpus", "drop_link", "scale", "rate", "sharp", "switch", "on", "plot", "diff"):
        if getattr(args, flag):
            name = "--" + flag.replace("_", "-")
            raise ArgumentError(f"--measure measures the machine as it is; leave out {name}, or write the machine "
                                "with -o and give that file to a second command")  # fmt: skip
    gpu, facts, machine = gathered(world, node)
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
