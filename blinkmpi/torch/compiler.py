"""torch.compile does not look into what compiled code calls here.

Python of ours that compiled code comes to, by way of torch's C++, would be traced otherwise, as the model's own; it is
nothing that could be compiled. What torch calls is hidden, and with it all that this calls.
"""

from typing import TypeVar

import torch
import torch.distributed as dist

from ..runtime.foreign import imported

Class = TypeVar("Class", bound=type)
DYNAMO = "torch._dynamo"  # importing it takes a second, so it is left to those who use it
_to_hide: list[type] = []


def hidden(cls: Class) -> Class:
    """A class whose methods are to be hidden."""
    _to_hide.append(cls)
    return cls


def hide() -> None:
    """Hide them at the first call after torch.compile has come into use; then do nothing."""
    if not _to_hide or imported(DYNAMO) is None:
        return
    now = _to_hide.copy()
    _to_hide.clear()
    for cls in now:
        for name, method in list(vars(cls).items()):
            is_torchs = hasattr(dist.ProcessGroup, name) or hasattr(dist._Work, name)
            if callable(method) and is_torchs and not name.startswith("__"):
                setattr(cls, name, torch.compiler.disable(method))
