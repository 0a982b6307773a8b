"""Compile a library in another process, without waiting for it.

That process imports neither MPI nor torch, since it runs beside ranks of MPI.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...errors import SettingsError
from ...util.cache_folder import cache_dir, make_folder
from .native import built

CHILD = f"from {__name__} import main; main()"


def compiler(source: Path, flags: Sequence[str]) -> subprocess.Popen[str]:
    """A process that compiles, and goes on if this one ends; it prints the library's path, or fails and says why."""
    root = str(Path(__file__).resolve().parents[3])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(source), *flags], env={**os.environ, "PYTHONPATH": paths}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def main() -> None:
    """Compile the source that this process is given, with the flags behind it, alone on this machine."""
    source = Path(sys.argv[1])
    with _alone(source.stem):
        path, why = built(source, sys.argv[2:])
    if path is None:
        sys.exit(why)
    print(path)


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """While other ranks' processes wait here, and then find what this one has compiled."""
    try:
        folder = cache_dir()
        make_folder(folder)
        file = open(folder / f"{name}.lock", "w", encoding="utf-8")  # noqa: SIM115
    except (OSError, SettingsError):  # no shared place: each rank compiles for itself
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
