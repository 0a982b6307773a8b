"""Run the lines with ``>>>`` of the documents and of the package's docstrings, on one rank.

``mpirun -np 1 python -m tests.unit.project.run_examples`` prints what differs; exit code 1 if something does.
"""

import doctest
import importlib
import re
import sys
from collections.abc import Iterator

from tests.harness import ROOT
from tests.tree import PACKAGE, sources

FENCE = re.compile(r"^```.*$", re.MULTILINE)  # an empty line ends what an example prints
FLAGS = doctest.ELLIPSIS


def examples() -> Iterator[doctest.DocTest]:
    """Give the examples of each page, in one namespace each, and those of each docstring."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = FENCE.sub("", path.read_text(encoding="utf-8"))
        yield doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, path.name, str(path), 0)
    for path in sources(*PACKAGE):
        if path.suffix == ".py" and ">>> " in (ROOT / path).read_text(encoding="utf-8"):
            parts = [*PACKAGE[path.parts[0]].split("."), *path.with_suffix("").parts[1:]]
            yield from doctest.DocTestFinder().find(importlib.import_module(".".join(parts)))


def main() -> int:
    """Run them all."""
    runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)
    names = set()
    for test in examples():
        if test.examples:
            names.add(test.name)
            runner.run(test)
    print(f"{runner.tries} examples of {', '.join(sorted(names))}: {runner.failures} differ")
    return 1 if runner.failures else 0


if __name__ == "__main__":
    sys.exit(main())
