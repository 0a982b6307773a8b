"""Selection tables that ``blinkmpi tune`` measured: where they are kept, and how a plan takes them.

A file holds the rows of some collectives for one kind of machine: name, number and links of the GPUs, whatever their
indices. Only rank 0 reads it; the others get the plan from rank 0. A last row without a scheme leaves longer vectors
to the plan's own rows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from ..errors import FormatError
from ..lang.algorithms import Algorithm
from ..topology.model import Topology
from ..util.cache_folder import kept_document
from ..util.codec import Document
from .plan import PACKETS, Plan, Rule
from .slots import FEW_CTAS

FORMAT_VERSION = 2
LONG_BY_FEW = ("allreduce", "reduce_scatter")  # for which slots need many CTAs


class TunedTable(Document, frozen=True):
    """Measured rows. ``measured`` is a date, ``versions`` and the digest of the ``kernels`` what with.

    ``algorithms`` are those of users that rows name, so that a later job needs no file of them.
    """

    KIND: ClassVar = "table"
    VERSION: ClassVar = FORMAT_VERSION
    gpu: str
    ranks: int
    machine: str
    measured: str
    versions: dict[str, str]
    rules: tuple[Rule, ...]
    kernels: str = ""
    algorithms: tuple[Algorithm, ...] = ()

    def _consistent(self) -> TunedTable:
        last = {r.kind: i for i, r in enumerate(self.rules)}
        for i, r in enumerate(self.rules):
            if not r.scheme and last[r.kind] != i:
                raise FormatError(f"rules[{i}], {r.collective}: only the last row may have no scheme; give it one")
        return self

    def to_json(self) -> str:
        """The portable file; each row is a line."""
        body = replace(self, rules=())
        rows = ",\n".join(f"  {msgspec.json.format(msgspec.json.encode(row), indent=0).decode()}" for row in self.rules)
        return super(TunedTable, body).to_json().replace('"rules": []', f'"rules": [\n{rows}\n ]', 1)

    def joined(self, newer: Sequence[Rule], algorithms: Sequence[Algorithm] = ()) -> TunedTable:
        """With other rows for the collectives that ``newer`` names, and of the algorithms those that rows name."""
        names = {r.collective for r in newer}
        rules = (*(r for r in self.rules if r.collective not in names), *newer)
        named = {(r.collective, r.scheme) for r in rules}
        known = [*algorithms, *(a for a in self.algorithms if a.collective not in names)]
        kept = tuple(dict.fromkeys(a for a in known if (a.collective, a.scheme) in named))
        return replace(self, rules=rules, algorithms=kept)


def file_of(folder: Path, gpu: str, machine: Topology) -> Path:
    """Where the table for a machine is kept."""
    links = sorted((k.src, k.dst, k.kind, k.lanes, k.lane_mbps) for k in machine.links)
    digest = hashlib.sha256(msgspec.json.encode(links)).hexdigest()[:12]
    return folder / f"tuned-{re.sub(r'[^A-Za-z0-9]+', '-', gpu)}-x{machine.n}-{digest}.json"


def read(path: Path) -> TunedTable | None:
    """The table in a file, or None if there is no file.

    Raises:
        FormatError, SettingsError: if it cannot be read.
    """
    return kept_document(path, TunedTable)


def taken(plan: Plan, table: TunedTable, machine: Topology, max_ctas: int = 0) -> Plan:
    """The plan with the table's rows in place of its own, for the collectives that both have.

    Args:
        max_ctas: that kernels shall have, where the table was measured with as many as there may be; 0: as many.

    Raises:
        PlanError: if a row names a scheme that the plan lacks.
    """
    names, planned = {r.collective for r in table.rules}, {r.collective for r in plan.rules}
    rules = [r for r in plan.rules if r.collective not in names]
    for row in with_few_ctas([r for r in table.rules if r.collective in planned], max_ctas):
        own = [r for r in plan.rules if r.kind == row.kind]
        rules += [row] if row.scheme else rows_from(sorted(own, key=lambda r: r.min_bytes), row.min_bytes)
    written = [a for a in table.algorithms if a.collective in planned and a.n == plan.n]
    algorithms = tuple(dict.fromkeys((*plan.algorithms, *written)))
    return replace(plan, rules=tuple(rules), algorithms=algorithms).check(machine)


def with_few_ctas(rules: Sequence[Rule], max_ctas: int) -> list[Rule]:
    """The rows for kernels of at most ``max_ctas``: between registered buffers those by ``direct`` have no more.

    With fewer than :data:`FEW_CTAS` they also carry long AllReduces and ReduceScatters, for which slots need many.
    """
    if not 0 < max_ctas < FEW_CTAS:
        return [*rules]
    kept: list[Rule] = []
    before: dict[tuple[str, int, bool], Rule] = {}  # the row for shorter vectors, of a collective, root and type
    for row in sorted(rules, key=lambda row: row.min_bytes):
        kind = row.collective, row.root, row.widened
        last = before.get(kind) if row.registered else None
        direct = last is not None and last.protocol == "direct"
        if row.registered and row.protocol == "direct":
            row = replace(row, ctas=min(row.ctas or max_ctas, max_ctas))
            if last is not None and replace(last, min_bytes=row.min_bytes) == row:
                continue
        elif direct and row.protocol not in PACKETS and row.collective in LONG_BY_FEW:
            continue
        kept.append(row)
        if row.registered:
            before[kind] = row
    return kept


def rows_from(rows: Sequence[Rule], start: int) -> list[Rule]:
    """What rows, ascending, say of vectors of so many bytes on."""
    later = [row for row in rows if row.min_bytes > start]
    first = rows[: len(rows) - len(later)][-1:]
    return [*(replace(row, min_bytes=start) for row in first), *later]
