"""Hostfiles in the dialects of Open MPI (``node01 slots=8``) and Hydra (``node01:8``, MPICH and Intel MPI).

Both read plain names, one for each process or node; only the counts are written differently, and neither launcher reads
the other's. A single name without a count means a slot for each core to Open MPI, and one process to Hydra: ``slots``
is then None here, and the launcher decides.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from ..errors import FormatError
from ..util.codec import Value
from ..util.files import read_file
from ..util.text import brief, quoted, whole_number

Dialect = Literal["openmpi", "hydra"]

MOST_SLOTS = 1 << 16  # of a machine; more is a typing error
LONGEST_NAME = 255  # DNS
MOST_FILE_BYTES, MOST_LINES = 8 << 20, 1 << 17

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SLOTS = re.compile(r"slots\s*=\s*([0-9]+)")


class Host(Value, frozen=True):
    """One machine of a hostfile and how many processes it takes; None: the launcher's default."""

    name: str
    slots: int | None = None


def read(path: str | Path, dialect: Dialect | None = None) -> tuple[Host, ...]:
    """Read a hostfile; see :func:`parse`.

    Raises:
        FormatError: for an unreadable file too.
    """
    return parse(_text(path), dialect, source=brief(str(path)))


def read_for(path: str, dialect: Dialect) -> tuple[tuple[Host, ...], Dialect | None]:
    """The hosts of a file with the meaning that they have in ``dialect``, and the file's own dialect."""
    text = _text(path)
    hosts, old = parse(text, source=brief(path)), dialect_of(text, source=brief(path))
    return convert(hosts, old, dialect), old


def _text(path: str | Path) -> str:
    """A file's text; a FormatError if it has none."""
    try:
        return read_file(path, most=MOST_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise FormatError(f"{brief(str(path))}: cannot read the hostfile: {why}; correct path or file") from error


def parse(text: str, dialect: Dialect | None = None, *, source: str = "hostfile") -> tuple[Host, ...]:
    """Read a hostfile's text: hosts in the order of their first line, repeated names added up.

    Args:
        dialect: the dialect that the file must have; None takes that of its first count.
        source: the file's name for messages.

    Raises:
        FormatError: naming the line, for anything that the launcher would reject or misread.
    """
    counted: dict[str, int] = {}  # name -> slots of its lines with a count
    bare: dict[str, int] = {}  # name -> number of its lines without a count
    order: dict[str, None] = {}
    for where, name, slots, shown in _lines(text, source):
        if shown is not None and dialect is not None and shown != dialect:
            raise FormatError(f"{where}: {_OTHERS[dialect]}")
        dialect = shown or dialect
        order[name] = None
        if slots is None:
            bare[name] = bare.get(name, 0) + 1
        elif name in counted and dialect == "openmpi":
            raise FormatError(
                f"{where}: the slots of {name} were given before; Open MPI wants them on one line: add up"
            )
        elif name in bare and dialect == "openmpi":
            raise FormatError(f"{where}: {name} stood before without slots; Open MPI wants them on its first line")
        else:
            counted[name] = counted.get(name, 0) + slots
    if not order:
        raise FormatError(f"{source}: no host in it; write one name on a line, for example 'localhost'")
    return tuple(Host(name, _total(counted.get(name), bare.get(name, 0))) for name in order)


def write(hosts: Sequence[Host], dialect: Dialect) -> str:
    """Write a hostfile that the launcher reads as ``hosts``."""
    count = {"openmpi": " slots={}", "hydra": ":{}"}[dialect]
    return "".join(h.name + ("" if h.slots is None else count.format(h.slots)) + "\n" for h in hosts)


def dialect_of(text: str, *, source: str = "hostfile") -> Dialect | None:
    """The dialect of a hostfile's first count; None if it has only names, which both launchers read.

    Raises:
        FormatError: as :func:`parse`, for an unreadable line before that count.
    """
    return next((shown for _, _, _, shown in _lines(text, source) if shown is not None), None)


def convert(hosts: Sequence[Host], old: Dialect | None, new: Dialect) -> tuple[Host, ...]:
    """Convert hosts from dialect ``old`` (None: no line had a count) to ``new``, with the same meaning.

    A name without a count is one process for Hydra, and a slot for each core for Open MPI.

    Raises:
        FormatError: for a name without a count that Hydra cannot express.
    """
    if old is None or old == new:
        return tuple(hosts)
    for host in hosts:
        if host.slots is None and old == "openmpi":
            raise FormatError(
                f"{host.name}: no slots, which Open MPI takes for one to a core and Hydra for one; write slots=N"
            )
    return tuple(Host(h.name, 1 if h.slots is None else h.slots) for h in hosts)


_OTHERS: dict[Dialect, str] = {
    "openmpi": "Hydra's count in a file for Open MPI; write 'name slots=N'",
    "hydra": "Open MPI's slots in a file for Hydra; write 'name:N'",
}


def _lines(text: str, source: str) -> Iterator[tuple[str, str, int | None, Dialect | None]]:
    """Where each line with something in it stands, and what :func:`_line` says of it."""
    for number, raw in enumerate(text.splitlines(), start=1):
        if number > MOST_LINES:
            raise FormatError(f"{source}:{number}: expected at most {MOST_LINES} lines; write one for each machine")
        if line := raw.partition("#")[0].strip():
            where = f"{source}:{number}: {quoted(line)}"
            yield where, *_line(line, where)


def _line(line: str, where: str) -> tuple[str, int | None, Dialect | None]:
    """Name, count if there is one, and the dialect that the count shows."""
    found = _NAME.match(line)
    if found is None or len(found[0]) > LONGEST_NAME:
        raise FormatError(f"{where}: expected a host's name first; write 'node01', 'node01 slots=8' or 'node01:8'")
    name, rest = found[0], line[found.end() :]
    if not rest:
        return name, None, None
    shown: Dialect = "hydra" if rest.startswith(":") else "openmpi"
    count = re.fullmatch(r":([0-9]+)", rest) if shown == "hydra" else _SLOTS.fullmatch(rest.strip())
    if count is None or not rest.startswith((":", " ", "\t")):
        said = f"cannot read {quoted(rest.strip())}"
        raise FormatError(f"{where}: {said}; write 'name slots=8' (Open MPI) or 'name:8' (Hydra)")
    slots = whole_number(count[1])
    if slots is None or not 1 <= slots <= MOST_SLOTS:
        said = f"{brief(count[1], 40)} slots; expected at least 1, at most {MOST_SLOTS}"
        raise FormatError(f"{where}: {said}, or leave the line out")
    return name, slots, shown


def _total(counted: int | None, bare: int) -> int | None:
    """A host's slots: counts and repeated names added up; None, the launcher's default, for a single name."""
    if counted is None:
        return bare if bare > 1 else None
    return counted + bare
