"""nccl-tests with the door and without, on a stub of NCCL and a CUDA that is none: tables, counts, what fails."""

import shutil
import subprocess
from pathlib import Path

import pytest

from blinkmpi.nccl.library import LIBRARY
from tests.harness import ROOT
from tests.nccl_clients import nccl_tests
from tests.nccl_clients.nccl_tests import Job, Row, judged, problems, ratios, table
from tests.nccl_clients.ways import DOOR, PLAIN, Ran

HERE = Path(__file__).parent
PROGRAMS = ROOT / "build" / "nccl-clients"
VERSIONS = "libcudart.so.13 { global: *; };\n"
SECONDS = 60.0
COUNTS = {"ours": 0, "nccls": 0}
pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a stub of NCCL, a fake of CUDA's runtime and driver, and a program that is linked with them."""
    made = tmp_path_factory.mktemp("clients")
    (made / "versions").write_text(VERSIONS)
    origin = "-Wl,-rpath,$ORIGIN"
    stub = str(HERE.parent / "door" / "stub.c"), str(HERE / "more.c")
    library(made, "libcuda.so.1", "-DDRIVER", str(HERE / "cudart.c"))
    driver, versions = str(made / "libcuda.so.1"), f"-Wl,--version-script={made}/versions"
    library(made, "libcudart.so.13", versions, str(HERE / "cudart.c"), driver, origin)
    library(made, "libnccl.so.2", *stub)
    needs = str(made / "libcudart.so.13"), str(made / "libnccl.so.2")
    library(made, "perf_perf.so", str(HERE / "perf.c"), *needs, origin)
    return made


def library(folder: Path, name: str, *words: str) -> None:
    flags = ["-Wall", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{name}"]
    subprocess.run(["cc", *flags, "-o", str(folder / name), *words], check=True, timeout=SECONDS)


@pytest.fixture(autouse=True)
def _stub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY, str(folder / "libnccl.so.2"))
    monkeypatch.setenv("STUB_FOLDER", str(tmp_path))
    monkeypatch.setenv("OMPI_MCA_accelerator", "null")  # which would ask the fake driver


@pytest.mark.slow
def test_a_program_runs_both_ways_and_says_whose_its_calls_were(folder: Path) -> None:
    """Without GPUs all are NCCL's, with the reason, which is a failure where some should be ours."""
    row, failed = judged(Job("of a test", "perf", (), ours=True), folder, 2, 3, SECONDS)
    assert (row["rows"], row["wrong"]) == ({PLAIN: 3, DOOR: 9}, {PLAIN: 0, DOOR: 0})
    assert (row["counts"]["processes"], row["counts"]["ours"], row["counts"]["nccls"]) == (2, 0, 18)
    assert row["ratios"] == {"8": 1.0, "64": 1.0, "512": 1.0}
    assert failed == ["perf of a test, door: no call was ours"]


@pytest.mark.slow
def test_wrong_elements_and_a_missing_program_are_failures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERF_WRONG", "1")
    _, failed = judged(Job("of a test", "perf", ()), folder, 2, 1, SECONDS)
    assert failed == [f"perf of a test, {by}: 9 elements are wrong" for by in (PLAIN, DOOR)]
    _, failed = judged(Job("of a test", "other", ()), folder, 2, 1, SECONDS)
    assert [text for text in failed if "exit status" in text]
    assert [text for text in failed if text.endswith("0 kinds of rows, not some")]


LINES = """\
# nccl-tests version 2.19.6 nccl-headers=22809 nccl-library=22809
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
           8             2     float     sum      -1     9.75    0.03    0.03       0     8.50    0.04    0.04       0
    16777216       8388608      half    prod       1   1.5e+3   16269   16269       2     0.61   27343   27343     N/A
           0             0  bfloat16              -1     0.15    0.00    0.00       0     0.12    0.00    0.00       0
# Out of bounds values : 2 FAILED
"""


def test_a_table_is_read() -> None:
    first, second, third = table(LINES)
    assert first == Row(8, "float", "sum", -1, (9.75, 8.5), (0, 0))
    assert second == Row(16777216, "half", "prod", 1, (1500.0, 0.61), (2, None))
    assert third == Row(0, "bfloat16", "", -1, (0.15, 0.12), (0, 0))


def test_what_may_not_be() -> None:
    """Each alone, and nothing where all is well."""
    job, rows = Job("of a test", "all_reduce", (), ours=True), table(LINES)[:1]
    good = Ran("", "", 1.0, {**COUNTS, "ours": 5})
    none = Ran("", "", 1.0, COUNTS)
    assert problems(job, DOOR, good, rows, 1) == []
    assert problems(job, PLAIN, none, rows, 0) == []
    assert problems(job, DOOR, none, rows, 1) == ["all_reduce of a test, door: no call was ours"]
    assert problems(job, DOOR, good, rows, 2) == ["all_reduce of a test, door: 1 kinds of rows, not 2"]
    assert problems(job, DOOR, good._replace(wrong="exit status 1"), rows, 1)[0].endswith("exit status 1")
    assert problems(job, DOOR, good, [rows[0]._replace(wrong=(None, None))], 1)[0].endswith("1 rows were not checked")
    assert problems(job, DOOR, good, [rows[0]._replace(wrong=(0, 4))], 1)[0].endswith("4 elements are wrong")
    never = job._replace(ours=None)
    assert problems(never, DOOR, good, rows, 1)[0].endswith("5 calls were ours, where all must be NCCL's")
    assert problems(never, DOOR, none, rows, 1) == []


def test_a_ratio_is_of_the_last_cycle() -> None:
    rows = table(LINES)
    faster = [row._replace(us=(row.us[0] / 2 if row.us[0] else None, None)) for row in rows]
    assert ratios(rows, [*rows, *faster]) == {"0": 2.0, "8": 2.0, "16777216": 2.0}


def test_every_program_runs_and_those_of_the_door_must_be_ours() -> None:
    made = list(nccl_tests.jobs(["all_reduce", "alltoall", "sendrecv"]))
    assert all(job.ours is None for job in made if job.alone or not job.python or "windows" in job.what)
    assert {job.program for job in made if job.ours} == {"all_reduce", "alltoall"}
    assert {job.what for job in made if job.program == "sendrecv"} == {"of all types and operations", "in graphs"}
    assert len({job.name for job in made}) == len(made)


@pytest.mark.long
@pytest.mark.skipif(not nccl_tests.there(PROGRAMS), reason="make nccl-programs has not built nccl-tests")
def test_nccl_tests_itself(folder: Path, tmp_path: Path) -> None:
    """Every program makes its calls, and one of them in all ways; their kernels are launched by nobody."""
    programs = tmp_path / "programs"
    shutil.copytree(PROGRAMS, programs)
    for name in ("libcudart.so.13", "libcuda.so.1"):
        shutil.copy2(folder / name, programs / name)
    found = nccl_tests.there(programs)
    for job in (job for job in nccl_tests.jobs(found) if job.options == nccl_tests.ALL or job.program == found[0]):
        _, failed = judged(job, programs, 2, 1, SECONDS)
        assert failed == ([f"{job.name}, door: no call was ours"] if job.ours else []), job
