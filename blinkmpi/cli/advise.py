"""The command ``advise``: which GPUs to ask for, and what each choice gives. Only rank 0 runs this."""

import argparse
import json
import os
from typing import Any

from ..errors import ArgumentError
from ..planning.advice import COLLECTIVES, Advice, GpuSet, advise
from ..topology.importers import parse_gpus
from ..topology.model import Topology
from ..topology.probe import Nvml
from ..topology.visible import available
from ..util.settings import read
from .machine import add_machine, on_machine
from .numbers import of_flag, whole
from .output import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add_machine(parser)
    parser.add_argument("--take", metavar="N", required=True, help="how many GPUs the job is to have")
    parser.add_argument("--from", dest="free", metavar="LIST", help="the GPUs to choose from: 0,1,4,5 or 0-3")


def run(args: argparse.Namespace) -> int:
    """Answer; the exit code."""
    return on_machine(args, lambda topology, ranks: advice(args, topology, ranks=ranks))


def advice(args: argparse.Namespace, topology: Topology, *, ranks: int) -> int:
    """Print the classes of sets, best first.

    Args:
        ranks: of the live job that the machine was gathered from; one alone sees all GPUs, also those of others.
    """
    take, free, why = of_flag("--take", whole, args.take), None, ""
    if args.free:
        if args.gpus:
            raise ArgumentError("--gpus and --from both say which GPUs there are; leave one of them out")
        free, why = tuple(parse_gpus(args.free)), f"--from {args.free}"
    elif args.gpus:
        why = f"--gpus {args.gpus}"
    elif ranks == 1 and all(device.kind == "gpu" for device in topology.devices):
        free, why = available(topology, os.environ, Nvml().users)
    found = advise(topology, take, free, seconds=read().plan_s)
    if args.json:
        print(json.dumps(_report(found, topology, why), indent=1))
    else:
        from . import show as cli_show

        show(cli_show.advice(found, topology, why))
    return 0


def _report(found: Advice, topology: Topology, why: str) -> dict[str, Any]:
    """What ``advise --json`` says."""

    def named(mbps: Any) -> dict[str, float] | None:
        return dict(zip(COLLECTIVES, (float(r / 1000) for r in mbps), strict=True)) if mbps else None

    def row(choice: GpuSet) -> dict[str, Any]:
        return {"gpus": list(choice.gpus), "devices": [topology.vertex_label(r) for r in choice.gpus],
                "alike": choice.alike, "links": choice.links, "rate_gbps": named(choice.rates),
                "of_best": float(choice.rates[0] / found.choices[0].rates[0]),
                "rings_gbps": named(choice.rings), "ring_links": choice.ring_links}  # fmt: skip

    return {"format": "blinkmpi.advice", "version": 1, "machine": topology.name, "take": found.take,
            "free": list(found.free), "why_free": why, "choices": [row(c) for c in found.choices],
            "not_joined": found.apart}  # fmt: skip
