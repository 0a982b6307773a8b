"""The folder as a store, which can be made to answer no more."""

import time
from pathlib import Path

from blinkmpi.transport.network import folder_store


class FolderStore(folder_store.FolderStore):
    """One with a file ``.silent`` does not answer."""

    SILENT = "silent"

    def names(self) -> list[str]:
        """All keys that are there."""
        return sorted(p.name for p in self.folder.iterdir() if not p.name.startswith("."))

    def path(self, key: str) -> Path:
        """The file of a key."""
        while (self.folder / f".{self.SILENT}").exists():
            time.sleep(0.01)
        return super().path(key)
