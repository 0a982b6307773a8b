"""A group of several backends: in ``init_process_group("cpu:gloo,cuda:blink")`` blink serves GPUs alone.

torch takes our group in place of its own, which has the backends of the other devices and would be thrown away. So it
is kept, and gets the calls whose tensors lie on these devices.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import ArgumentError
from .collectives import TensorCollectives
from .group import BlinkGroup

KINDS = dist.ProcessGroup.BackendType


class Beside(NamedTuple):
    """Torch's own group, and the types of device that it serves."""

    group: Any
    devices: frozenset[str]


def beside(options: Any) -> Beside | None:
    """What the user named for other devices, from the call of torch's that makes this group; None if nothing.

    Raises:
        ArgumentError: for a backend behind ours that cannot be made here.
    """
    found = _locals_of_torch()
    if found is None:
        return None
    named = {d: str(name).lower() for d, name in found["backend_config"].get_device_backend_map().items()}
    others = {device: name for device, name in named.items() if name != "blink"}
    if not others:
        return None
    group = found["pg"]
    for device, name in others.items():
        if not _serves(group, device):  # torch makes backends in the order of the string, and stops at ours
            store = dist.PrefixStore(f"{device}/", found["prefix_store"])
            group._register_backend(torch.device(device), *_made(name, device, store, options))
    return Beside(group, frozenset(others))


def _locals_of_torch() -> dict[str, Any] | None:
    """The variables of torch's function that makes a group; None if another calls."""
    here = inspect.currentframe()
    frame = here.f_back if here is not None else None
    del here  # a frame among its own variables would keep them, stores too, until the collector comes
    while frame is not None and "backend_config" not in frame.f_locals:
        frame = frame.f_back
    return None if frame is None else frame.f_locals


def _serves(group: Any, device: str) -> bool:
    try:
        group._get_backend(torch.device(device))
    except RuntimeError:
        return False
    return True


def _made(name: str, device: str, store: Any, options: Any) -> tuple[Any, Any]:
    """The type and the backend of a device that torch would make after ours."""
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    if name == "gloo" and dist.is_gloo_available():
        backend: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        kind = KINDS.GLOO
    elif name == "nccl" and dist.is_nccl_available():
        own = dist.ProcessGroupNCCL.Options()
        own._timeout = timeout
        backend, kind = dist.ProcessGroupNCCL(store, rank, size, own), KINDS.NCCL
    else:
        raise ArgumentError(f"{device}:{name} behind blink's device cannot be made; name it first in the string")
    backend._set_sequence_number_for_group()
    return kind, backend


class MixedGroup(BlinkGroup):
    """A group that leaves some devices to other backends."""

    def __init__(self, *arguments: Any, others: Beside) -> None:
        super().__init__(*arguments)
        self.others = others
        for device in sorted(others.devices - {"cpu"}):  # for host memory gloo is there already
            backend = others.group._get_backend(torch.device(device))
            kind = KINDS.NCCL if type(backend).__name__ == "ProcessGroupNCCL" else KINDS.GLOO
            self._register_backend(torch.device(device), kind, backend)

    def is_elsewhere(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Whether a call is of a device that another backend serves."""
        return _device((*arguments, *named.values())) in self.others.devices

    def setGroupName(self, name: str) -> None:
        """Torch's name of the group."""
        super().setGroupName(name)
        self.others.group._set_group_name(name)

    _set_group_name = setGroupName

    def shutdown(self) -> None:
        """End both."""
        super().shutdown()
        if hasattr(self.others.group, "shutdown"):
            self.others.group.shutdown()

    def abort(self) -> None:
        """End the calls of both."""
        super().abort()
        if hasattr(self.others.group, "abort"):
            self.others.group.abort()


def _device(values: Any) -> str:
    """The type of device of the first tensor, or of a barrier's options; empty if there is none."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return str(value.device.type)
        if isinstance(value, list | tuple) and (found := _device(value)):
            return found
        if isinstance(device := getattr(value, "device", None), torch.device):
            return str(device.type)
    return ""


def _by_device(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(ours)
    def method(self: MixedGroup, *arguments: Any, **named: Any) -> Any:
        if self.is_elsewhere(arguments, named):
            return getattr(self.others.group, name)(*arguments, **named)
        return ours(self, *arguments, **named)

    return method


_NAMES = {name for name, value in vars(TensorCollectives).items() if inspect.isfunction(value)} & {
    *dir(dist.ProcessGroup)
}
for _name in sorted(_NAMES.difference(("_start_coalescing", "_end_coalescing")) | {"send", "recv", "recv_anysource"}):
    setattr(MixedGroup, _name, _by_device(_name, getattr(BlinkGroup, _name)))
