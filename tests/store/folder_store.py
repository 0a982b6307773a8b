"""A key-value store that is a folder: a file for each key, written beside it and renamed."""

import fcntl
import os
import threading
import time
from pathlib import Path
from urllib.parse import quote


class FolderStore:
    """Has the methods of ``torch.distributed.Store`` that are asked for.

    A folder that is removed is a store that has gone; one with a file ``SILENT`` does not answer.
    """

    SILENT = "silent"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, key: str, value: bytes) -> None:
        """Write bytes."""
        path = self._path(key)
        draft = path.with_name(f".{os.getpid()}.{threading.get_ident()}")
        draft.write_bytes(value)
        draft.rename(path)

    def get(self, key: str) -> bytes:
        """Read them."""
        return self._path(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        """Whether all these keys are there."""
        return all(self._path(key).exists() for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a number."""
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            value = int(self.get(key) if self.check([key]) else b"0") + amount
            self.set(key, b"%d" % value)
            return value

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it was there."""
        path = self._path(key)
        there = path.exists()
        path.unlink(missing_ok=True)
        return there

    def names(self) -> list[str]:
        """All keys that are there."""
        return sorted(p.name for p in self.folder.iterdir() if not p.name.startswith("."))

    def _path(self, key: str) -> Path:
        while (self.folder / f".{self.SILENT}").exists():
            time.sleep(0.01)
        os.stat(self.folder)  # an error if it has gone
        return self.folder / quote(key, safe="")
