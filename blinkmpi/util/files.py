"""Read a file that a user names, whatever lies there: a folder, a pipe that nobody fills, or a file without end."""

import errno
import json
import os
import select
import stat
import time
from pathlib import Path
from typing import Any

from .codec import MOST_VALUES, values_in

MOST_BYTES = 64 << 20  # of a file; more is no description of a machine, no plan and no result
PIPE_SECONDS = 10.0  # that a pipe's writer may take
_BLOCK = 1 << 20


def read_file(path: str | Path, *, most: int = MOST_BYTES) -> bytes:
    """All bytes of a file, or of a pipe that somebody writes into.

    Args:
        most: bytes; a larger file is refused.

    Raises:
        OSError: with the reason as ``strerror``. Also for a path that is none, which Python calls a ValueError.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"this is no path ({error})") from error
    try:
        return read_descriptor(file, most)
    finally:
        os.close(file)


def read_descriptor(file: int, most: int) -> bytes:
    """As :func:`read_file`, of what is open."""
    facts = os.fstat(file)
    if stat.S_ISDIR(facts.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    is_file, is_pipe = stat.S_ISREG(facts.st_mode), stat.S_ISFIFO(facts.st_mode)
    found = _all_of(file, most if is_file or is_pipe else min(most, _BLOCK), facts.st_size if is_file else 0)
    if is_pipe and not found:
        raise OSError(errno.EPIPE, "nobody writes into this pipe")
    return found


def read_json(path: str | Path) -> Any:
    """The JSON in a file that is not of our value types.

    Raises:
        OSError: as :func:`read_file`. ValueError: if it is no JSON, or of more values than is read.
    """
    text = read_file(path)
    if (found := values_in(text)) > MOST_VALUES:
        raise ValueError(f"{found} values; at most {MOST_VALUES} are read")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _all_of(file: int, most: int, size: int) -> bytes:
    """Everything from here on; ``size`` is what a file says of itself, which one in /proc does not know."""
    blocks: list[bytes] = []
    end = time.monotonic() + PIPE_SECONDS
    while size <= most and (block := _block(file, max(size, _BLOCK), end)):
        blocks.append(block)
        size = max(size, sum(map(len, blocks)))
    if size > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB, and what belongs here is smaller")
    return b"".join(blocks)


def _block(file: int, size: int, end: float) -> bytes:
    """The next bytes; none at the end, also that of a pipe without a writer."""
    while True:
        try:
            return os.read(file, size)
        except BlockingIOError:
            left = end - time.monotonic()
            if left <= 0 or not select.select([file], [], [], left)[0]:
                raise OSError(errno.ETIMEDOUT, f"its writer took more than {PIPE_SECONDS:g} s") from None
