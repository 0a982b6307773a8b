"""Calls of NCCL are counted, and passed on: of programs that are linked with it, and of those that open it by name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blinkmpi.cli.main import main
from blinkmpi.errors import ArgumentError
from blinkmpi.nccl.counts import read
from blinkmpi.nccl.library import COUNT, LIBRARY, opened_by_name, preloaded
from tests.harness import ENVIRONMENT, ROOT, mpirun

HERE = Path(__file__).parent
SECONDS = 60
pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a stub of NCCL, one of the driver, and a program that is linked with both."""
    made = tmp_path_factory.mktemp("nccl")
    for source, library in ("stub.c", "libnccl.so.2"), ("driver.c", "libcuda.so.1"):
        compile_it(made, library, "-shared", "-fPIC", f"-Wl,-soname,{library}", str(HERE / source))
    needs = (str(made / "libnccl.so.2"), str(made / "libcuda.so.1"), f"-Wl,-rpath,{made}", "-pthread")
    compile_it(made, "program", str(HERE / "program.c"), *needs)
    return made


@pytest.fixture(autouse=True)
def _stub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY, str(folder / "libnccl.so.2"))


def compile_it(folder: Path, name: str, *words: str) -> None:
    subprocess.run(["cc", "-Wall", "-Werror", "-o", str(folder / name), *words], check=True, timeout=SECONDS)


def counted(folder: Path, *program: str) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """What ``blinkmpi nccl count`` writes of a program, and how it ended."""
    told = folder / "counts.json"
    words = [sys.executable, "-m", "blinkmpi", "nccl", "count", "-o", str(told), *program]
    env = os.environ | ENVIRONMENT
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=env, timeout=SECONDS, check=False)
    assert told.exists(), done.stderr
    assert told.stat().st_size, done.stderr
    return json.loads(told.read_text()), done


def rows(report: dict[str, Any]) -> set[tuple[Any, ...]]:
    names = ("function", "dtype", "op", "ranks", "most_bytes", "most", "nbytes", "grouped", "captured")
    return {tuple(kind[name] for name in names) for kind in report["kinds"]}


def test_each_kind_of_call(folder: Path) -> None:
    report, done = counted(folder, str(folder / "program"))
    assert rows(report) == {
        ("AllReduce", "float32", "sum", 4, 4096, 4, 3 * 4096 + 2052, 0, 1),
        ("AllReduce", "float32", "sum", 4, 8192, 1, 4100, 0, 0),
        ("AllReduce", "bfloat16", "a program's own", 4, 16, 1, 16, 0, 0),
        ("AllReduce", "float32", "sum", 2, 4096, 1, 4096, 0, 0),
        ("AllGather", "bfloat16", "", 4, 128, 1, 128, 0, 0),
        ("ReduceScatter", "float32", "avg", 4, 256, 1, 256, 0, 0),
        ("Broadcast", "float32", "", 4, 32, 2, 40, 0, 0),  # of which Bcast makes one inside
        ("Reduce", "float32", "sum", 4, 0, 1, 0, 0, 0),
        ("AlltoAll", "float32", "", 4, 32, 1, 32, 0, 0),
        ("Gather", "float32", "", 4, 32, 1, 32, 0, 0),
        ("Scatter", "float32", "", 4, 32, 1, 32, 0, 0),
        ("Send", "uint8", "", 4, 16, 2, 18, 1, 0),
        ("Recv", "uint8", "", 4, 16, 2, 18, 2, 0),
    }
    assert (done.returncode, report["exit_code"], report["command"]) == (3, 3, [str(folder / "program")])
    assert done.stdout == "refused: 4\nagain: 1\ncalls: 20\n", "the program's own words alone, and what NCCL answered"
    assert report["processes"][0]["communicators"] == [[4, 1], [2, 0]]
    assert "communicators met: 1 of 4 ranks, 1 of 2 ranks" in done.stderr
    assert "AllReduce" in done.stderr


@pytest.mark.parametrize(("how", "calls"), [("threads", [40000]), ("fork", [2, 5])])
def test_no_call_is_lost(folder: Path, how: str, calls: list[int]) -> None:
    report, done = counted(folder, str(folder / "program"), how)
    assert sorted(sum(c["calls"] for c in process["calls"]) for process in report["processes"]) == calls
    assert done.returncode == 3


def test_a_program_that_is_killed_has_counted(folder: Path) -> None:
    report, done = counted(folder, "--", str(folder / "program"), "killed")
    assert [(kind["function"], kind["most"]) for kind in report["kinds"]] == [("AllReduce", 1)]
    assert (done.returncode, report["exit_code"]) == (137, 137), "as a shell has it"


def test_each_rank_of_a_launcher_is_counted(folder: Path) -> None:
    report, done = counted(folder, mpirun(), "-np", "2", str(folder / "program"), "threads")
    (kind,) = report["kinds"]
    assert (kind["processes"], kind["fewest"], kind["most"]) == (2, 40000, 40000), done.stderr


def test_calls_beyond_the_room_are_said_to_be(folder: Path) -> None:
    report, done = counted(folder, str(folder / "program"), "full")
    (process,) = report["processes"]
    assert (len(process["communicators"]), process["lost"]) == (256, 44)
    assert "44 calls more were of kinds for which there was no room" in done.stderr


def test_a_program_that_opens_nccl_by_name(folder: Path) -> None:
    """As vLLM and SGLang do: functions that are not counted are NCCL's own."""
    code = """if True:
        import ctypes, os
        nccl, comm, version = ctypes.CDLL(os.environ["VLLM_NCCL_SO_PATH"]), ctypes.c_void_p(), ctypes.c_int()
        nccl.stub_comm(ctypes.byref(comm), 8, 3)
        assert nccl.ncclAllReduce(None, None, ctypes.c_size_t(100), 6, 0, comm, None) == 0
        assert nccl.ncclAllReduce(None, None, ctypes.c_size_t(13), 6, 0, comm, None) == 4
        assert nccl.ncclGetVersion(ctypes.byref(version)) == 0 and version.value == 22809
    """
    report, done = counted(folder, sys.executable, "-c", code)
    assert rows(report) == {("AllReduce", "float16", "sum", 8, 256, 1, 200, 0, 0)}
    assert (done.returncode, done.stdout) == (0, "")


def test_a_running_process_is_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that was started with LD_PRELOAD alone, and one that counts into a folder."""
    assert main(["nccl", "--count"]) == 0
    preload = capsys.readouterr().out.strip()
    assert preload == str(preloaded(COUNT))
    for more in {}, {"BLINKMPI_NCCL_COUNTS": str(folder)}:
        env = {**os.environ, "LD_PRELOAD": preload, **more}
        with running(folder, env) as program:
            assert main(["nccl", "status", str(program.pid), "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
            assert (found["pid"], found["name"], found["calls"][0]["calls"]) == (program.pid, "program", 1)
            assert main(["nccl", "status", str(program.pid)]) == 0
            assert "communicators met: 1 of 2 ranks" in capsys.readouterr().out


class running:  # noqa: N801
    """The program, while it waits."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        words = [str(folder / "program"), "wait"]
        self.program = subprocess.Popen(words, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> subprocess.Popen[str]:
        assert self.program.stdout is not None
        assert self.program.stdout.readline() == "ready\n"
        return self.program

    def __exit__(self, *_: object) -> None:
        self.program.communicate("\n", timeout=SECONDS)


def test_other_programs_run_as_before(folder: Path) -> None:
    """Whatever is started, the library is loaded into it, and does nothing."""
    words = ["bash", "-c", f"cc --version >{folder}/told && echo $(true; echo fine) $0; exit 7"]
    report, done = counted(folder, *words)
    assert (done.returncode, done.stdout, report["processes"]) == (7, "fine bash\n", [])
    assert "No process on this machine called NCCL through this library" in done.stderr


def test_a_program_without_nccl_is_told(folder: Path) -> None:
    """One line, and NCCL's internal error: no crash."""
    code = """if True:
        import ctypes, os
        library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        print(library.ncclGroupStart(), library.ncclGroupStart())
    """
    env = {**os.environ, "LD_PRELOAD": str(preloaded(COUNT))}
    env.pop(LIBRARY)
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=SECONDS, check=False)
    assert done.stdout == "3 3\n"
    told = "blinkmpi: NCCL has no pncclGroupStart that can be found; set BLINKMPI_NCCL_LIBRARY to its libnccl.so.2\n"
    assert done.stderr == told


@pytest.mark.parametrize(("words", "why"), [
    (["count"], "name a program"),
    (["run"], "name a program, as in `blinkmpi nccl run torchrun train.py`"),
    (["run", "--", "/no/such/program"], "cannot run '/no/such/program': No such file or directory"),
    (["count", "/no/such/program"], "cannot run '/no/such/program': No such file or directory"),
    (["count", "-o", "/no/folder/x.json", "true"], "cannot write '/no/folder/x.json': No such file or directory"),
    (["status", "999999999"], "process 999999999 cannot be looked into: No such file or directory"),
    (["status", str(os.getpid())], "has met no library of ours"),
])  # fmt: skip
def test_errors_say_what_to_do(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nccl", *words]) == 2
    assert why in capsys.readouterr().err


def test_the_library_by_name_needs_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY, "/no/libnccl.so.2")
    with pytest.raises(ArgumentError, match="there is no such file"):
        opened_by_name()


def test_a_folder_that_ld_preload_cannot_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINKMPI_CACHE_DIR", str(tmp_path / "a b"))
    with pytest.raises(ArgumentError, match="ends names at blanks and colons; set BLINKMPI_CACHE_DIR"):
        preloaded()


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(1000))
    with pytest.raises(ArgumentError, match="has no counts"):
        read(tmp_path / "x")
    with pytest.raises(ArgumentError, match="No such file"):
        read(tmp_path / "y")
