"""Which calls are ours because they are faster than NCCL's: rows that ``blinkmpi tune --beside nccl`` has measured.

A file holds them for one kind of machine (name, number and links of the GPUs), one version and setting of NCCL, and one
version of our kernels. Where any of these is another, no call is ours, unless ``BLINKMPI_NCCL`` says which are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from ..errors import FormatError
from ..planning import tuned_table
from ..topology.model import Topology
from ..util.cache_folder import kept_document
from ..util.codec import Document, Value

FORMAT_VERSION = 1
FASTER = 1.03  # NCCL's time over ours, at least
DTYPES = {4: "float32", 2: "bfloat16"}  # by bytes of an element: what is measured, and stands for others of the size
PASSING = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")  # which change no time


class Measured(Value, frozen=True):
    """Seconds of a call of ``nbytes`` bytes (of the longer buffer): ours and NCCL's, plain and in a CUDA graph."""

    collective: str
    dtype: str
    nbytes: int
    plain: tuple[float, float]
    graph: tuple[float, float]

    @property
    def gain(self) -> float:
        """NCCL's time over ours, where that is less."""
        return min(self.plain[1] / self.plain[0], self.graph[1] / self.graph[0])


class Faster(Value, frozen=True):
    """Calls that are ours: of more than half of ``most_bytes``, a power of two, and at most as many bytes.

    ``gain`` is NCCL's time over ours, where it is least: at both ends, plain and in a graph.
    """

    collective: str
    dtype: str
    most_bytes: int
    gain: float


class FasterTable(Document, frozen=True):
    """Rows, and what they were measured with: a date, NCCL's version and ``NCCL_`` variables, our kernels' digest.

    ``collectives`` are those that were measured, whether any row has them or none.
    """

    KIND: ClassVar = "nccl-table"
    VERSION: ClassVar = FORMAT_VERSION
    gpu: str
    ranks: int
    machine: str
    measured: str
    nccl: str
    variables: dict[str, str]
    kernels: str
    collectives: tuple[str, ...]
    rows: tuple[Faster, ...]

    def _consistent(self) -> FasterTable:
        for i, row in enumerate(self.rows):
            if row.collective not in self.collectives:
                raise FormatError(f"rows[{i}]: {row.collective} is not among collectives; measure again")
        return self

    def why_not(self, collective: str, itemsize: int, size_class: int) -> str:
        """Why calls of a kind stay NCCL's; empty where they are ours."""
        found = (collective, DTYPES.get(itemsize), 1 << size_class)
        if any((row.collective, row.dtype, row.most_bytes) == found for row in self.rows):
            return ""
        return f"not measured to be {FASTER - 1:.0%} faster than NCCL's here"

    def joined(self, newer: FasterTable) -> FasterTable:
        """A newer table, with the rows of this one for collectives that were not measured again, if these hold, too."""
        if (self.nccl, self.variables, self.kernels) != (newer.nccl, newer.variables, newer.kernels):
            return newer
        kept = tuple(row for row in self.rows if row.collective not in newer.collectives)
        names = (*self.collectives, *newer.collectives)
        return replace(newer, rows=(*kept, *newer.rows), collectives=tuple(dict.fromkeys(names)))

    def why_stale(self, nccl: str, variables: Mapping[str, str], kernels: str) -> str:
        """Why it does not hold; empty if it does.

        Args:
            nccl: the version in this process, if that is known.
        """
        if self.kernels != kernels:
            return "it was measured with other kernels of ours"
        if nccl and nccl != self.nccl:
            return f"it was measured with NCCL {self.nccl}, this is {nccl}"
        names = sorted({name for name, _ in {*self.variables.items()} ^ {*variables.items()}})
        return f"it was measured with another {names[0]}" if names else ""


def rows_of(found: Sequence[Measured]) -> tuple[Faster, ...]:
    """The rows that measurements give: of each size at which ours are faster, and at half of it if that was tried."""
    by = {(m.collective, m.dtype, m.nbytes): m.gain for m in found}
    rows = []
    for (collective, dtype, nbytes), gain in by.items():
        least = min(gain, by.get((collective, dtype, nbytes // 2), gain))
        if least >= FASTER and nbytes & (nbytes - 1) == 0:
            rows.append(Faster(collective, dtype, nbytes, round(least, 3)))
    return tuple(rows)


def file_of(folder: Path, gpu: str, machine: Topology) -> Path:
    """Where the table for a machine is kept."""
    return folder / tuned_table.file_of(folder, gpu, machine).name.replace("tuned-", "beside-nccl-", 1)


def read(path: Path) -> FasterTable | None:
    """The table in a file, or None if there is no file.

    Raises:
        FormatError, SettingsError: if it cannot be read.
    """
    return kept_document(path, FasterTable)


def variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """NCCL's variables that may change its times."""
    given = os.environ if environ is None else environ
    return {name: value for name, value in sorted(given.items()) if name.startswith("NCCL_") and name not in PASSING}


class Choice(msgspec.Struct, frozen=True):
    """What rank 0 says of a communicator: its table, or why there is none that holds; neither: the user has chosen."""

    table: FasterTable | None = None
    why: str = ""
