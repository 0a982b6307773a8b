"""The folder where what is costly to find is kept: the compiled C executor, and what was measured."""

import os
from pathlib import Path

from ..errors import SettingsError


def cache_dir() -> Path:
    """``BLINKMPI_CACHE_DIR``, or the user's cache folder.

    Raises:
        SettingsError: for a user without a home.
    """
    own = os.environ.get("BLINKMPI_CACHE_DIR")
    if own:
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blinkmpi"
    except RuntimeError as error:
        raise SettingsError("no folder to keep files in: this user has no home; set BLINKMPI_CACHE_DIR") from error


def keep(path: Path, text: str) -> None:
    """Write a file there.

    Raises:
        SettingsError: if the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}; set BLINKMPI_CACHE_DIR") from error
