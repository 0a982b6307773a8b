"""Where the door comes into the Python of an unchanged program: it calls :func:`serve` in a thread of its own."""

from __future__ import annotations

import atexit
import ctypes
from pathlib import Path

from ..errors import ArgumentError


def serve(path: str) -> None:
    """Give the door that lies at a path a binder, which opens GPUs and prepares kinds of calls.

    Raises:
        ArgumentError: if the library is another version's. ImportError: if a package is missing.
    """
    from .library import door

    if Path(path).name != door().name:
        raise ArgumentError(f"{path} is not the library of this Python's blinkmpi, which is {door()}; "
                            "set LD_PRELOAD by the `blinkmpi nccl` of the program's own environment")  # fmt: skip
    from .binder import Binder
    from .opening import open_context

    library = ctypes.CDLL(path)
    binder = Binder(library, open_context)
    binder.serve()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(binder))  # for good: C uses what it has made when Python has ended
    atexit.register(library.blinkmpi_door_retire)
