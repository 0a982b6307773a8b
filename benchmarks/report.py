"""Write docs/performance.md from the result files: ``python benchmarks/report.py``.

The files are what ``blinkmpi bench -J`` and the programs beside this one write. Every row is shown,
also where a call goes to MPI or is slower than MPI; what a file does not hold is a dash.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks.pages import text as texts  # noqa: E402
from benchmarks.pages.certainty import certainty_file  # noqa: E402
from benchmarks.pages.gpu import emulated_file, gpu_file, gpu_summary, host_time_file, nodes_file  # noqa: E402
from benchmarks.pages.host import (  # noqa: E402
    ablation_file,
    call_cost_file,
    host_file,
    host_summary,
    several_hosts,
    small_calls_file,
    trace_file,
)
from benchmarks.pages.rows import blocks, on_gpu  # noqa: E402
from benchmarks.pages.torch import torch_group_file, training_file  # noqa: E402
from blinkmpi.bench.document import with_current_names  # noqa: E402

__all__ = ["ReportError", "blocks", "main", "read", "render"]

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
# Files that begin so hold no times of collectives: they are for other pages and for tests.
APART = ("treegen", "campaign", "choice", "message-cost", "training-sets", "torch-suite", "torch-versions", "lang",
         "paper")  # fmt: skip


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


def render(results: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """The page."""
    if not results:
        return texts.HEAD + texts.EMPTY
    kinds = (
        "emulated",
        "hosts",
        "nodes",
        "small_calls",
        "call_cost",
        "trace_cost",
        "certainty",
        "ablation",
        "host_time",
        "torch_group",
        "training",
    )
    groups: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for name, document in results:
        kind = next((kind for kind in kinds if document.get(kind)), "gpu" if on_gpu(document) else "host")
        groups.setdefault(kind, []).append((name, document))

    def section(kind: str, legend: str, of_file: Callable[[str, dict[str, Any]], str], *more: str) -> list[str]:
        found = groups.get(kind, [])
        return [legend, *more, *(of_file(name, document) for name, document in found)] if found else []

    hosts = groups.get("hosts")
    parts = [
        texts.HEAD,
        *section("host", texts.LEGEND, host_file, host_summary(groups.get("host", []))),
        texts.HOSTS,
        *(several_hosts(hosts) if hosts else ["Not measured."]),
        *section("small_calls", texts.SMALL_CALLS_LEGEND, small_calls_file),
        *section("call_cost", texts.CALL_COST_LEGEND, call_cost_file),
        *section("trace_cost", texts.TRACE_LEGEND, trace_file),
        *section("certainty", texts.CERTAINTY_LEGEND, certainty_file),
        *section("ablation", texts.ABLATION_LEGEND, ablation_file),
        *section("torch_group", texts.TORCH_LEGEND, torch_group_file),
        *section("training", texts.TRAINING_LEGEND, training_file),
        *section("gpu", texts.GPU_LEGEND, gpu_file, gpu_summary(groups.get("gpu", []))),
        *section("host_time", texts.HOST_TIME_LEGEND, host_time_file),
        *section("nodes", texts.NODES_LEGEND, nodes_file),
        *section("emulated", texts.EMULATED_LEGEND, emulated_file),
    ]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, or with ``--check`` only say whether it is up to date."""
    parser = argparse.ArgumentParser(description="Write docs/performance.md from benchmarks/results/*.json.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    args = parser.parse_args(argv)
    try:
        page = render(read(RESULTS))
    except ReportError as error:
        print(f"report: error: {error}", file=sys.stderr)
        return 2
    name = PAGE.relative_to(ROOT)
    if args.check:
        current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        print(f"{name} is {'up to date' if current == page else 'out of date: run python benchmarks/report.py'}")
        return int(current != page)
    PAGE.write_text(page, encoding="utf-8")
    print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
