"""The folder where what is costly to find is kept: compiled code, and what was measured.

Whoever can change a library can do what its user can. So what is read from there must be this user's or root's, and so
must be every folder on the way; nobody else may write any of them, but for folders like /tmp whose files only their
owners replace. A file is opened once, and what was looked at is what is read, or loaded (:func:`library`).
"""

import errno
import hashlib
import os
import stat
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from ..errors import SettingsError
from .codec import Document
from .files import MOST_BYTES, read_descriptor
from .text import brief

D = TypeVar("D", bound=Document)

WHOLE_MAP = ["0", "0", "4294967295"]  # of a process that knows all users
UNMAPPED = 65534  # how a user is called that this user namespace does not know, as root is in some containers


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


def make_folder(folder: Path) -> None:
    """Make a folder, and those on the way that are missing, for this user alone."""
    for missing in [p for p in (folder, *folder.parents) if not p.exists()][::-1]:
        missing.mkdir(mode=0o700, exist_ok=True)


def keep(path: Path, text: str) -> None:
    """Write a file there.

    Raises:
        SettingsError: if the folder cannot be written.
    """
    try:
        make_folder(path.parent)
        put(path, text.encode())
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}; set BLINKMPI_CACHE_DIR") from error


def put(path: Path, body: bytes, mode: int = 0o644) -> None:
    """Put a whole file in place, or nothing.

    Raises:
        OSError: if the folder cannot be written.
    """
    with TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        made.write_bytes(body)
        made.chmod(mode)
        os.replace(made, path)


def sealed(code: bytes) -> bytes:
    """What a file of code is kept as: its digest stands behind it, where who loads it does not read."""
    return code + hashlib.sha256(code).digest()


def unsealed(kept: bytes) -> bytes | None:
    """The code of such a file; None if it was shortened or changed."""
    size = hashlib.sha256().digest_size
    code = kept[:-size]
    return code if hashlib.sha256(code).digest() == kept[-size:] else None


def read_kept(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """A file of that folder.

    Raises:
        OSError: if it cannot be read, or others may have written it.
    """
    file = _opened(path)
    try:
        return read_descriptor(file, most)
    finally:
        os.close(file)


def kept_document(path: Path, kind: type[D]) -> D | None:
    """What was measured, from a file of that folder; None if there is no file.

    Raises:
        FormatError, SettingsError: if it cannot be read.
    """
    where = brief(str(path))
    try:
        text = read_kept(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SettingsError(f"cannot read {where}: {error.strerror}; remove it, or set BLINKMPI_CACHE_DIR") from error
    return kind.from_json(text, source=where)


@cache
def library(path: Path) -> str:
    """A path that opens the very library that was looked at here: whole, and nobody else's.

    Its descriptor stays open, for the loader tells libraries apart by their paths, too.

    Raises:
        OSError: if it is not.
    """
    file = _opened(path)
    try:
        if os.fstatvfs(file).f_flag & os.ST_NOEXEC:
            raise OSError(f"{path} is mounted noexec")
        if unsealed(read_descriptor(file, MOST_BYTES)) is None:  # the loader would die of SIGBUS in a shortened one
            raise OSError(f"{path} was shortened or changed")
    except OSError:
        os.close(file)
        raise
    return f"/proc/self/fd/{file}"


def _opened(path: Path) -> int:
    try:
        path.lstat()  # what is not there is nobody's
    except ValueError as error:
        raise OSError(errno.EINVAL, f"this is no path ({error})") from error
    if why := why_not_trusted(path.parent):
        raise PermissionError(0, why, str(path))
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    facts = os.fstat(file)
    why = _why_not(path, facts, on_the_way=False) if stat.S_ISREG(facts.st_mode) else f"{path} is no file"
    if why:
        os.close(file)
        raise PermissionError(0, why, str(path))
    return file


def why_not(folder: Path) -> str:
    """Why code from this folder must not, or cannot, be run by the processor; empty if it may."""
    if why := why_not_trusted(folder):
        return why
    return f"{folder} is mounted noexec" if os.statvfs(folder).f_flag & os.ST_NOEXEC else ""


def why_not_trusted(folder: Path) -> str:
    """Why others may have put something into this folder, or it cannot be told; empty if all is well."""
    given = Path(os.path.abspath(folder))
    for path in dict.fromkeys((given, *given.parents, *(real := Path(os.path.realpath(given))).parents, real)):
        try:
            facts = path.lstat()
        except OSError as error:
            return f"{path}: {error.strerror}"
        if why := _why_not(path, facts, on_the_way=path not in (given, real)):
            return why
    return ""


def _why_not(path: Path, facts: os.stat_result, *, on_the_way: bool) -> str:
    """Why a file, a folder or a link is not trusted.

    Args:
        on_the_way: whether it is a folder on the way, which may be an unmapped user's.
    """
    if facts.st_uid not in (0, os.getuid()) and not (on_the_way and facts.st_uid == UNMAPPED and _in_container()):
        return f"{path} is another user's (uid {facts.st_uid})"
    if stat.S_ISLNK(facts.st_mode) or (stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_ISVTX):
        return ""
    if facts.st_mode & stat.S_IWOTH:
        return f"{path} can be written by everybody (chmod o-w)"
    return f"{path} can be written by its group (chmod g-w)" if facts.st_mode & stat.S_IWGRP else ""


@cache
def _in_container() -> bool:
    """Whether this process is in a user namespace that does not know all users."""
    try:
        return Path("/proc/self/uid_map").read_text(encoding="ascii").split() != WHOLE_MAP
    except OSError:
        return False
