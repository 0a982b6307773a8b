"""CuPy and torch, if the user has imported them: without that no argument can be an array of theirs.

Nothing here imports them.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

# imported("torch"): the module, or None. The dictionary's own method: each call that is not found by C asks it twice.
imported: Callable[[str], Any] = sys.modules.get

EXCHANGE = "__dlpack_c_exchange_api__"  # of torch's tensors, from DLPack 1.3 on: how C reads them

_extension: Callable[[], Any] | None = None


def all_imported() -> list[ModuleType]:
    """All modules that this process has imported so far."""
    return [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]


def read_tensors_by(extension: Callable[[], Any]) -> None:
    """Take torch_extension.cpp for C to read torch's tensors by.

    Args:
        extension: gives that module, or None while there is none.
    """
    global _extension
    _extension = extension


def tensor_reader() -> Any:
    """The module torch_extension.cpp, which only ``blinkmpi.torch`` brings; else None."""
    return None if _extension is None else _extension()
