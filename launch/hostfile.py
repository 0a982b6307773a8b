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

Dialect = Literal["openmpi", "hydra"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SLOTS = re.compile(r"slots\s*=\s*(\d+)")


class Host(Value, frozen=True):
    """One machine of a hostfile and how many processes it takes; None: the launcher's default."""

    name: str
    slots: int | None = None


def read(path: str | Path, dialect: Dialect | None = None) -> tuple[Host, ...]:
    """Read a hostfile; see :func:`parse`.

    Raises:
        FormatError: for an unreadable file too.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot read the hostfile: {error}; correct the path or the file") from error
    return parse(text, dialect, source=str(path))


def read_for(path: str, dialect: Dialect) -> tuple[tuple[Host, ...], Dialect | None]:
    """The hosts of a file with the meaning that they have in ``dialect``, and the file's own dialect."""
    hosts = read(path)
    old = dialect_of(Path(path).read_text(encoding="utf-8"), source=path)
    return convert(hosts, old, dialect), old


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
        if line := raw.partition("#")[0].strip():
            where = f"{source}:{number}: {line!r}"
            yield where, *_line(line, where)


def _line(line: str, where: str) -> tuple[str, int | None, Dialect | None]:
    """Name, count if there is one, and the dialect that the count shows."""
    found = _NAME.match(line)
    if found is None:
        raise FormatError(f"{where}: expected a host's name first; write 'node01', 'node01 slots=8' or 'node01:8'")
    name, rest = found[0], line[found.end() :]
    if not rest:
        return name, None, None
    shown: Dialect = "hydra" if rest.startswith(":") else "openmpi"
    count = re.fullmatch(r":(\d+)", rest) if shown == "hydra" else _SLOTS.fullmatch(rest.strip())
    if count is None or not rest.startswith((":", " ", "\t")):
        raise FormatError(f"{where}: cannot read {rest.strip()!r}; write 'name slots=8' (Open MPI) or 'name:8' (Hydra)")
    if int(count[1]) < 1:
        raise FormatError(f"{where}: {count[1]} slots; expected at least 1, or leave the line out")
    return name, int(count[1]), shown


def _total(counted: int | None, bare: int) -> int | None:
    """A host's slots: counts and repeated names added up; None, the launcher's default, for a single name."""
    if counted is None:
        return bare if bare > 1 else None
    return counted + bare
