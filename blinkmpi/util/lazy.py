"""Names that a package offers, each loaded from the module that defines it when it is first asked for (PEP 562).

A package's ``__init__`` that imports what it offers loads all of it for whoever needs one of its modules.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from ..errors import no_mpi_has_a_remedy


def lazily(
    package: str, offered: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a package's ``__getattr__`` and ``__dir__``.

    Args:
        package: its ``__name__``.
        offered: the names by the module below the package that defines them; no names for a module that is offered
            itself. No name is that of a module below the package: what it meant would depend on the order of imports.
    """
    homes = {name: module for module, names in offered.items() for name in names or (module,)}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with no_mpi_has_a_remedy():
            module = import_module(f".{homes[name]}", package)
        value = module if name == homes[name] else getattr(module, name)
        setattr(sys.modules[package], name, value)  # the next time it is there
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *homes})
