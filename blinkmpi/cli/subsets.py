"""The command ``subsets``: every part of a machine that a job may get, trees beside rings."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import ArgumentError
from ..planning.subsets import COLLECTIVES, PCIE_MBPS, Allocations, Subset, by_size, summary, survey
from ..topology.model import MOST_MBPS, Topology
from ..util.screen import console, is_terminal
from ..util.text import quoted
from .machine import add_machine, on_machine
from .numbers import fraction, of_flag
from .output import show, write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add_machine(parser)
    parser.add_argument("-o", metavar="FILE", dest="output", help="write the subsets's file")
    parser.add_argument("--pcie", default=str(PCIE_MBPS // 1000), metavar="GBPS", help="what a ring over PCIe reaches")
    parser.add_argument("--plot", metavar="FILE", help="draw the speed-ups: .svg, .png or .pdf")


def run(args: argparse.Namespace) -> int:
    """Answer; the exit code."""
    return on_machine(args, lambda topology, _: subsets(args, topology))


def subsets(args: argparse.Namespace, topology: Topology) -> int:
    """List the connected subsets, print, write, draw."""
    if args.plot:
        from ..util.figure import check_target

        check_target(args.plot)
    pcie_mbps = int(of_flag("--pcie", fraction, args.pcie) * 1000)
    if not 1 <= pcie_mbps <= MOST_MBPS:
        raise ArgumentError(f"--pcie {quoted(args.pcie)}: expected GB/s above 0; 10 is usual for a DGX-1")
    found = survey(topology, pcie_mbps=pcie_mbps, each=_with_bar)
    text = json.dumps(subsets_report(topology, found, pcie_mbps), indent=1)
    if args.output:
        write(args.output, text + "\n")
    if args.plot:
        from ..plot.trees import draw_subsets

        draw_subsets(found, topology, pcie_mbps, args.plot)
    if args.json:
        print(text)
    elif not args.output:
        from . import show as cli_show

        show(cli_show.subsets(found, topology, pcie_mbps))
    return 0


def _with_bar(some: Sequence[Allocations]) -> Iterable[Allocations]:
    """The same, with a progress bar if stderr is a terminal."""
    if not is_terminal(sys.stderr):
        return some
    from rich.progress import track

    return track(some, "planning", console=console(stderr=True), transient=True)


def subsets_report(topology: Topology, found: Sequence[Subset], pcie_mbps: int) -> dict[str, Any]:
    """What ``subsets --json`` says: all subsets, then sums by size and over all of 3 GPUs and more."""
    larger = [s for s in found if len(s.gpus) > 2]
    rows = [
        {"gpus": list(s.gpus), "allocations": s.allocations, "rings": s.rings,
         "rate_gbps": _by_name([float(r / 1000) for r in s.rates]),
         "baseline_gbps": _by_name([float(r / 1000) for r in s.baseline]),
         "speedup": _by_name([float(r) for r in s.speedups]), "broadcast_trees": s.trees, "fewest": s.fewest}
        for s in found
    ]  # fmt: skip
    return {
        "format": "blinkmpi.subsets", "version": 1, "machine": topology.name, "fingerprint": topology.fingerprint,
        "pcie_gbps": pcie_mbps / 1000, "subsets": rows,
        "sizes": {str(size): _summary(some) for size, some in by_size(found).items()},
        "from_3": _summary(larger) if larger else None,
    }  # fmt: skip


def _summary(some: Sequence[Subset]) -> dict[str, Any]:
    s = summary(some)
    return {**s._asdict(), "speedups": _by_name([spread._asdict() for spread in s.speedups])}


def _by_name(values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(COLLECTIVES, values, strict=True))
