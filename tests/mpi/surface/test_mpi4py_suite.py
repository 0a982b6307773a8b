"""The program that runs mpi4py's own tests tells what passes, fails, is refused, hangs or crashes; on tests made up."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT
from tests.mpi4py_suite import expected

ARRAYS = """
class ArrayNumPy:
    backend = "numpy"
class FakeGPUArray:
    backend = "numpy"
ArrayBackends = [ArrayNumPy, FakeGPUArray]
"""
TESTS = """
import os, time, unittest
import numpy as np
from mpi4py import MPI
import arrayimpl

class Gpu:
    __cuda_array_interface__ = {"shape": (1,), "typestr": "<f8", "data": (16, False), "version": 3}

class Test(unittest.TestCase):
    def test_a_passes(self):
        total = np.zeros(1)
        MPI.COMM_WORLD.Allreduce(np.ones(1), total)
        self.assertEqual(total, MPI.COMM_WORLD.size)
        self.assertEqual(type(MPI.COMM_SELF).__name__, "Communicator")
    def test_b_is_refused(self):
        for array in arrayimpl.ArrayBackends:
            with self.subTest():
                MPI.COMM_WORLD.Send(Gpu() if "Fake" in array.__name__ else np.ones(1), MPI.PROC_NULL)
    def test_c_is_skipped(self):
        self.skipTest("so it is")
    def test_d_fails_on_one_rank(self):
        self.assertEqual(MPI.COMM_WORLD.rank, 0)
    def test_e_crashes(self):
        if MPI.COMM_WORLD.rank == 1 and MPI.COMM_WORLD.size == 3:
            os.kill(os.getpid(), 11)
"""


@pytest.mark.slow
def test_it_tells_them_apart(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "arrayimpl.py").write_text(ARRAYS)
    (tmp_path / "test" / "test_msgzero.py").write_text(TESTS)
    (tmp_path / "test" / "test_other.py").write_text("raise AssertionError")  # which is none of communicators
    out = tmp_path / "out.json"
    argv = [sys.executable, "-m", "tests.mpi4py_suite", "--source", str(tmp_path), "--ranks", "2,3", "-o", str(out)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(out.read_text())
    seen = [
        [result["ranks"], result["arrays"], result["ended"], [test["outcome"] for test in result["tests"].values()]]
        for result in document["results"]
    ]
    assert seen == [
        [2, "host", True, ["passed", "passed", "skipped", "failed", "passed"]],
        [2, "fake", True, ["passed", "refused", "skipped", "failed", "passed"]],
        [3, "host", False, ["passed", "passed", "skipped", "failed", "hung"]],
        [3, "fake", False, ["passed", "refused", "skipped", "failed", "hung"]],
    ]
    assert document["jobs that did not end well"] == 2


def test_a_difference_is_meant_by_its_test_and_its_error() -> None:
    text = "a communicator belongs to its processes, and cannot be pickled or copied"
    test, error = "test_comm.TestCommWorld.testPickle", f"test_comm.py:1: ArgumentError: {text}"
    assert expected(test, error)
    assert not expected(test, "test_comm.py:1: ValueError: another")
    assert not expected("test_comm.TestCommWorld.testSplit", error)
