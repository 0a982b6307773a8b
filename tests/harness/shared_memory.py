"""Which files in /dev/shm the processes of a test have made, whatever other jobs do on the machine."""

import contextlib
import os
import secrets
import threading
from pathlib import Path

from tests.harness.jobs import Closing

SHM = Path("/dev/shm")
MARK = "BLINK_TEST_SHARED_MEMORY"
LOOK_S = 0.01  # between two looks at the names
SEARCH_S = 0.2  # between two searches for who holds the files that nobody of ours has held so far


class SharedMemoryWatch(Closing):
    """Record which new files in /dev/shm a process of this test holds, open or mapped, while it runs.

    A name alone does not say whose file it is, so a file counts as ours if it was seen in /proc/PID/maps or
    /proc/PID/fd of a process that carries our mark, which whatever is started with :attr:`environment` inherits. A new
    name is looked up at once. A file that is made and closed within a few milliseconds is not seen; those of an MPI and
    of blinkmpi stay mapped as long as the process lives.
    """

    def __init__(self) -> None:
        self.environment = {MARK: secrets.token_hex(16)}
        self._mark = f"{MARK}={self.environment[MARK]}".encode()
        self._before = names()
        self._ours: set[str] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def left(self) -> list[str]:
        """Give the files of ours that are still there, but for those that this process itself holds."""
        return sorted((self._ours & names()) - held_by(os.getpid()))

    def close(self) -> None:
        """Stop watching."""
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        known, quiet_s = self._before, 0.0
        while not self._end.wait(LOOK_S):
            found = names()
            unclear = found - self._before - self._ours
            quiet_s += LOOK_S
            if found - known or (unclear and quiet_s >= SEARCH_S):
                for pid in self._members():
                    self._ours |= unclear & held_by(pid)
                quiet_s = 0.0
            known = found

    def _members(self) -> list[int]:
        """List the live processes that carry our mark, and this one."""
        found = [os.getpid()]
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # it has ended, or is somebody else's
                continue
        return found


def names() -> set[str]:
    """List what lies in /dev/shm now."""
    return set(os.listdir(SHM))


def held_by(pid: int) -> set[str]:
    """Name the files in /dev/shm that a process has open or mapped."""
    paths = []
    with contextlib.suppress(OSError):  # it has ended
        paths += [line.partition(" /")[2] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                paths.append(os.readlink(f"/proc/{pid}/fd/{fd}").removeprefix("/"))
    folder = f"{SHM}/".removeprefix("/")
    return {path.removeprefix(folder) for path in paths if path.startswith(folder)}
