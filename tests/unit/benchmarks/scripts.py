"""Programs of benchmarks/ as modules; an archive without a checkout has none."""

import importlib.util
import sys
from types import ModuleType

import pytest

from tests.harness import ROOT

BENCHMARKS = ROOT / "benchmarks"


def script(name: str) -> ModuleType:
    """Import ``benchmarks/NAME.py`` anew."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name.replace('/', '_')}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def needs(name: str) -> pytest.MarkDecorator:
    """The mark of tests of ``benchmarks/NAME.py``."""
    there = (BENCHMARKS / f"{name}.py").exists()
    return pytest.mark.skipif(not there, reason="not in a checkout: an archive has no benchmarks")
