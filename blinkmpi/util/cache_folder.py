"""The folder where what is costly to find is kept: compiled code, and what was measured."""

import hashlib
import os
import stat
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


def sealed(code: bytes) -> bytes:
    """What a file of code is kept as: its digest stands behind it, where who loads it does not read."""
    return code + hashlib.sha256(code).digest()


def unsealed(kept: bytes) -> bytes | None:
    """The code of such a file; None if it was shortened or changed."""
    size = hashlib.sha256().digest_size
    code = kept[:-size]
    return code if hashlib.sha256(code).digest() == kept[-size:] else None


def why_not(path: Path) -> str:
    """Why code from this file or folder must not, or cannot, be run by the processor; empty if it may."""
    if why := why_not_trusted(path):
        return why
    return f"{path} is mounted noexec" if os.statvfs(path).f_flag & os.ST_NOEXEC else ""


def why_not_trusted(path: Path) -> str:
    """Why others may have put code into this file or folder, or it cannot be told; empty if all is well.

    Whoever can change a library can do what its user can. So it, and its folder, must be this user's or root's, and
    nobody else may write them, but for folders like /tmp whose files only their owners replace.
    """
    try:
        facts = path.stat()
    except OSError as error:
        return f"{path}: {error.strerror}"
    if facts.st_uid not in (0, os.getuid()):
        return f"{path} is another user's (uid {facts.st_uid})"
    if facts.st_mode & stat.S_IWOTH and not (stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX):
        return f"{path} can be written by everybody (chmod o-w)"
    return ""
