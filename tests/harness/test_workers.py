"""Workers of pytest-xdist that are ended by a test: the others run what is left, and the session ends."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import NEVER_S, ROOT

CONFTEST = """
import pytest

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from tests.workers import Scheduler
    return Scheduler(config, log)
"""
DIES = "import os\n" + "".join(f"def test_{i}():\n    {'os._exit(3)' if i == 4 else 'pass'}\n" for i in range(9))
PASSES = "import time\n" + "".join(f"def test_{i}():\n    time.sleep(0.05)\n" for i in range(6))


@pytest.mark.slow
def test_what_a_worker_that_dies_has_not_run_is_run_by_others(tmp_path: Path) -> None:
    """It had done whole shares before, which are not run again."""
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for i in range(6):
        (folder / f"test_{i}.py").write_text(DIES if i == 3 else PASSES)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "OMPI_", "PMIX_"))}
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder"]
    done = subprocess.run(
        [sys.executable, *words, "--import-mode=importlib", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**env, "PYTHONPATH": str(ROOT)},
        timeout=NEVER_S / 3,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"1 failed, 38 passed in", done.stdout), done.stdout
    assert "test_3.py::test_4" in done.stdout
