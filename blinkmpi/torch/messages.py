"""Gloo, which carries a group's point-to-point messages: its connections are made by the messages that need them.

A group makes it without waiting for its peers, and where that fails, programs of collectives alone never hear of it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import BlinkError


def gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Gloo's backend of these ranks, or the error with which it cannot be made; None where torch has no gloo."""
    if not dist.is_gloo_available():
        return None
    try:
        return _made(dist.PrefixStore("gloo", store), rank, size, timeout)
    except RuntimeError as error:
        return error


def _made(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    kind = dist.ProcessGroupGloo
    try:
        device = kind.create_default_device(lazy_init=True)
    except TypeError:  # an older torch, whose gloo connects all ranks at once
        return kind(store, rank, size, timeout=timeout)
    options = kind._Options()
    options._devices, options._timeout = [device], timeout
    return kind(store, rank, size, options)


def carrier(found: Any) -> Any:
    """What carries messages: what :func:`gloo` gave.

    Raises:
        BlinkError: if there is none.
    """
    if found is None or isinstance(found, Exception):
        why = "this torch has none" if found is None else f"it could not be made: {found}"
        raise BlinkError(
            f"send and recv go over gloo, and {why}; set GLOO_SOCKET_IFNAME to an interface of this machine, or "
            "exchange by collectives"
        ) from found
    return found
