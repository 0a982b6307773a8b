"""mpi4py's own tests, from its source distribution, with our Communicators in place of COMM_WORLD and COMM_SELF.

    python -m tests.mpi4py_suite --source build/mpi4py/mpi4py-4.1.2 --ranks 1-5 -o results.json

Nothing is downloaded here; `make mpi4py-suite` does that. Each of mpi4py's test modules is a job of its own for each
number of ranks and each kind of arrays: ``host`` (array, NumPy, DLPack), ``fake`` (host memory that claims to lie on a
GPU) and ``cupy``, where CuPy and a GPU for each rank are there. A test must pass, or be skipped by mpi4py; with arrays
on GPUs it may also be refused by an error of ours. It must never crash or hang. What differs, and why, is EXPECTED.
"""

import argparse
import contextlib
import fnmatch
import functools
import json
import os
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.harness import ROOT, run_command

MODULES = (  # those about communicators; test_exceptions and test_objmodel are about COMM_WORLD as a constant of MPI's
    "test_cco_*.py", "test_comm.py", "test_comm_inter.py", "test_comm_topo.py", "test_msgspec.py", "test_msgzero.py",
    "test_request.py", "test_grequest.py", "test_threads.py", "test_p2p_*.py", "test_subclass.py", "test_attributes.py",
    "test_errhandler.py", "test_pickle.py", "test_handle.py", "test_io.py", "test_rma.py", "test_rma_nb.py",
    "test_win.py", "test_util_pkl5.py", "test_util_sync.py",
)  # fmt: skip
ARRAYS = ("host", "fake", "cupy")
SECONDS = 240.0  # for one job
TIMEOUT = "60"  # seconds that a call may wait: a test that fails on one rank alone must not take the job with it
RANKING = ("passed", "skipped", "refused", "expected", "failed", "hung")  # a test is what it is on its worst rank


class Expected(NamedTuple):
    """A difference from mpi4py that is meant: patterns of the test's name and of its error, and the reason."""

    test: str
    error: str
    why: str


ON_GPU = "memory that claims to lie on a GPU is refused, with whatever arrays the other tests are run"
NOT_RUN = (  # with arrays on GPUs: these use functions and objects of MPI's own, which crash with or without us
    "*.testProbeRecv", "TestMessageRMA.testMessageCuPy", "TestMessageRMA.testMessageNumba",
)  # fmt: skip
OF_MPI_ALONE = ("test_io", "test_rma", "test_rma_nb")  # files and windows: likewise, on real GPUs
EXPECTED = (
    Expected("test_p2p_buf_part.*", "*: BufferTypeError: P*_init of GPU memory is MPI's alone, *", "as below"),
    Expected("test_msgspec.*CAIBuf*", "*BufferTypeError*", ON_GPU),
    Expected("test_msgspec.*DLPackGPUBuf*", "*BufferTypeError*", ON_GPU),
    Expected(
        "test_comm.TestComm*.testPickle",
        "*ArgumentError: a communicator belongs to its processes, *",
        "mpi4py pickles COMM_WORLD and COMM_SELF by their names, and a Communicator is neither",
    ),
    Expected(
        "test_comm_topo.*",
        "*AssertionError: <class 'mpi4py.MPI.*comm'> != <class 'blinkmpi.guarded.*comm'>",
        "MPI's handle of a grid or graph of ours, made into an object again, has mpi4py's type, not the subclass",
    ),
)


# ---------------------------------------------------------------- on a rank


class Recorder(unittest.TestResult):
    """Writes down each test when it begins and when it ends, so that one that hangs is known."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = path.open("w", encoding="utf-8", buffering=1)
        self.errors_here: list[str] = []
        self.refused = self.skipped_here = False

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.errors_here, self.refused, self.skipped_here = [], True, False
        self.file.write(json.dumps({"test": test.id()}) + "\n")

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        outcome = "skipped" if self.skipped_here else "passed"
        if self.errors_here:
            outcome = "refused" if self.refused else "failed"
        errors = list(dict.fromkeys(self.errors_here))
        self.file.write(json.dumps({"test": test.id(), "outcome": outcome, "errors": errors}) + "\n")

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self._add(test, err)

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self._add(test, err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._add(test, err)

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self.skipped_here = True

    def _add(self, test: Any, err: Any) -> None:
        from blinkmpi.errors import BlinkError

        kind, error, trace = err
        where = ""
        while trace is not None:  # the line of the test itself
            code = trace.tb_frame.f_code
            if Path(code.co_filename).name.startswith("test_"):
                where = f"{Path(code.co_filename).name}:{trace.tb_lineno}"
            trace = trace.tb_next
        self.refused = self.refused and issubclass(kind, BlinkError)
        if issubclass(kind, BlinkError):
            detach_buffer()
        self.errors_here.append(f"{where}: {kind.__name__}: {str(error)[:300]}")
        if not hasattr(test, "_testMethodName"):  # of a class or module: there is no startTest
            self.file.write(json.dumps({"test": str(test), "outcome": "failed", "errors": [str(error)[:300]]}) + "\n")


def detach_buffer() -> None:
    """Detach what a test has attached for Bsend, and could not detach as it was refused: the next would fail of it."""
    from mpi4py import MPI

    with contextlib.suppress(MPI.Exception):  # there is none
        MPI.Detach_buffer()


def wrap_negative_numbers(kind: Any) -> None:
    """Let a class of CuPy arrays fill unsigned ones with -1, as mpi4py's tests do and its NumPy arrays can."""
    own = kind.__init__

    def fill(self: Any, arg: Any, typecode: str, *rest: Any, **more: Any) -> None:
        dtype = np.dtype(typecode)
        own(self, int(np.array(arg).astype(dtype)) if dtype.kind == "u" and arg == -1 else arg, typecode, *rest, **more)

    kind.__init__ = fill


def run_module(source: Path, module: str, arrays: str, into: Path, *, plain: bool) -> None:
    """Run the tests of a module on this rank."""
    sys.path.insert(0, str(source / "test"))
    if arrays != "cupy":
        sys.modules["cupy"] = None  # type: ignore[assignment]
    sys.modules["numba"] = None  # type: ignore[assignment]
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    if not plain:
        import blinkmpi

        own = MPI.COMM_WORLD, MPI.COMM_SELF
        MPI.COMM_WORLD, MPI.COMM_SELF = map(blinkmpi.Communicator, own)  # type: ignore[misc]
    import arrayimpl  # type: ignore[import-not-found]

    kept = [a for a in arrayimpl.ArrayBackends if kind_of(a) == arrays]
    arrayimpl.ArrayBackends[:] = kept
    if arrays == "cupy":
        for kind in kept:
            wrap_negative_numbers(kind)
        if not plain:  # the tests call the function of MPI's class, whose Intercomm would be MPI's own
            MPI.Intracomm = blinkmpi.guarded.GuardedIntracomm  # type: ignore[misc]
    loader = unittest.TestLoader()
    if arrays != "host":
        loader.getTestCaseNames = lambda case: [  # type: ignore[method-assign]
            name
            for name in unittest.TestLoader().getTestCaseNames(case)
            if not any(fnmatch.fnmatchcase(f"{case.__name__}.{name}", pattern) for pattern in NOT_RUN)
        ]
    suite = loader.loadTestsFromName(module)
    recorder = Recorder(into / f"{rank}.jsonl")
    suite.run(recorder)
    recorder.file.close()
    if not plain:
        MPI.COMM_SELF.Free()
        MPI.COMM_WORLD.Free()


def kind_of(array: type) -> str:
    """Say where the memory of one of mpi4py's classes of arrays lies."""
    if array.backend in ("cupy", "dlpack-cupy"):  # type: ignore[attr-defined]
        return "cupy"
    return "fake" if "Fake" in array.__name__ else "host"


# ---------------------------------------------------------------- all jobs


def jobs(source: Path, kinds: Sequence[str], chosen: str) -> Iterator[tuple[str, str]]:
    """Give modules and kinds of arrays: each module with host arrays, those that loop over arrays with the others."""
    for path in sorted((source / "test").glob("test_*.py")):
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in MODULES) and fnmatch.fnmatch(path.stem, chosen):
            for kind in kinds:
                if kind == "cupy" and path.stem in OF_MPI_ALONE:
                    continue
                if kind == "host" or "arrayimpl" in path.read_text(encoding="utf-8"):
                    yield path.stem, kind


def run_job(source: Path, n: int, module: str, kind: str, *, plain: bool) -> dict[str, Any]:
    """Run one module on ``n`` ranks; gives the outcome of each test, and the job's output where it is of use."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "tests.mpi4py_suite", "--source", str(source), "--module", module]
        argv += ["--arrays", kind, "--into", folder, *(["--plain"] if plain else [])]
        env = {"MPI4PY_TEST_SPAWN": "no", "PYTHONPATH": str(ROOT), "BLINKMPI_TIMEOUT": TIMEOUT}
        done = run_command(n, argv, timeout=SECONDS, env=env)
        tests: dict[str, tuple[str, list[str]]] = {}
        for rank in range(n):
            path = Path(folder) / f"{rank}.jsonl"
            for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
                one = json.loads(line)
                before = tests.get(one["test"], ("", []))
                if "outcome" not in one:
                    tests[one["test"]] = ("hung", before[1])
                    stopped = before
                else:
                    outcome = max(one["outcome"], stopped[0] or "passed", key=RANKING.index)
                    errors = list(dict.fromkeys([*stopped[1], *one["errors"]]))
                    tests[one["test"]] = (outcome, errors)
    judged = {}
    for name, (outcome, errors) in sorted(tests.items()):
        if outcome == "failed" or (outcome == "refused" and kind == "host"):
            outcome = "expected" if errors and all(expected(name, error) for error in errors) else "failed"
        judged[name] = {"outcome": outcome, **({"errors": errors[:4]} if outcome not in ("passed", "skipped") else {})}
    ended = not done.timed_out and done.rc == 0
    result: dict[str, Any] = {"ranks": n, "module": module, "arrays": kind, "seconds": round(done.seconds, 1)}
    result |= {"ended": ended, "counts": dict(Counter(t["outcome"] for t in judged.values())), "tests": judged}
    if not ended:
        result["output"] = done.output[-3000:]
    return result


def expected(name: str, error: str) -> bool:
    """Whether an error of a test is a difference that is meant."""
    return any(fnmatch.fnmatchcase(name, e.test) and fnmatch.fnmatchcase(error, e.error) for e in EXPECTED)


def main() -> int:
    """Run all jobs, or, on a rank, one module; 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path, required=True, help="the unpacked source distribution of mpi4py")
    parser.add_argument("--ranks", default="1-5", help="numbers of ranks: 1-5 or 1,2,4")
    parser.add_argument("--arrays", default="host,fake", help=f"kinds of arrays, of {', '.join(ARRAYS)}")
    parser.add_argument("--only", default="*", help="pattern of modules, such as test_cco_*")
    parser.add_argument("--plain", action="store_true", help="without blinkmpi, for comparison")
    parser.add_argument("-o", "--output", type=Path, help="the file to write, as JSON")
    parser.add_argument("--module", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    source = asked.source.resolve()
    if asked.module:
        run_module(source, asked.module, asked.arrays, asked.into, plain=asked.plain)
        return 0
    if not (source / "test" / "arrayimpl.py").is_file():
        parser.error(f"{source} has no test/arrayimpl.py; give the unpacked source distribution of mpi4py")
    low, _, high = asked.ranks.partition("-")
    sizes = range(int(low), int(high) + 1) if high else [int(n) for n in low.split(",")]
    results, began = [], time.monotonic()
    for n in sizes:
        for module, kind in jobs(source, asked.arrays.split(","), asked.only):
            result = run_job(source, n, module, kind, plain=asked.plain)
            results.append(result)
            counts = ", ".join(f"{number} {what}" for what, number in sorted(result["counts"].items()))
            end = "" if result["ended"] else "; THE JOB DID NOT END WELL"
            print(f"{n} ranks, {module}, {kind}: {counts}, {result['seconds']} s{end}", flush=True)
            for name, test in result["tests"].items():
                if test["outcome"] in ("failed", "hung"):
                    print(
                        f"  {test['outcome']}: {name}", *(e[:160] for e in test["errors"][:2]), sep="\n    ", flush=True
                    )
    counts = functools.reduce(lambda a, b: a + b, (Counter(r["counts"]) for r in results), Counter())
    broken = sum(not r["ended"] for r in results)
    total = {"counts": dict(counts), "jobs": len(results), "jobs that did not end well": broken}
    print(json.dumps(total), f"{time.monotonic() - began:.0f} s")
    if asked.output:
        document = {"plain": asked.plain, "expected": [e._asdict() for e in EXPECTED], **total, "results": results}
        asked.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(bool(broken or counts["failed"] or counts["hung"]))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    sys.exit(main())
