"""What the steps of calls cost on a machine, as measured, and where that is kept.

A file is for ranks on one node: for processor, cores, number of ranks, and how these execute programs. Another node's
file has another name; one that was copied from elsewhere is refused by what it says of itself.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from ..errors import FormatError, SettingsError
from ..util.cache_folder import kept_document
from ..util.codec import Document, Value
from ..util.text import brief

FORMAT_VERSION = 1
MOST_US, MOST_BYTES, MOST_RANKS = 1e12, 1 << 50, 1 << 20  # more is no measurement


class Hardware(Value, frozen=True):
    """What the costs hold for."""

    cpu: str
    cores: int
    ranks: int
    kernel: str
    executor: str

    @property
    def text(self) -> str:
        """In words."""
        return f"{self.ranks} ranks on {self.cores} cores of {self.cpu}, Linux {self.kernel}, {self.executor}"


class StepCost(Value, frozen=True):
    """Microseconds for each MiB of a stage's span: the median, and the quartiles around it.

    Steps of one kind cost something else where vectors are of another length and lie in other caches. So a cost is that
    of a ``collective`` whose largest buffer has ``nbytes``.
    """

    collective: str
    in_place: bool
    nbytes: int
    kind: str
    us: float
    low_us: float
    high_us: float


class StepRates(Document, frozen=True):
    """All costs of some ranks. ``meeting_us``: a call without data, in which the ranks only meet."""

    KIND: ClassVar = "steps"
    VERSION: ClassVar = FORMAT_VERSION
    hardware: Hardware
    measured: str
    meeting_us: float
    costs: tuple[StepCost, ...]

    def _consistent(self) -> StepRates:
        numbers = [self.meeting_us, *(x for c in self.costs for x in (c.us, c.low_us, c.high_us))]
        if not all(0 <= x <= MOST_US for x in numbers):  # which no NaN is
            raise FormatError(f"a cost is no time of at most {MOST_US:.0e} us; measure again with blinkmpi tune")
        if not all(1 <= c.nbytes <= MOST_BYTES for c in self.costs) or self.hardware.ranks > MOST_RANKS:
            raise FormatError("no vector has so many bytes, or no job so many ranks; measure again with blinkmpi tune")
        return self

    def cost(self, collective: str, nbytes: int, kind: str, *, in_place: bool) -> float | None:
        """Microseconds for each MiB of a stage: between the lengths that were measured, or at the nearest.

        That of another collective where this one was not measured; None where nothing has steps of this kind.
        """
        same = [c for c in self.costs if c.kind == kind]
        for matching in (
            [c for c in same if (c.collective, c.in_place) == (collective, in_place)],
            [c for c in same if c.collective == collective],
            same,
        ):
            if matching:
                lengths, us = zip(*sorted((math.log(c.nbytes), c.us) for c in matching), strict=True)
                return float(np.interp(math.log(max(1, nbytes)), lengths, us))
        return None

    def fastest_pass(self, nbytes: int) -> float | None:
        """The least microseconds for each MiB that a step needs for one operand, in vectors of about so many bytes."""
        near = [c for c in self.costs if c.us and nbytes / 2 < c.nbytes < nbytes * 2 and _operands(c.kind)]
        moved = [c for c in near if not (c.in_place and c.kind.startswith("own >"))]  # which moves nothing
        return min((c.us / _operands(c.kind) for c in moved), default=None)

    def beside(self, more: StepRates) -> StepRates:
        """With the costs of ``more`` for kinds, lengths and places that this one has none of."""
        have = {(c.collective, c.in_place, c.nbytes, c.kind) for c in self.costs}
        new = [c for c in more.costs if (c.collective, c.in_place, c.nbytes, c.kind) not in have]
        return msgspec.structs.replace(self, costs=(*self.costs, *new))

    def joined(self, newer: StepRates) -> StepRates:
        """With the costs of ``newer`` in place of those of the same collectives."""
        names = {c.collective for c in newer.costs}
        costs = (*(c for c in self.costs if c.collective not in names), *newer.costs)
        return msgspec.structs.replace(newer, costs=costs)


def _operands(kind: str) -> int:
    """How many operands a step of a kind takes."""
    names = kind.rpartition(": ")[2].partition(" > ")[0].split("+")
    return sum(int("".join(filter(str.isdigit, name)) or 1) for name in names)


def hardware_of(ranks: int, executor: str) -> Hardware:
    """That of this process, which is one of so many ranks on its node."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Hardware(_cpu(), cores, ranks, platform.release(), executor)


def _cpu() -> str:
    try:
        found = re.search(r"^(?:model name|CPU part)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.M)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def file_of(folder: Path, hardware: Hardware) -> Path:
    """Where the costs for some ranks are kept."""
    digest = hashlib.sha256(msgspec.json.encode(hardware)).hexdigest()[:12]
    return folder / f"steps-cpu-x{hardware.ranks}-{digest}.json"


def read(path: Path, hardware: Hardware) -> StepRates | None:
    """The costs in a file, or None if there is no file.

    Raises:
        FormatError, SettingsError: if it cannot be read, or was measured elsewhere.
    """
    found = kept_document(path, StepRates)
    if found is not None and found.hardware != hardware:
        raise SettingsError(
            f"{brief(str(path))} was measured with {brief(found.hardware.text)}, and this is {hardware.text}; "
            "remove it, and measure here with blinkmpi tune"
        )
    return found
