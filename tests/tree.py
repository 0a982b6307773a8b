"""The source files of this tree, for tests of its shape."""

import os
from collections.abc import Iterator
from pathlib import Path

from tests.harness import ROOT

PACKAGE = {
    "blinkmpi": "blinkmpi",
    "topology": "blinkmpi.topology",
    "trees": "blinkmpi.trees",
    "launch": "blinkmpi.launch",
}
OTHERS = ("tests", "benchmarks", "examples")
LANGUAGES = {
    ".py": "Python", ".c": "C", ".h": "C", ".cpp": "C++", ".cu": "CUDA", ".cuh": "CUDA", ".sh": "shell",
    ".sbatch": "shell",
}  # fmt: skip


def sources(*tops: str) -> Iterator[Path]:
    """Give every source file in these folders, by path from the root, sorted; links are not followed."""
    for top in tops:
        for folder, _, files in sorted(os.walk(ROOT / top)):
            yield from (Path(folder, f).relative_to(ROOT) for f in sorted(files) if Path(f).suffix in LANGUAGES)


def lines(path: Path) -> int:
    """Count the lines of a file of the tree."""
    return (ROOT / path).read_bytes().count(b"\n")


def total() -> str:
    """Say how long the package is, in each language, and its tests."""
    counts = dict.fromkeys(LANGUAGES.values(), 0)
    for path in sources(*PACKAGE):
        counts[LANGUAGES[path.suffix]] += lines(path)
    package = ", ".join(f"{count} {language}" for language, count in counts.items())
    return f"lines: {package}; tests {sum(map(lines, sources('tests')))}"
