"""What a process without a launcher has to tidy up itself: MPI's file of shared memory.

Open MPI 5 makes ``/dev/shm/sm_segment.HOST.UID.JOB.RANK``, 16 MiB of which little is touched, in every process. Its
launcher removes those of a job. A process that was started alone (a singleton) has none, and its file stays for ever.

Ranks of torchrun are such processes, which are also killed. On one node they connect to no other by MPI, so they make
no file. On several they do, by MPICH: its file, ``/dev/shm/mpich_shm_JOB_NODE``, is removed when all have mapped it.
"""

import atexit
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

from .launcher import launched_rank

MAPS = Path("/proc/self/maps")
SEGMENT = re.compile(
    r"[\da-f]+-[\da-f]+ \S+ \S+ ([\da-f]+):([\da-f]+) (\d+) +(/dev/shm/(?:sm_segment\.|mpich_shm_)\S+)$"
)


@contextmanager
def connecting_to_nobody() -> Iterator[None]:
    """While MPI is imported: a process without a launcher has MPI for itself alone, unless the user chose otherwise."""
    name = "OMPI_MCA_btl"
    if launched_rank(os.environ) is not None or name in os.environ:
        yield
        return
    os.environ[name] = "self"
    try:
        yield
    finally:  # child processes may begin a job of MPI's
        del os.environ[name]


@cache
def remove_segment_at_exit() -> None:
    """Remove this process's segment when Python ends, if no launcher will; registered once.

    Its memory stays mapped, so MPI_Finalize, which comes later, finds it. Whoever connects to another job does that
    through the segment's name, and has done it by then.
    """
    if launched_rank(os.environ) is None:
        atexit.register(partial(remove_segment, os.getpid()))


def remove_segment(process: int) -> None:
    """Remove the segments that this process has mapped, unless it is a child that ``process`` has forked."""
    if os.getpid() != process or not MAPS.exists():
        return
    for path in mapped_segments(MAPS.read_text().splitlines()):
        path.unlink(missing_ok=True)


def mapped_segments(maps: Iterable[str]) -> list[Path]:
    """The segments in the lines of /proc/PID/maps, where the file of that name is the one mapped, and this user's."""
    found = []
    for line in maps:
        if match := SEGMENT.match(line):
            path = Path(match[4])
            try:
                facts = path.lstat()
            except OSError:  # removed already
                continue
            mapped = os.makedev(int(match[1], 16), int(match[2], 16)), int(match[3])
            if (facts.st_dev, facts.st_ino) == mapped and facts.st_uid == os.getuid():
                found.append(path)
    return found
