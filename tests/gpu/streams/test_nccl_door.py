"""A plain torch program with backend ``nccl`` whose calls the door makes: results, graphs and losses as by NCCL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.nccl_door import COLLECTIVES, started
from blinkmpi.nccl.table import read
from tests.gpu.helpers import at_least
from tests.harness import ENVIRONMENT, ROOT, mpirun

BUDGET_S = 90.0

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, at_least(2)]


def test_an_unchanged_program_under_the_door() -> None:
    plain, why = started(2, BUDGET_S, with_door=False, quick=True)
    assert not why
    found, why = started(2, BUDGET_S, with_door=True, quick=True)
    assert not why
    assert found["first_ours"], found["communicators"]
    wrong = [row for row in found["rows"] if row["wrong"] or row["graph_wrong"]]
    assert not wrong
    assert found["losses"] == plain["losses"], "two ranks' sums do not depend on their order"
    assert found["ours_in_training"] > 0
    ours = {row["collective"] for row in found["rows"] if row["ours"] == row["checked"]}
    assert ours >= set(COLLECTIVES) - {"all_to_all"}, found["not_ours"]  # which some versions of torch send in pieces


def test_calls_are_timed_beside_nccls_and_the_table_is_kept(tmp_path: Path) -> None:
    kept = tmp_path / "table.json"
    words = [mpirun(), "-np", "2", "--oversubscribe", sys.executable, "-m", "blinkmpi", "tune", "--beside", "nccl"]
    words += ["allreduce", "broadcast", "-b", "1K", "-e", "8K", "-o", str(kept)]
    env = {"NCCL_NVLS_ENABLE": "0", **os.environ, **ENVIRONMENT}
    done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, timeout=BUDGET_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" times as fast at least") == 2 * 2 * 4
    table = read(kept)
    assert table is not None
    assert (table.ranks, table.collectives) == (2, ("allreduce", "broadcast"))
    assert table.why_stale(table.nccl, {"NCCL_NVLS_ENABLE": env["NCCL_NVLS_ENABLE"]}, table.kernels) == ""
