"""Files in Chrome's trace event format, which chrome://tracing and Perfetto (ui.perfetto.dev) open.

A file is whole JSON: whoever adds events takes its lock, and puts them before the last line. So processes add theirs
one after another, and one that dies is merely missing; what it has half written the next one removes. The first line
names the job.
Format: *Trace Event Format*, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import TraceError

END = b"\n]}\n"
LOCK_SECONDS = 20.0
HEAD_BYTES = 1024
BLOCK = 1 << 20  # bytes that are written at a time
# The number of row 0. Perfetto draws what has the number 0, or that of its process, in one row of the process.
FIRST_ROW = 100_000


def slice_text(name: str, process: int, row: int, start_us: float, us: float, args: str = "{}") -> str:
    """An event with a beginning and an end, in microseconds; ``args`` is JSON."""
    return (
        f'{{"ph":"X","name":{json.dumps(name)},"pid":{process},"tid":{FIRST_ROW + row},"ts":{start_us:.3f},'
        f'"dur":{us:.3f},"args":{args}}}'
    )


def arrow_text(which: str, label: str, process: int, row: int, at_us: float) -> str:
    """The beginning (``s``) or the end (``f``) of an arrow between the events that are at ``at_us``.

    Args:
        label: the same at both ends, and of no other arrow. The file has a number of 64 bits made of it, because
            Perfetto takes nothing else.
    """
    end = ',"bp":"e"' if which == "f" else ""
    number = hashlib.blake2b(label.encode(), digest_size=8).hexdigest()
    return (
        f'{{"ph":"{which}","name":"chunk","cat":"chunk","id":"0x{number}","pid":{process},"tid":{FIRST_ROW + row},'
        f'"ts":{at_us:.3f}{end}}}'
    )


def names_texts(process: int, name: str, rows: dict[int, str]) -> list[str]:
    """The names of a process and its rows, which stand in order of their numbers."""
    facts: list[tuple[str, int, dict[str, object]]] = [
        ("process_name", 0, {"name": name}),
        ("process_sort_index", 0, {"sort_index": process}),
    ]
    for row, text in sorted(rows.items()):
        facts += [("thread_name", row, {"name": text}), ("thread_sort_index", row, {"sort_index": row})]
    return [named_text(name, process, row, args) for name, row, args in facts]


def named_text(name: str, process: int, row: int, args: dict[str, object]) -> str:
    """An event that says something of a process or of a row."""
    return json.dumps({"ph": "M", "name": name, "pid": process, "tid": FIRST_ROW + row, "args": args})


def beginning(job: str, about: str) -> bytes:
    """The first line of a file."""
    head = {"job": job, "about": about}
    return f'{{"displayTimeUnit": "ns", "otherData": {json.dumps(head)}, "traceEvents": ['.encode()


def create(path: str | Path, job: str, about: str = "") -> None:
    """Make a file without events, in place of what may be there.

    Raises:
        TraceError: if it cannot be written.
    """
    made = Path(f"{path}.{os.getpid()}.new")
    with _errors(path):
        try:
            made.write_bytes(beginning(job, about) + END)
            os.replace(made, path)
        finally:
            made.unlink(missing_ok=True)


def job_of(path: str | Path) -> str:
    """The job that a file is of; "" for one that is of none, or is not there."""
    try:
        with open(path, "rb") as file:
            return _job(file.fileno())
    except OSError:
        return ""


def add(path: str | Path, job: str, events: Iterable[str], about: str = "") -> Path:
    """Add events to the file of a job, and return which one it is.

    Where ``path`` is another job's by now, the job has one of its own beside it, with its name in it.

    Raises:
        TraceError: if they cannot be written; the file is as it was.
    """
    wanted = Path(path)
    with _errors(wanted):
        file = os.open(wanted, os.O_RDWR | os.O_CLOEXEC) if wanted.exists() else -1
    try:
        if file >= 0:
            with _errors(wanted):
                _lock(file, wanted)
            if _job(file) == job:
                _append(file, wanted, events)
                return wanted
    finally:
        if file >= 0:
            os.close(file)
    own = wanted.with_name(f"{wanted.stem}.{job}{wanted.suffix}")
    with _errors(own):
        file = os.open(own, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with _errors(own):
            _lock(file, own)
            if not os.fstat(file).st_size:
                _write(file, beginning(job, about) + END, 0)
        _append(file, own, events)
    finally:
        os.close(file)
    return own


def _append(file: int, path: Path, events: Iterable[str]) -> None:
    at = size = _end_of(file)
    first = os.pread(file, 1, size - 1) == b"["
    with _errors(path):
        try:
            for block in _blocks(events):
                text = (b"\n" if first else b",\n") + block
                _write(file, text + END, at)  # whole after each write, however its writer ends
                at, first = at + len(text), False
        except OSError:
            os.ftruncate(file, size)
            _write(file, END, size)
            raise


def _end_of(file: int) -> int:
    """Where the last line begins, or should, where a process has died while it wrote: behind its last whole event."""
    size = os.fstat(file).st_size
    end = size - len(END)
    if os.pread(file, len(END), end) == END:
        return end
    at = max(0, size - 2 * BLOCK)
    found = os.pread(file, size - at, at).rpartition(b"\n")[0]
    return at + len(found.removesuffix(b","))


def _blocks(events: Iterable[str]) -> Iterator[bytes]:
    held: list[str] = []
    length = 0
    for event in events:
        held.append(event)
        length += len(event)
        if length > BLOCK:
            yield ",\n".join(held).encode()
            held, length = [], 0
    if held:
        yield ",\n".join(held).encode()


def _write(file: int, text: bytes, at: int) -> None:
    done = 0
    while done < len(text):
        done += os.pwrite(file, text[done:], at + done)


def _job(file: int) -> str:
    line = os.pread(file, HEAD_BYTES, 0).partition(b"\n")[0]
    try:
        return str(json.loads(line + b"]}")["otherData"]["job"])
    except (ValueError, KeyError, TypeError):
        return ""


def _lock(file: int, path: Path) -> None:
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise TraceError(
                    f"trace {str(path)!r}: another process has held its lock for {LOCK_SECONDS:g} s; look at it"
                ) from None
            time.sleep(0.005)
        else:
            return


@contextlib.contextmanager
def _errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except TraceError:
        raise
    except OSError as error:
        raise TraceError(
            f"trace {str(path)!r}: cannot write it: {error.strerror}; give a path in a folder that exists and has room"
        ) from error
