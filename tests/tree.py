"""The source files of this tree, and how long they are: ``python -m tests.tree``."""

import os
from collections import Counter
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


def languages(*tops: str) -> Counter[str]:
    """Count the lines in these folders by language."""
    found: Counter[str] = Counter()
    for path in sources(*tops):
        found[LANGUAGES[path.suffix]] += lines(path)
    return found


def report(most: int = 10) -> str:
    """Say which files and folders are the longest, and how much there is of each language."""
    files = Counter({path: lines(path) for path in sources(*PACKAGE, *OTHERS)})
    folders, modules = Counter[Path](), Counter[Path]()
    for path, length in files.items():
        folders[path.parent] += length
        modules[path.parent] += path.suffix == ".py"

    rows = ["the longest files"]
    rows += [f"{length:7}  {path}" for path, length in files.most_common(most)]
    rows += ["", "the longest folders, without those below them"]
    rows += [f"{length:7}  {folder} ({modules[folder]} modules)" for folder, length in folders.most_common(most)]
    rows += ["", "lines by language"]
    for name, tops in ("package", tuple(PACKAGE)), ("tests", ("tests",)):
        counts = languages(*tops)
        each = ", ".join(f"{count} {language}" for language, count in counts.most_common())
        rows.append(f"{counts.total():7}  {name}: {each}")
    return "\n".join(rows)


if __name__ == "__main__":
    print(report())
