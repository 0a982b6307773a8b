"""A key-value store that is a folder, for processes of one machine: a file for each key, written beside it and renamed.

``shared_folder`` makes such a folder among processes that know its path, and removes it with the last of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from ...errors import PeerLost

HELD = ".held"  # a file that each process of the folder has locked
TRIES, PAUSE_S = 1000, 1e-3


class FolderStore:
    """Has the methods of ``torch.distributed.Store`` that are asked for; OSError where the folder has gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, key: str, value: bytes) -> None:
        """Write bytes."""
        path = self.path(key)
        draft = path.with_name(f".{os.getpid()}.{threading.get_ident()}")
        draft.write_bytes(value)
        draft.rename(path)

    def get(self, key: str) -> bytes:
        """Read them."""
        return self.path(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        """Whether all these keys are there."""
        return all(self.path(key).exists() for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins with 0; returns the sum."""
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            value = int(self.get(key) if self.check([key]) else b"0") + amount
            self.set(key, b"%d" % value)
            return value

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it was there."""
        path = self.path(key)
        there = path.exists()
        path.unlink(missing_ok=True)
        return there

    def path(self, key: str) -> Path:
        """The file of a key.

        Raises:
            OSError: if the folder has gone.
        """
        os.stat(self.folder)
        return self.folder / quote(key, safe="")


@contextlib.contextmanager
def shared_folder(folder: Path) -> Iterator[FolderStore]:
    """A store in a folder that several processes enter by its path, each in its time; the last that leaves removes it.

    What processes leave that were killed, :func:`sweep` removes.

    Raises:
        PeerLost: if the folder cannot be made, or is another user's.
    """
    held = _hold(folder)
    try:
        yield FolderStore(folder)
    finally:
        _remove_if_alone(folder, held)
        os.close(held)


def sweep(parent: Path, pattern: str) -> None:
    """Remove those folders of this user, by a pattern of their names, that no process is in."""
    for folder in parent.glob(pattern):
        with contextlib.suppress(OSError):  # another process may remove it at this moment
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            if not (folder / HELD).exists():
                folder.rmdir()  # if it is empty: of a process that ended as it made it
                continue
            held = os.open(folder / HELD, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _remove_if_alone(folder, held)
            finally:
                os.close(held)


def _hold(folder: Path) -> int:
    """Enter a folder, made if need be: a descriptor whose lock says that this process is in it."""
    for _ in range(TRIES):
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            facts = folder.lstat()
            if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
                raise PeerLost(f"{folder} is not this user's alone; remove it")
            held = os.open(folder / HELD, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except (FileNotFoundError, NotADirectoryError):  # somebody has just removed it
            continue
        except OSError as error:
            raise PeerLost(f"cannot enter {folder}: {error.strerror}; see what is in /dev/shm") from error
        try:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if _is_held_in(folder, held):
                return held
        except BlockingIOError:  # somebody sees whether it is alone
            pass
        os.close(held)
        time.sleep(PAUSE_S)
    raise PeerLost(f"cannot enter {folder}: other processes remove it again and again")


def _remove_if_alone(folder: Path, held: int) -> None:
    """Remove a folder if no other process is in it. Of two that ask at once one gets the answer yes."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    if not _is_held_in(folder, held):
        return
    # It leaves its name first: whoever comes now makes another one, and nothing of that one is removed here.
    going = folder.with_name(f"{folder.stem}.{os.getpid()}.{threading.get_ident()}{folder.suffix}")
    with contextlib.suppress(OSError):  # what stays, another process sweeps
        folder.rename(going)
        for path in going.iterdir():
            if path.name != HELD:
                path.unlink()
        (going / HELD).unlink()  # the last, as sweep() looks for it
        going.rmdir()


def _is_held_in(folder: Path, held: int) -> bool:
    """Whether the file that is held is the one that a folder of this name has now."""
    try:
        return os.path.samestat(os.fstat(held), os.lstat(folder / HELD))
    except (FileNotFoundError, NotADirectoryError):
        return False
