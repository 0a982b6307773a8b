"""The tables of ``docs/lang.md``, from the result files.

One is of what ``simulate.py`` wrote, one of what ``measure.py`` wrote; the page of measurements has all of the latter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks.pages.rows import exact_size_text, line, ratio_text, table_head  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
SIMULATED = RESULTS / "lang-library.json"


def measured_files() -> list[Path]:
    """What ``measure.py`` wrote."""
    return sorted(RESULTS.glob("lang-measured-*.json"))


def simulated_table(document: dict[str, Any]) -> str:
    """What was simulated."""
    heads = "".join(f" {exact_size_text(nbytes)} | trees |" for nbytes in document["sizes"])
    lines = [f"| machine | algorithm |{heads} rate at {exact_size_text(document['sizes'][-1])} | bound |"]
    lines.append("|---" * (4 + 2 * len(document["sizes"])) + "|")
    for row in document["rows"]:
        cells = [row["machine"], f"`{row['algorithm']}`, {row['collective']}"]
        for size in row["sizes"]:
            cells += [time_of(size["seconds"]), f"{time_of(size['trees']['seconds'])}, {size['trees']['scheme']}"]
        cells += [f"{row['sizes'][-1]['algbw']:.3g}", f"{row['bound_gbps']:.3g}" if row["bound_gbps"] else "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def time_of(seconds: float) -> str:
    """Three digits, in a unit that fits."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def measured_table(documents: Sequence[dict[str, Any]]) -> str:
    """What was measured: times, and in brackets what the default and mpi4py take in terms of them."""
    sizes = sorted({row["size"] for document in documents for row in document["results"]})
    lines = [*table_head("ranks", "algorithm", *(f">{exact_size_text(size)}" for size in sizes))]
    for document in documents:
        ranks = document["lang_measured"]["nodes"] or str(document["blinkmpi"]["ranks"])
        for name, collective in dict.fromkeys((row["name"], row["collective"]) for row in document["results"]):
            own = {row["size"]: row for row in document["results"] if row["name"] == name}
            lines.append(line([ranks, f"`{name}`, {collective}", *(cell(own.get(size)) for size in sizes)]))
    return "\n".join(lines)


def cell(row: dict[str, Any] | None) -> str:
    """``41.5 us (0.73, 1.59)``."""
    if row is None:
        return "-"
    others = ", ".join(ratio_text(row[side]["ratio"]) for side in ("default", "mpi"))
    return f"{time_of(row['algorithm']['us'] / 1e6)} ({others})"


def tables() -> dict[str, str]:
    """Both tables by their names."""
    simulated = json.loads(SIMULATED.read_text(encoding="utf-8"))
    measured = [json.loads(path.read_text(encoding="utf-8")) for path in measured_files()]
    return {"simulated": simulated_table(simulated), "measured": measured_table(measured)}
