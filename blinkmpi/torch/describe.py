"""What a process group is and how its calls run, in words."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..errors import ArgumentError
from .group import BlinkGroup


def explain(group: Any = None, collective: str = "allreduce", nbytes: int = 1 << 20, *, dtype: str = "float32") -> str:
    """Say which algorithm a collective of ``nbytes`` takes in a group, why, and how fast it could be. Local.

    Args:
        group: torch's; the default group without one.
        collective: its name, or ``send``: how a message of a GPU tensor goes.

    Raises:
        ArgumentError: for a group of another backend, or one in which no collective has been called yet.
    """
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, BlinkGroup):
        raise ArgumentError(f"group {group!r}: expected one of backend blink; see dist.get_backend(group)")
    if collective == "send":
        return f"group {group.group_name!r}: {group.device_messages.explain(nbytes)}"
    if not group.opened:
        raise ArgumentError(f"group {group.group_name!r} has made no call yet, and is planned in its first; make one")
    return f"group {group.group_name!r}: {group.comm.explain(collective, nbytes, dtype=dtype)}"
