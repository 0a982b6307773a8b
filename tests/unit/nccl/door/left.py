"""What ranks leave in /dev/shm: pages and folders that no process is in. Those of other jobs do not count."""

import contextlib
import fcntl
import os
from pathlib import Path

from blinkmpi.transport.network.folder_store import HELD

SHM = Path("/dev/shm")


def left_behind() -> set[str]:
    """The names of pages and folders that nobody holds."""
    found = set()
    for path in SHM.glob(f"blinkmpi-nccl-{os.getuid()}-*"):
        with contextlib.suppress(OSError):  # it has gone meanwhile, or somebody holds it
            held = os.open(path / HELD if path.is_dir() else path, os.O_RDWR)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.add(path.name)
            finally:
                os.close(held)
    return found
