"""Machines: what they are made of, where their description comes from, how they look.

``model`` holds the value types, ``machines`` the catalogue, ``probe`` asks NVML and /sys about a GPU, ``gpu`` holds
the answers, ``gpus`` makes one machine of those of all ranks, ``gather`` finds the live machine over a communicator,
``importers`` reads what a user names, ``show`` prints. Nothing here plans or communicates by itself. Import ``show`` on
its own: it needs rich; and ``probe``, which looks at this machine.
"""

from __future__ import annotations

from .gather import GpuMachine, ProcessInfo, exchange, gather, gather_gpus, this_machine
from .gpu import GpuFacts
from .gpu_topology import from_gpus
from .importers import load, modify, parse_gpus
from .machines import cpu_node, machine, names
from .model import Device, Link, Switch, Topology

__all__ = [
    "Device",
    "GpuFacts",
    "GpuMachine",
    "Link",
    "ProcessInfo",
    "Switch",
    "Topology",
    "cpu_node",
    "exchange",
    "from_gpus",
    "gather",
    "gather_gpus",
    "load",
    "machine",
    "modify",
    "names",
    "parse_gpus",
    "this_machine",
]
