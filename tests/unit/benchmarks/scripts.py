"""Programs of benchmarks/ as modules."""

import importlib.util
import sys
from types import ModuleType

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
