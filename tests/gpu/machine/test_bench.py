"""``blinkmpi bench`` on GPUs, as a user starts it."""

import json
import sys
from pathlib import Path

import pytest

from tests.gpu.helpers import at_least, sizes
from tests.harness import run_command

RANKS = sizes(2, 4)[-1]

pytestmark = [pytest.mark.gpu, at_least(2)]


@pytest.mark.parametrize("graph", [0, 2])
def test_a_sweep_in_gpu_memory(graph: int, tmp_path: Path) -> None:
    words = ["all_reduce", "-b", "1K", "-e", "1M", "-f", "32", "-n", "5", "-G", str(graph), "--memory", "gpu"]
    argv = [sys.executable, "-m", "blinkmpi", "bench", *words, "-J", str(tmp_path / "found.json")]
    outcome = run_command(RANKS, argv, timeout=120)
    assert outcome.rc == 0, outcome.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["size"] for row in found["results"]] == [1 << 10, 1 << 15, 1 << 20]
    assert found["out_of_bounds"]["count"] == 0
    assert found["blinkmpi"]["memory"] == "gpu"
