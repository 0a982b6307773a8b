"""Each program of benchmarks/ says what it does when it is asked, and does nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.unit.benchmarks.scripts import BENCHMARKS

PROGRAMS = sorted(path for path in BENCHMARKS.rglob("*.py") if 'if __name__ == "__main__":' in path.read_text())


def test_there_are_some() -> None:
    assert len(PROGRAMS) > 30


@pytest.mark.long
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_help(path: Path) -> None:
    """By the file's name, but of the two that are modules by their pages."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    program = ["-m", module] if module in ("benchmarks.paper", "benchmarks.pages.made") else [str(path)]
    found = subprocess.run([sys.executable, *program, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("usage: ")
