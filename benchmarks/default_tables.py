"""Make default rows of the selection table (``blinkmpi/planning/tables``) from a table that ``blinkmpi tune`` measured.

    python benchmarks/default_tables.py benchmarks/tables/tuned-NVIDIA-H200-x4-4b050a2b8e1b.json nvlink-x4 [--write]

prints, for each collective and size from 1 KiB to 1 GiB, where the measured rows differ from those that are shipped
under the name, and with ``--write`` puts them in their place. Rows of the scheme ``hybrid`` are left out, because they
load the path through the host beside NVLink; what ran before goes on there. It is no way to write ``nvlink-x8``, which
has no packets.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from msgspec.structs import replace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from blinkmpi.planning.plan import Rule  # noqa: E402
from blinkmpi.planning.tuned_table import TunedTable  # noqa: E402
from blinkmpi.util.text import size_text  # noqa: E402

TABLES = ROOT / "blinkmpi/planning/tables"
TRIED = "default: from trials on one machine"
SIZES = tuple(1 << k for k in range(10, 31))


def default_of(tuned: TunedTable) -> TunedTable:
    """The measured rows as defaults: of schemes that every plan has, each row from where the one before ends."""
    rules: list[Rule] = []
    for _, some in groupby(tuned.rules, key=lambda row: (row.collective, row.registered, row.widened)):
        before: Rule | None = None
        for row in some:
            if row.scheme == "hybrid" or row.scheme.startswith("lang:"):
                continue
            kept = replace(row, reason=TRIED, min_bytes=row.min_bytes if before else 0)
            if before is None or replace(before, min_bytes=kept.min_bytes) != kept:
                rules.append(kept)
            before = kept
    return replace(tuned, rules=tuple(rules), algorithms=(), kernels="")


def row_at(table: TunedTable, kind: tuple[str, bool, bool], nbytes: int) -> Rule | None:
    """The row for so many bytes of a kind: collective, registered, widened."""
    rows = [r for r in table.rules if (r.collective, r.registered, r.widened) == kind and r.min_bytes <= nbytes]
    return max(rows, key=lambda r: r.min_bytes, default=None)


def differences(one: TunedTable, other: TunedTable) -> Iterator[str]:
    """A line for each kind and size whose rows say something else."""
    for kind in sorted({(r.collective, r.registered, r.widened) for r in (*one.rules, *other.rules)}):
        for nbytes in SIZES:
            texts = [text_of(row_at(table, kind, nbytes)) for table in (one, other)]
            if texts[0] != texts[1]:
                what = f"{kind[0]}{', registered' * kind[1]}{', widened' * kind[2]}"
                yield f"{what} of {size_text(nbytes)}: {texts[0]} -> {texts[1]}"


def text_of(row: Rule | None) -> str:
    """What a row says, but for where it begins and why."""
    if row is None:
        return "none"
    ctas = f", {row.ctas} CTAs" if row.ctas else ""
    chunk = f", {size_text(row.chunk_bytes)}" if row.protocol in ("slots", "rs_ag") else ""
    return f"{row.scheme} by {row.protocol}{chunk}{ctas}"


def main() -> None:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tuned", type=Path, help="what blinkmpi tune has written")
    parser.add_argument("name", help="of the shipped table: nvlink-x4, say")
    parser.add_argument("--write", action="store_true", help="put the measured rows in its place")
    args = parser.parse_args()
    path = TABLES / f"{args.name}.json"
    made = default_of(TunedTable.from_json(args.tuned.read_text("utf-8"), source=str(args.tuned)))
    if path.exists():
        print(*differences(TunedTable.from_json(path.read_text("utf-8"), source=path.name), made), sep="\n")
    if args.write:
        path.write_text(made.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
