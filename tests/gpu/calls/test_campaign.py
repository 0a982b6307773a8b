"""Half a minute of a campaign on GPUs: random calls and faults, every result checked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.helpers import at_least
from tests.harness import ROOT

pytestmark = [pytest.mark.gpu, at_least(2), pytest.mark.slow]


def test_half_a_minute_on_gpus(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.campaign", "--gpus", "--faults", "--ranks", "2", "--seconds", "30"]
    done = subprocess.run([*command, "-o", str(tmp_path / "made.json")], cwd=ROOT, capture_output=True, text=True,
                          timeout=280)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "made.json").read_text())
    assert (made["wrong"], made["hung"]) == ([], [])
    assert made["calls"] > 0, done.stdout
    assert {"cupy", "registered"} <= set(made["kinds"]["memory"])
