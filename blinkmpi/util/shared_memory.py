"""Memory that the processes of one machine share: a file in /dev/shm that is unlinked at once.

The file system gives such a file its pages when they are first touched, and a process that touches one when none is
left dies of SIGBUS. So every rank reserves its part beforehand (``posix_fallocate``): that fails with an error instead,
and puts the pages near the processor of the rank that uses them.
"""

import errno
import mmap
import os
import tempfile
from collections.abc import Sequence

from ..errors import TopologyError
from .together import Comm, Failure, agree, allgather, attempt, failure_of, from_root

SHM, PREFIX = "/dev/shm", "blinkmpi-"
NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)


def shared_memory(node: Comm, nbytes: int, parts: Sequence[tuple[int, int]]) -> mmap.mmap | None:
    """Map ``nbytes`` of zeros that all ranks of ``node`` share; collective. None on every rank if there is no room.

    Args:
        node: ranks of one machine.
        parts: (offset, length) of what this rank reserves; together the ranks reserve all that they use.

    Raises:
        TopologyError: on every rank, if some rank cannot make or open the file.
    """
    path = from_root(node, lambda: _file(nbytes), str, error=TopologyError)
    own = attempt(lambda: _mapped(path, nbytes, parts))
    found = allgather(node, (failure_of(own), own is None), tuple[Failure | None, bool])
    if node.rank == 0:
        os.unlink(path)
    agree([failure for failure, _ in found], own, error=TopologyError)
    if not any(full for _, full in found):
        return own if isinstance(own, mmap.mmap) else None
    if isinstance(own, mmap.mmap):
        own.close()
    return None


def _file(nbytes: int) -> str:
    file, path = tempfile.mkstemp(prefix=PREFIX, dir=SHM)
    try:
        os.ftruncate(file, nbytes)
    finally:
        os.close(file)
    return path


def _mapped(path: str, nbytes: int, parts: Sequence[tuple[int, int]]) -> mmap.mmap | None:
    file = os.open(path, os.O_RDWR)
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
