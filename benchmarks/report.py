"""Write the README's table and what ``explain`` says of short calls: ``python benchmarks/report.py``.

The files are what ``blinkmpi bench -J`` and the programs beside this one write. The tables of docs/performance.md and
docs/measurements.md are made here, too, as the site is made (``pages/made.py``), and kept nowhere. The first page has
ratios alone, a few tables that fit on a screen; on the second every row is shown, also where a call goes to MPI or is
slower than MPI; what a file does not hold is a dash.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks.pages import overview  # noqa: E402
from benchmarks.pages import text as texts  # noqa: E402
from benchmarks.pages.certainty import certainty_file  # noqa: E402
from benchmarks.pages.gpu import (  # noqa: E402
    beside_compute_file,
    emulated_file,
    gpu_file,
    gpu_messages_file,
    gpu_summary,
    groups_file,
    host_time_file,
    nodes_file,
)
from benchmarks.pages.host import (  # noqa: E402
    ablation_file,
    call_cost_file,
    host_file,
    host_summary,
    several_hosts,
    trace_file,
)
from benchmarks.pages.lang import lang_file  # noqa: E402
from benchmarks.pages.rows import blocks  # noqa: E402
from benchmarks.pages.short_calls import call_forms_file, facts_of, small_calls_file  # noqa: E402
from benchmarks.pages.torch import fsdp_file, torch_group_file, training_file  # noqa: E402
from blinkmpi.bench.document import with_current_names  # noqa: E402

__all__ = ["ReportError", "blocks", "main", "pages", "ratio_tables", "read", "render"]

RESULTS = ROOT / "benchmarks" / "results"
README = "README.md"
MARKS = ("<!-- measured: written by benchmarks/report.py -->\n", "<!-- end of measured -->\n")
FACTS = "blinkmpi/planning/beside_mpi.json"  # what explain says of short calls
# Files that begin so hold no times of collectives: they are for other pages and for tests.
APART = ("treegen", "campaign", "choice", "message-cost", "training-sets", "torch-suite", "torch-versions",
         "lang-library", "lang-mutations", "paper", "losses", "start-cost", "clients", "graph-order",
         "torchrun", "nccl-door")  # fmt: skip


class ReportError(Exception):
    """A file is no result of ``blinkmpi bench``."""


def read(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """All results of a folder by name; a name ends in ``.json``, or in ``.json.N`` where one was not overwritten.

    Raises:
        ReportError: naming the file that cannot be read.
    """
    found = []
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.json.[0-9]*")]):
        if path.name.startswith(APART):
            continue
        try:
            document = with_current_names(json.loads(path.read_text(encoding="utf-8")))
            ours = document["blinkmpi"]
            complete = isinstance(ours["ranks"], int) and isinstance(document["results"], list)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ReportError(f"{path.name}: no result of blinkmpi bench: {error!r}; write it with -J") from error
        if not complete:
            raise ReportError(f"{path.name}: no result of blinkmpi bench; write it with -J")
        found.append((path.name, document))
    return found


def ratio_tables(results: overview.Results) -> dict[str, str]:
    """The tables of docs/performance.md by their names."""
    tables: dict[str, tuple[str, Callable[[overview.Results], Iterator[str]]]] = {
        "gpus": ("gpu", overview.gpu_tables),
        "cpu-ranks": ("host", overview.host_tables),
        "short-calls": ("small_calls", overview.small_calls_table),
        "call-forms": ("call_forms", overview.call_forms_table),
        "torch": ("torch_group", overview.torch_table),
        "training": ("training", overview.training_table),
        "predictions": ("certainty", overview.certainty_table),
    }
    groups = overview.by_kind(results)
    return {
        name: "\n".join(of(groups[kind])).replace("|\n#", "|\n\n#") if groups[kind] else texts.NOT_MEASURED
        for name, (kind, of) in tables.items()
    }


def render(results: overview.Results) -> str:
    """What docs/measurements.md shows: every row of every file."""
    if not results:
        return texts.EMPTY
    groups = overview.by_kind(results)

    def section(kind: str, legend: str, of_file: Callable[[str, dict[str, Any]], str], *more: str) -> list[str]:
        found = groups[kind]
        return [legend, *more, *(of_file(name, document) for name, document in found)] if found else []

    hosts = groups["hosts"]
    parts = [
        *section("host", texts.LEGEND, host_file, host_summary(groups["host"])),
        texts.HOSTS,
        *(several_hosts(hosts) if hosts else ["Not measured."]),
        *section("small_calls", texts.SMALL_CALLS_LEGEND, small_calls_file),
        *section("call_forms", texts.CALL_FORMS_LEGEND, call_forms_file),
        *section("call_cost", texts.CALL_COST_LEGEND, call_cost_file),
        *section("trace_cost", texts.TRACE_LEGEND, trace_file),
        *section("certainty", texts.CERTAINTY_LEGEND, certainty_file),
        *section("lang_measured", texts.LANG_LEGEND, lang_file),
        *section("ablation", texts.ABLATION_LEGEND, ablation_file),
        *section("torch_group", texts.TORCH_LEGEND, torch_group_file),
        *section("training", texts.TRAINING_LEGEND, training_file),
        *section("fsdp", texts.FSDP_LEGEND, fsdp_file),
        *section("gpu", texts.GPU_LEGEND, gpu_file, gpu_summary(groups["gpu"])),
        *section("host_time", texts.HOST_TIME_LEGEND, host_time_file),
        *section("gpu_messages", texts.GPU_MESSAGES_LEGEND, gpu_messages_file),
        *section("beside_compute", texts.BESIDE_COMPUTE_LEGEND, beside_compute_file),
        *section("groups", texts.GROUPS_LEGEND, groups_file),
        *section("nodes", texts.NODES_LEGEND, nodes_file),
        *section("emulated", texts.EMULATED_LEGEND, emulated_file),
    ]
    return joined(parts)


def joined(parts: Sequence[str]) -> str:
    """A page."""
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def pages(folder: Path) -> dict[str, str]:
    """The text of each file by its name, from the results in a folder; of the README what lies between the marks."""
    results = read(folder)
    before, rest = (ROOT / README).read_text(encoding="utf-8").split(MARKS[0])
    table = "\n".join(overview.for_readme(results))
    return {
        README: f"{before}{MARKS[0]}{table}\n{MARKS[1]}{rest.split(MARKS[1])[1]}",
        FACTS: facts_of(results),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files, or with ``--check`` only say whether they are up to date."""
    parser = argparse.ArgumentParser(description="Write what is kept of benchmarks/results/*.json elsewhere.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    args = parser.parse_args(argv)
    try:
        made = pages(RESULTS)
    except ReportError as error:
        print(f"report: error: {error}", file=sys.stderr)
        return 2
    status = 0
    for name, page in made.items():
        path = ROOT / name
        if not args.check:
            path.write_text(page, encoding="utf-8")
            print(f"wrote {name}")
            continue
        current = path.read_text(encoding="utf-8") if path.exists() else ""
        print(f"{name} is {'up to date' if current == page else 'out of date: run python benchmarks/report.py'}")
        status |= current != page
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
