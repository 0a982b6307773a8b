"""Read from the environment which machines Slurm, PBS or LSF allocated to this job.

The environment is an argument everywhere. Bracket ranges are expanded here, without scontrol.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Literal

from ..errors import ArgumentError, FormatError
from ..util.codec import Value
from ..util.text import quoted, whole_number
from .hostfile import LONGEST_NAME, MOST_SLOTS, Host, read

Scheduler = Literal["slurm", "pbs", "lsf"]

MOST = 1 << 16  # names in one list; more is a typing error
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Allocation(Value, frozen=True):
    """The machines that a scheduler allocated, in its order, with the number of processes on each."""

    scheduler: Scheduler
    hosts: tuple[Host, ...]

    @property
    def ranks(self) -> int:
        """The number of processes in all."""
        return sum(host.slots or 1 for host in self.hosts)


def scheduler_of(environ: Mapping[str, str]) -> Scheduler | None:
    """The scheduler of the job that this process runs in, if any."""
    if "SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ:
        return "slurm"
    if "PBS_JOBID" in environ:
        return "pbs"
    return "lsf" if "LSB_JOBID" in environ else None


def allocation(environ: Mapping[str, str]) -> Allocation:
    """The allocation that ``environ`` describes.

    Raises:
        ArgumentError: if there is none.
        FormatError: if it cannot be read; the message names the variable or the file and its line.
    """
    if any(name in environ for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST")):
        return Allocation("slurm", _slurm(environ))
    if "PBS_NODEFILE" in environ:
        return Allocation("pbs", _counted(environ["PBS_NODEFILE"]))
    if environ.get("LSB_MCPU_HOSTS"):
        return Allocation("lsf", _pairs(environ["LSB_MCPU_HOSTS"]))
    if "LSB_DJOB_HOSTFILE" in environ:
        return Allocation("lsf", _counted(environ["LSB_DJOB_HOSTFILE"]))
    raise ArgumentError(
        "no scheduler's job: none of SLURM_JOB_NODELIST, PBS_NODEFILE, LSB_MCPU_HOSTS, LSB_DJOB_HOSTFILE is set; "
        "start this inside a job, or give a hostfile"
    )


def nodelist(text: str, *, source: str = "SLURM_JOB_NODELIST") -> tuple[str, ...]:
    """The names that ``node[01-03,07],login`` stands for, in its order.

    Raises:
        FormatError: for unbalanced brackets, descending ranges, or invalid names.
    """
    names = []
    for word in _words(text, source):
        names += _expand(word, f"{source}: {quoted(word)}")
        if len(names) > MOST:
            raise FormatError(f"{source}: {quoted(word)}: more than {MOST} names; correct the range")
    return tuple(names)


def tasks_per_node(text: str, *, source: str = "SLURM_TASKS_PER_NODE") -> tuple[int, ...]:
    """The counts that ``2(x3),1`` stands for: 2, 2, 2, 1.

    Raises:
        FormatError: for anything else.
    """
    counts: list[int] = []
    for word in text.split(","):
        found = _TASKS.fullmatch(word.strip())
        times = int(found[2] or 1) if found else 0
        if found is None or not 1 <= int(found[1]) <= MOST_SLOTS or not 1 <= times <= MOST:
            said = f"{quoted(text)}: cannot read {quoted(word)}"
            raise FormatError(f"{source}: {said}; expected counts of 1..{MOST_SLOTS}, such as 2(x3),1")
        counts += [int(found[1])] * times
        if len(counts) > MOST:
            raise FormatError(f"{source}: {quoted(text)}: counts for more than {MOST} nodes; correct it")
    return tuple(counts)


def _slurm(environ: Mapping[str, str]) -> tuple[Host, ...]:
    variable = "SLURM_JOB_NODELIST" if "SLURM_JOB_NODELIST" in environ else "SLURM_NODELIST"
    names = nodelist(environ[variable], source=variable)
    text = environ.get("SLURM_TASKS_PER_NODE")
    if text is None:
        raise FormatError(
            f"{variable} is set and SLURM_TASKS_PER_NODE is not; expected both, as sbatch and salloc set them: "
            "give sbatch --ntasks-per-node"
        )
    counts = tasks_per_node(text)
    if len(counts) != len(names):
        raise FormatError(
            f"SLURM_TASKS_PER_NODE: {quoted(text)}: counts for {len(counts)} nodes, but {variable} "
            f"{quoted(environ[variable])} "
            f"names {len(names)}; unset what was changed by hand"
        )
    return tuple(Host(name, count) for name, count in zip(names, counts, strict=True))


def _counted(path: str) -> tuple[Host, ...]:
    """The hosts of a file with one line for every process."""
    return tuple(Host(host.name, host.slots or 1) for host in read(path))


def _pairs(text: str) -> tuple[Host, ...]:
    """The hosts of LSF's ``hostA 4 hostB 2``."""
    words = text.split()
    if not words:
        raise FormatError(f"LSB_MCPU_HOSTS: {quoted(text)}: no host in it; expected pairs of a name and a count")
    if len(words) % 2:
        alone = f"expected pairs of a name and a count; {quoted(words[-1])} stands alone"
        raise FormatError(f"LSB_MCPU_HOSTS: {quoted(text)}: {alone}")
    counts: dict[str, int] = {}
    for name, count in zip(words[::2], words[1::2], strict=True):
        number = whole_number(count)
        if not _is_name(name) or number is None or not 1 <= number <= MOST_SLOTS:
            pair = f"{quoted(name)} {quoted(count)}"
            raise FormatError(f"LSB_MCPU_HOSTS: {pair}: expected a name and a count from 1 on, at most {MOST_SLOTS}")
        counts[name] = counts.get(name, 0) + number
    return tuple(Host(name, count) for name, count in counts.items())


def _words(text: str, source: str) -> Iterator[str]:
    """Split at the commas outside brackets."""
    depth, word = 0, ""
    for letter in text.strip():
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            break
        if letter == "," and not depth:
            yield word
            word = ""
        else:
            word += letter
    if depth:
        said = f"{quoted(text)}: the brackets do not match"
        raise FormatError(f"{source}: {said}; expected a list such as node[01-03,07]")
    yield word


def _expand(word: str, where: str) -> list[str]:
    """The names of ``a[1-2]b[3,5]``, the last bracket varies fastest."""
    parts = []
    total = 1
    for i, piece in enumerate(re.split(r"[][]", word)):
        parts.append([piece] if i % 2 == 0 else list(islice(_numbers(piece, where), MOST + 1)))
        total *= len(parts[-1])
        if total > MOST:
            raise FormatError(f"{where}: more than {MOST} names; correct the range")
    if not _is_name("".join(part[0] for part in parts)):
        raise FormatError(f"{where}: no name of a machine; expected a list such as node[01-03,07]")
    return ["".join(chosen) for chosen in product(*parts)]


def _is_name(text: str) -> bool:
    return len(text) <= LONGEST_NAME and _NAME.fullmatch(text) is not None


def _numbers(piece: str, where: str) -> Iterator[str]:
    """The numbers of ``01-03,07`` with their leading zeros."""
    for word in piece.split(","):
        found = _RANGE.fullmatch(word)
        if found is None:
            raise FormatError(f"{where}: cannot read {quoted(word)} in brackets; expected 7 or 01-03")
        low, high = int(found[1]), int(found[2] or found[1])
        if not low <= high < low + MOST:
            raise FormatError(f"{where}: {quoted(word)} runs from {low} to {high}; write the smaller number first")
        yield from (str(number).zfill(len(found[1])) for number in range(low, high + 1))
