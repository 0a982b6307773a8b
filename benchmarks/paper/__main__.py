"""The figures of the Blink paper, one by one: ``python -m benchmarks.paper FIGURE``, or ``all``.

Each makes ``paper-FIGURE.json`` and pictures beside it; ``make docs`` makes the tables of docs/paper.md from them.
``--plot`` draws from the file that is there. ``training`` draws what ``benchmarks/training/figure.py`` has simulated.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.paper import chunks, dgx2, hybrid, servers, speedup, throughput, trees  # noqa: E402
from benchmarks.training import figure as training  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
FIGURES: dict[str, Any] = {f.NAME: f for f in (speedup, throughput, trees, chunks, hybrid, dgx2, servers)}


def tables(results: Path = RESULTS) -> dict[str, str]:
    """All tables of the page, from the result files."""
    found = {"paper-training": training.summary(json.loads(training.RESULT.read_text())["rows"])}
    for name, figure in FIGURES.items():
        found |= figure.tables(json.loads((results / f"paper-{name}.json").read_text()))
    return found


def main(argv: list[str] | None = None) -> int:
    """Run some figures and draw them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("figure", choices=[*FIGURES, "training", "all"], help="one of the paper's figures")
    parser.add_argument("-o", type=Path, default=RESULTS, dest="folder", metavar="FOLDER", help="benchmarks/results")
    parser.add_argument("--plot", action="store_true", help="draw from the file that is there")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, figure in FIGURES.items():
        if args.figure not in (name, "all"):
            continue
        file, start = args.folder / f"paper-{name}.json", time.perf_counter()
        if not args.plot:
            file.write_text(json.dumps(figure.run(), indent=1) + "\n")
        figure.draw(json.loads(file.read_text()), args.folder)
        print(f"{name}: {file}, {time.perf_counter() - start:.1f} s", flush=True)
    if args.figure in ("training", "all"):
        rows = json.loads(training.RESULT.read_text())["rows"]
        training.draw(rows, list(rows[0]["steps"]), args.folder / "training-sets.svg")
        print(f"training: {args.folder / 'training-sets.svg'}, from {training.RESULT.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
