"""Which GPUs of the live machine this process may take: what the environment names, else those that nobody uses.

``CUDA_VISIBLE_DEVICES`` counts first, then what Slurm gave the step or job, then NVML. Pure: the environment and the
answers of NVML are arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..errors import ArgumentError
from ..util.text import plural, quoted
from .gpu import Unknown
from .importers import parse_gpus
from .model import Device, Topology

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
SLURM = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
Users = Callable[[], Mapping[str, int | Unknown]]  # processes on each GPU, by PCI id


class Available(NamedTuple):
    """Ranks of the machine, ascending, and what says that they are available."""

    ranks: tuple[int, ...]
    why: str


def available(topology: Topology, environ: Mapping[str, str], users: Users) -> Available:
    """The GPUs that this process may take.

    Args:
        topology: all GPUs that NVML shows, in its order.
        users: asks NVML; called only where the environment does not say.

    Raises:
        ArgumentError: for a variable that cannot be read or names what is not there, or if nothing is left.
    """
    devices = topology.devices
    if VISIBLE in environ:
        return Available(_visible(devices, environ), f"{VISIBLE}={environ[VISIBLE]}")
    for name in SLURM:
        if environ.get(name):
            return Available(_slurm(devices, name, environ[name]), f"{name}={environ[name]}")
    return _unused(devices, users())


def _visible(devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[int, ...]:
    """CUDA's list ends at the first -1; numbers are in PCI's order, UUIDs may be shortened."""
    text = environ[VISIBLE]
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    words = words[: words.index("-1")] if "-1" in words else words
    if not words:
        raise _wrong(VISIBLE, text, "no GPU is visible")
    found = []
    for word in words:
        if word.startswith("GPU-"):
            like = [r for r, device in enumerate(devices) if device.uuid.startswith(word)]
            if len(like) != 1:
                raise _wrong(VISIBLE, text, f"{plural(len(like), 'GPU')} of this machine begin with {quoted(word)}")
            found += like
        else:
            if environ.get(ORDER) != "PCI_BUS_ID" and len({device.name for device in devices}) > 1:
                raise _wrong(VISIBLE, text, f"CUDA numbers unlike GPUs by their speed unless {ORDER}=PCI_BUS_ID is set")
            found.append(_number(VISIBLE, text, word, len(devices)))
    return _different(VISIBLE, text, found)


def _slurm(devices: Sequence[Device], name: str, text: str) -> tuple[int, ...]:
    """Slurm's numbers are the node's; where it hides all other GPUs, as many are left as it names."""
    try:
        numbers = parse_gpus(text)
    except ValueError as error:
        raise _wrong(name, text, "it is no list of numbers") from error
    if len(set(numbers)) == len(devices):
        return tuple(range(len(devices)))
    return _different(name, text, [_number(name, text, str(number), len(devices)) for number in numbers])


def _unused(devices: Sequence[Device], users: Mapping[str, int | Unknown]) -> Available:
    """The GPUs on which no process runs."""
    told = [users.get(device.bus, Unknown("NVML does not show it")) for device in devices]
    free = tuple(r for r, number in enumerate(told) if number == 0)
    reasons = sorted({number.reason for number in told if isinstance(number, Unknown)})
    busy = sum(isinstance(number, int) and number > 0 for number in told)
    if not free:
        why = f"{busy} of {len(devices)} are in use"
        if reasons:
            why += f", and of {len(devices) - busy} it is not known ({'; '.join(reasons)})"
        raise ArgumentError(f"no GPU of this machine is known to be free: {why}; say with --from which to consider")
    why = f"no process runs on {len(free)} of {len(devices)} GPUs, says NVML"
    if reasons:
        why += f"; {len(devices) - len(free) - busy} left out: {'; '.join(reasons)}"
    return Available(free, why)


def _number(name: str, text: str, word: str, count: int) -> int:
    if not (word.isascii() and word.isdigit() and len(word) < 7 and int(word) < count):
        raise _wrong(name, text, f"there is no GPU {quoted(word)}, expected 0..{count - 1}")
    return int(word)


def _different(name: str, text: str, ranks: Sequence[int]) -> tuple[int, ...]:
    if len(set(ranks)) < len(ranks):
        raise _wrong(name, text, "it names a GPU twice")
    return tuple(sorted(ranks))


def _wrong(name: str, text: str, why: str) -> ArgumentError:
    return ArgumentError(f"{name}={quoted(text)}: {why}; correct it, or say with --from which GPUs to consider")
