"""Machines: what they are made of, where their description comes from, how they look.

``model`` holds the value types, ``machines`` the catalogue, ``gather`` finds the live machine over a
communicator, ``importers`` reads what a user names, ``show`` prints. Nothing here plans or communicates
by itself. Import ``show`` on its own: it needs rich.
"""

from __future__ import annotations

from .gather import Part, exchange, gather, this_machine
from .importers import load, modify, parse_gpus
from .machines import cpu_node, machine, names
from .model import Device, Link, Switch, Topology

__all__ = [
    "Device",
    "Link",
    "Part",
    "Switch",
    "Topology",
    "cpu_node",
    "exchange",
    "gather",
    "load",
    "machine",
    "modify",
    "names",
    "parse_gpus",
    "this_machine",
]
