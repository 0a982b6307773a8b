"""Memory that the processes of one machine share: a file in /dev/shm that has no name, so that no death leaves it.

The first rank makes it (``O_TMPFILE``), the others open it through ``/proc/PID/fd``, and look whether it is that file:
what they cannot see there is not theirs to share. Ranks whose process numbers differ, as those of containers that share
/dev/shm alone, take a file with a name, which is removed as soon as all have it open.

The file system gives such a file its pages when they are first touched, and a process that touches one when none is
left dies of SIGBUS. So every rank reserves its part beforehand (``posix_fallocate``): that fails with an error instead,
and puts the pages near the processor of the rank that uses them.

A :class:`SharedFile` is such a file for many pieces of memory, which come and go: those of a communicator and of all
that are made from it. It has room for any number of them, because the file system keeps only what is reserved.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import secrets
import socket
import threading
from collections.abc import Sequence
from functools import cache

import msgspec

from ..errors import TopologyError
from .together import Comm, Failure, agree, allgather, attempt, bcast, failure_of, from_root

SHM, PREFIX = "/dev/shm", "blinkmpi-"
UNNAMED = f"{SHM}/#"  # how the links in /proc begin that lead to files without a name
NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
OPEN = os.O_RDWR | os.O_CLOEXEC
PAGE = mmap.PAGESIZE
MOST = 1 << 62  # bytes
KEEP_SIZE, PUNCH_HOLE = 1, 2  # of Linux's fallocate()


@cache
def _libc() -> ctypes.CDLL:
    """What Python has no function of."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    return libc


class NotShared(OSError):
    """Another rank's file cannot be seen from here."""


class _Place(msgspec.Struct, frozen=True):
    """Where the others find the first rank's file."""

    path: str
    device: int
    inode: int


class Mapped:
    """A piece of a file, for ``numpy.asarray``; it leaves this process's memory with the last view of it.

    Python's ``mmap`` would keep a descriptor of the file for each.
    """

    def __init__(self, file: int, at: int, nbytes: int) -> None:
        self._place, self._unmap = None, _libc().munmap
        found = _libc().mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, at)
        if found in (None, ctypes.c_void_p(-1).value):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._place = int(found), nbytes
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (found, False), "version": 3}

    def __del__(self) -> None:
        """Unmap it."""
        if self._place is not None:
            self._unmap(*self._place)


class SharedFile:
    """A file that the processes of a node share, open as long as one of them needs it; each gives out places in it.

    No place is given out twice. So whoever gives memory back late takes nobody else's.

    Args:
        file: its descriptor.
        index, among: which of how many parts of the file this process gives out places in.
    """

    def __init__(self, file: int, index: int, among: int) -> None:
        self.file = file
        each = os.fstat(file).st_size // among // PAGE * PAGE
        self._next, self._end = index * each, (index + 1) * each
        self._lock = threading.Lock()

    def place(self, nbytes: int) -> int:
        """A place for so many bytes; a page behind it stays free, so that two mappings are never one.

        OSError if this process has given out all that it had.
        """
        with self._lock:  # two threads may open communicators
            at, self._next = self._next, self._next + (-(-nbytes // PAGE) + 1) * PAGE
        if self._next > self._end:
            raise OSError(errno.ENOSPC, "all places in the shared file were given out")
        return at

    def skip(self, to: int) -> None:
        """Give out no place before this one."""
        self._next = max(self._next, -(-to // PAGE) * PAGE + PAGE)

    def mapped(self, at: int, nbytes: int) -> Mapped:
        """What lies there, in this process's memory. Only what was reserved may be touched."""
        return Mapped(self.file, at, nbytes)

    def reserve(self, at: int, nbytes: int) -> bool:
        """Have pages for a piece of it; whether there is room."""
        try:
            if nbytes > 0:
                os.posix_fallocate(self.file, at, nbytes)
        except OSError as error:
            if error.errno in NO_ROOM:
                return False
            raise
        return True

    def give_back(self, at: int, nbytes: int) -> None:
        """Free the pages of a piece, whoever has it mapped."""
        punched = _libc().fallocate(self.file, KEEP_SIZE | PUNCH_HOLE, at, nbytes)
        if punched:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot give back shared memory: {os.strerror(number)}")

    def __del__(self) -> None:
        """Close it."""
        os.close(self.file)


def longest() -> int:
    """Bytes of a file that holds many pieces of memory: as many as there may be, of which few are there."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return MOST if limit == resource.RLIM_INFINITY else min(limit, MOST)


def shared_memory(node: Comm, nbytes: int, parts: Sequence[tuple[int, int]]) -> mmap.mmap | None:
    """Map ``nbytes`` of zeros that all ranks of ``node`` share; collective. None on every rank if there is no room.

    Args:
        node: ranks of one machine.
        parts: (offset, length) of what this rank reserves; together the ranks reserve all that they use.

    Raises:
        TopologyError: on every rank, if some rank cannot make or open the file.
    """
    file = shared_file(node, nbytes)
    own = file if isinstance(file, OSError) else attempt(lambda: _mapped(file, nbytes, parts))
    found = allgather(node, (failure_of(own), own is None), tuple[Failure | None, bool])
    agree([failure for failure, _ in found], own, error=TopologyError)
    if not any(full for _, full in found):
        return own if isinstance(own, mmap.mmap) else None
    if isinstance(own, mmap.mmap):
        own.close()
    return None


def shared_file(node: Comm, nbytes: int, *, limited: bool = True) -> int | NotShared:
    """A descriptor of a file of ``nbytes`` zeros, which all ranks of ``node`` have open; collective.

    Args:
        limited: whether it lies in /dev/shm; otherwise in memory that no file system limits (``memfd_create``).

    Returns:
        The descriptor; the error where this rank shares no memory with the first one.

    Raises:
        TopologyError: on every rank, if the first one cannot make the file.
    """
    made: list[int] = []

    def make() -> _Place:
        made.append(_unnamed(nbytes, limited))
        facts = os.fstat(made[0])
        return _Place(f"/proc/{os.getpid()}/fd/{made[0]}", facts.st_dev, facts.st_ino)

    place = from_root(node, make, _Place, error=TopologyError)
    file = made[0] if made else _opened(place.path, place)
    if not any(allgather(node, isinstance(file, OSError), bool)):
        return file
    name = f"{SHM}/{PREFIX}{secrets.token_hex(16)}" if made else ""
    try:
        if made:
            with contextlib.suppress(OSError):  # where files without names get none, the others do not find it
                os.link(f"/proc/self/fd/{made[0]}", name, src_dir_fd=made[0])  # which has Python call linkat()
        name = bcast(node, name, str)
        file = made[0] if made else _opened(name, place) if isinstance(file, OSError) else file
        node.Barrier()
    finally:
        if made:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
    return file


def _unnamed(nbytes: int, limited: bool) -> int:
    try:
        file = os.open(SHM, os.O_TMPFILE | OPEN, 0o600) if limited else os.memfd_create(PREFIX, os.MFD_CLOEXEC)
        try:
            os.fchmod(file, 0o600)  # others could only reach memory without a file system through /proc
            os.ftruncate(file, nbytes)
        except OSError:
            os.close(file)
            raise
    except OSError as error:
        raise TopologyError(
            f"{socket.gethostname()}: ranks share memory in {SHM}, where no file can be made: {error.strerror}; "
            "mount a tmpfs there that this user may write (docker run --shm-size=1g)"
        ) from error
    return file


def _opened(path: str, place: _Place) -> int | NotShared:
    """The file of another process, if it is that."""
    try:
        file = os.open(path, OPEN)
    except OSError as error:
        return NotShared(error.errno, f"the first rank's shared memory cannot be opened here ({error.strerror})", path)
    facts = os.fstat(file)
    if (facts.st_dev, facts.st_ino) == (place.device, place.inode):
        return file
    os.close(file)
    return NotShared(errno.ESTALE, "the first rank's shared memory is another file here", path)


def _mapped(file: int, nbytes: int, parts: Sequence[tuple[int, int]]) -> mmap.mmap | None:
    try:
        for at, length in parts:
            if length > 0:
                os.posix_fallocate(file, at, length)
        return mmap.mmap(file, nbytes)
    except OSError as error:
        if error.errno in NO_ROOM:
            return None
        raise
    finally:
        os.close(file)
