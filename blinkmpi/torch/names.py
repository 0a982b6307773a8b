"""Programs that name another backend of ``torch.distributed``: they get blink, and are told the name they asked for.

``blinkmpi run --backend-for gloo,nccl`` does this before the program begins. ``init_process_group`` and ``new_group``
then make groups of backend blink where one of these names is asked for, or none and torch would take one of them.
``get_backend`` gives the name that was asked for, by which frameworks choose where tensors have to lie.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from inspect import BoundArguments, signature
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ArgumentError
from ..runtime.foreign import all_imported
from ..util.text import quoted

KNOWN = ("gloo", "nccl", "mpi")  # torch's own
USUAL = {"cpu": "gloo", "cuda": "nccl"}  # what torch takes by itself, by device
BLINK, UNNAMED = "blink", "undefined"  # the latter is what torch calls its own choice


def serve(names: Sequence[str]) -> None:
    """Make groups of backend blink from now on where one of these names is asked for; once in a process.

    Modules that have imported torch's functions by name get the new ones, too.

    Raises:
        ArgumentError: for a name that is none of torch's.
    """
    unknown = [name for name in names if name not in KNOWN]
    if unknown or not names:
        said = ", ".join(map(quoted, unknown)) or "no name"
        raise ArgumentError(f"--backend-for: {said}; name backends of torch.distributed: {', '.join(KNOWN)}")
    renamed = Renamed(names)
    for name, make in (("init_process_group", renamed.init), ("new_group", renamed.group)):
        original = getattr(dist.distributed_c10d, name)
        replacement = wraps(original)(partial(make, original))
        for module in all_imported():
            if vars(module).get(name) is original:
                setattr(module, name, replacement)


class Renamed:
    """What torch's two functions do instead.

    Args:
        names: that blink is taken for.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._default: tuple[str, str] | None = None  # the default group's: what was asked for, and what was taken

    def init(self, original: Callable[..., None], *args: Any, **keywords: Any) -> None:
        """``init_process_group``."""
        bound = signature(original).bind(*args, **keywords)
        asked = bound.arguments.get("backend")
        taken = backend_for(asked, self._names, cuda=torch.cuda.is_available())
        self._default = None if taken is None else (str(asked or UNNAMED).lower(), taken)
        _take(bound, taken)
        original(*bound.args, **bound.kwargs)
        if self._default is not None:
            _tell(dist.group.WORLD, self._default[0])

    def group(self, original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """``new_group``, which is as the default group where no backend is named."""
        bound = signature(original).bind(*args, **keywords)
        asked = bound.arguments.get("backend")
        if asked:
            taken = backend_for(asked, self._names, cuda=torch.cuda.is_available())
            told = str(asked).lower()
        else:
            told, taken = self._default or ("", None)
        _take(bound, taken)
        made = original(*bound.args, **bound.kwargs)
        if taken is not None:
            _tell(made, told)
        return made


def backend_for(asked: Any, names: Sequence[str], *, cuda: bool) -> str | None:
    """The backend to take where one is asked for: blink, or devices with theirs; None to leave it to torch.

    Args:
        asked: as torch takes it: a name, ``device:name`` pairs, or None for torch's own choice.
        names: that blink is taken for.
        cuda: whether there is a GPU.
    """
    text = str(asked or "").lower()
    if text in names:
        return BLINK
    if text in ("", UNNAMED):
        pairs: Mapping[str, str] = {device: name for device, name in USUAL.items() if cuda or device == "cpu"}
    elif ":" in text:
        pairs = dict(pair.split(":", 1) for pair in text.split(","))
    else:
        return None
    if not set(pairs.values()) & set(names):
        return None
    taken = {device: BLINK if name in names else name for device, name in pairs.items()}
    if set(taken.values()) == {BLINK} and set(taken) <= set(USUAL):
        return BLINK
    return ",".join(f"{device}:{name}" for device, name in taken.items())


def _take(bound: BoundArguments, taken: str | None) -> None:
    """Put the backend among the arguments, and leave out options that are another backend's."""
    if taken is None:
        return
    bound.arguments["backend"] = taken
    options = bound.arguments.get("pg_options")
    if options is not None and not isinstance(options, Mapping):
        bound.arguments["pg_options"] = None
        warnings.warn(f"backend blink takes no {type(options).__name__}: pg_options are left out", stacklevel=4)


def _tell(group: Any, name: str) -> None:
    """Have torch say that a group's backend has this name."""
    from .group import BlinkGroup  # and with it MPI, which a group has started by now

    if isinstance(group, BlinkGroup):
        known = dist.distributed_c10d._world.pg_map
        known[group] = (name, known[group][1])
