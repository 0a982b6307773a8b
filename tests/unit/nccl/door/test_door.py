"""The door decides each call alike on all ranks, and whatever is unclear is NCCL's: programs of several processes."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import uuid4

import pytest

from blinkmpi.nccl.library import FLAGS
from blinkmpi.transport.host.native import built
from tests.harness import ENVIRONMENT, ROOT
from tests.unit.nccl.door.left import left_behind

HERE = Path(__file__).parent
DOOR = ROOT / "blinkmpi" / "nccl" / "door"
SECONDS = 60
pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a stub of NCCL, and a program that is linked with it."""
    made = tmp_path_factory.mktemp("door")
    strict = ["cc", "-Wall", "-Werror", "-pthread", f"-I{DOOR}"]
    library = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", str(made / "libnccl.so.2"), str(HERE / "stub.c")]
    subprocess.run([*strict, *library], check=True, timeout=SECONDS)
    needs = [str(made / "libnccl.so.2"), f"-Wl,-rpath,{made}", "-ldl"]
    subprocess.run([*strict, "-o", str(made / "client"), str(HERE / "client.c"), *needs], check=True, timeout=SECONDS)
    return made


@pytest.fixture(scope="module")
def door() -> Path:
    path, why = built(DOOR / "door.c", FLAGS)
    assert path is not None, why
    return path


class Ranks:
    """Starts the processes of a communicator; of each that ended by itself, what it printed."""

    def __init__(self, folder: Path, door: Path, n: int) -> None:
        self.folder, self.door, self.n, self.errors = folder, door, n, [""] * n

    def run(
        self, what: str, seed: int = 0, *, env: Mapping[int, Mapping[str, str]] | None = None, codes: Sequence[int] = ()
    ) -> list[str]:
        """Run a client of each rank.

        Args:
            env: more variables, by rank.
            codes: with which the ranks end.
        """
        name, processes = uuid4().hex, []
        for rank in range(self.n):
            door = {"STUB_FOLDER": str(self.folder), "LD_PRELOAD": str(self.door)}
            given = {**os.environ, **door, **(env or {}).get(rank, {})}
            words = [str(self.folder / "client"), name, str(self.n), str(rank), what, str(seed)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            processes.append(subprocess.Popen(words, env=given, text=True, **pipes))  # type: ignore[call-overload]
        try:
            told = [process.communicate(timeout=SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for left in self.folder.glob("split-*"):
                left.unlink()
        self.errors = [errors for _, errors in told]
        assert [process.returncode for process in processes] == list(codes or [0] * self.n), self.errors
        return [output for output, _ in told]


@pytest.fixture
def two(folder: Path, door: Path) -> Ranks:
    return Ranks(folder, door, 2)


def on_both(**variables: str) -> dict[int, dict[str, str]]:
    return {0: variables, 1: variables}


def who(printed: str) -> str:
    """A letter for each call: O ours, N NCCL's."""
    return "".join(line[0] for line in printed.splitlines())


@pytest.mark.parametrize(("n", "seed"), [(2, 1), (2, 2), (3, 3), (4, 4)])
def test_at_random_paces_all_ranks_launch_the_same_calls(folder: Path, door: Path, n: int, seed: int) -> None:
    """In the same order, with the same numbers; and NCCL gets the same calls of all."""
    told = Ranks(folder, door, n).run("paces", seed)
    assert told[1:] == told[:-1]
    assert "O" in who(told[0])


def test_a_communicator_of_the_scalable_init(two: Ranks) -> None:
    told = two.run("scalable")
    assert told[0] == told[1]
    assert two.errors == ["", ""]


def test_a_kind_that_one_rank_cannot_make_stays_nccls(two: Ranks) -> None:
    told = two.run("cannot", env={1: {"CANNOT": "0", "BLINKMPI_DEBUG": "INFO"}})
    assert told[0] == told[1]
    assert who(told[0]).startswith("N" * 20)
    assert who(told[0]).endswith("O" + "N" * 20)
    assert two.errors == ["", "blinkmpi: calls of a kind stay NCCL's: a test wants it so\n"]


def test_a_communicator_that_one_rank_cannot_open_stays_nccls(two: Ranks) -> None:
    told = two.run("plain", env={1: {"CLOSED": "1"}})
    assert [who(output) for output in told] == ["N" * 100] * 2
    assert two.errors == ["", "blinkmpi: a communicator's calls stay NCCL's: a test wants it so\n"]


STAYS = "blinkmpi: a communicator stays NCCL's (others may, too): "
ABSENT = "not every rank is a process of this machine that meets this library and lets it make calls\n"


@pytest.mark.parametrize(("env", "why"), [
    ({1: {"LD_PRELOAD": ""}}, [ABSENT, ""]),
    ({1: {"BLINKMPI_NCCL": "off"}}, [ABSENT, ""]),
    ({1: {"NO_BINDER": "1"}}, [ABSENT, ""]),
    ({0: {"NO_GPU": "1"}}, ["", ABSENT]),
    ({1: {"BLINKMPI_NCCL": "allreduce:..4M"}}, ["BLINKMPI_NCCL is not the same on all ranks\n"] * 2),
    ({0: {"SAME_GPU": "1"}, 1: {"SAME_GPU": "1"}}, ["two of its ranks are on one GPU\n"] * 2),
])  # fmt: skip
def test_where_one_rank_does_not_take_part_all_calls_are_nccls(
    two: Ranks, env: dict[int, dict[str, str]], why: list[str]
) -> None:
    """Without the library, turned off, without a binder or a GPU, with other settings, or with the GPU of another."""
    told = two.run("plain", env=env)
    assert [who(output) for output in told] == ["N" * 100] * 2
    assert two.errors == [text and STAYS + text for text in why]


@pytest.mark.parametrize(("text", "made"), [
    ("allreduce:4001..", "N"), ("allreduce:4000..", "O"), ("allreduce:..3K", "N"), ("broadcast,allreduce:1K..4K", "O"),
    ("allgather", "N"),
])  # fmt: skip
def test_the_user_says_which_calls_may_be_ours(two: Ranks, text: str, made: str) -> None:
    """An allreduce of 4000 bytes."""
    if made == "O":
        text += ",allgather"  # which the program waits for
    what = "cannot" if "allgather" in text else "plain"
    told = two.run(what, env=on_both(BLINKMPI_NCCL=text))
    assert told[0] == told[1]
    assert who(told[0])[-1] == made


@pytest.mark.parametrize(
    "text", ["nothing", "allreduce:4M", "allreduce:..", "allreduce:..4X", "allreduce,", "off,reduce"]
)
def test_a_setting_that_says_nothing_is_refused(two: Ranks, text: str) -> None:
    told = two.run("plain", env=on_both(BLINKMPI_NCCL=text))
    assert {who(output) for output in told} == {"N" * 100}
    assert all("BLINKMPI_NCCL must be off, all, or collectives with sizes" in errors for errors in two.errors)


def test_who_chooses_among_nccls_algorithms_gets_nccls(two: Ranks) -> None:
    told = two.run("plain", env=on_both(NCCL_ALGO="Tree"))
    assert {who(output) for output in told} == {"N" * 100}
    assert all("NCCL_ALGO or NCCL_PROTO is set" in errors for errors in two.errors)


def test_groups_windows_and_refused_calls(two: Ranks) -> None:
    """A communicator that is made in a group, and a call alone in one, are ours; several calls in a group are not."""
    told = [output.partition("-\n")[2].splitlines() for output in two.run("groups")]
    assert told[0] == told[1]
    assert told[0][:2] == ["kept", "refused: 4"]
    made = [line.split() for line in told[0][2:]]
    assert [(who, int(count)) for who, _, count, _ in made] == [
        ("O", 1000), ("N", 1000), ("N", 1000), ("O", 16), ("N", 8), ("N", 1000), ("N", 1000), ("N", 0),
        ("O", 1000), ("O", 1000), ("N", 1000),
    ]  # fmt: skip
    numbers = [int(number) for *_, number in made]
    first = numbers[0]
    assert [numbers[i] - first for i in (3, 8, 9)] == [3, 6, 7], "two calls were none: a simulated and a refused one"


def test_communicators_that_are_split(folder: Path, door: Path) -> None:
    """In a group and outside; the ranks of the new ones are in another order."""
    ranks = Ranks(folder, door, 4)
    told = [output.partition("-\n")[2] for output in ranks.run("split")]
    assert [who(output)[-1] for output in told] == ["N", "O", "O", "O"], "rank 0 made the call of one rank last"
    told[0] = told[0][: told[0].rindex("N")]
    assert told[0] == told[2]
    assert told[1] == told[3]
    assert ranks.errors == [""] * 4


def test_a_launch_that_fails_ends_the_communicator(two: Ranks) -> None:
    told = two.run("failing", env=on_both(LAUNCH_FAILS="1"))
    assert told[0] == told[1]
    assert told[0].startswith("1 1 1 ")


@pytest.mark.parametrize(("code", "words"), [("5", "the ranks made different calls"), ("6", "another rank is gone")])
def test_what_kernels_report_is_the_error_of_all_later_calls(two: Ranks, code: str, words: str) -> None:
    """NCCL is asked first; its words are those of the last error unless that was ours."""
    for output in two.run("reports", env=on_both(REPORTS=code)):
        *_, before, said, after = output.splitlines()
        assert (before, said) == ("NCCL's words", f"0 {code} {code}")
        assert after.startswith(f"blinkmpi: {words}")


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_is_killed_at_any_moment_leaves_nobody_waiting(folder: Path, door: Path, seed: int) -> None:
    """The others make all their calls, decided alike."""
    ranks = Ranks(folder, door, 3)
    told = ranks.run("killed", seed, codes=[0, 0, -signal.SIGKILL])
    assert told[0] == told[1]
    assert len(told[0].splitlines()) == 4000


def test_calls_of_a_forked_child_are_nccls(two: Ranks) -> None:
    for output in two.run("fork"):
        _, child, parent = output.split("-\n")
        assert (who(child), who(parent)) == ("NN", "O")


def test_an_abort_reaches_the_binder(two: Ranks) -> None:
    assert [who(output.partition("-\n")[2]) for output in two.run("aborts")] == ["A", "A"]


def test_a_process_may_exit_without_destroying(two: Ranks) -> None:
    told = two.run("exits", codes=[3, 3])
    assert [who(output)[-2:] for output in told] == ["ON", "ON"]


def test_nccl_refuses_to_make_a_communicator(two: Ranks) -> None:
    assert two.run("plain", env=on_both(STUB_REFUSES="1"), codes=[4, 4]) == ["", ""]


def test_a_program_without_nccl_leaves_no_page(door: Path) -> None:
    code = f"""if True:
        import ctypes
        from tests.unit.nccl.door.python_client import Binder, UniqueId, bind, end, gpu, launch, opened, wrong
        door, comm = ctypes.CDLL({str(door)!r}), ctypes.c_void_p()
        binder = Binder(gpu, opened, bind, launch, end, wrong, end)
        door.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
        door.blinkmpi_door_serve(ctypes.byref(binder))
        print(door.ncclCommInitRank(ctypes.byref(comm), 2, UniqueId(b"x"), 0))
    """
    words, env = [sys.executable, "-c", code], {**os.environ, "BLINKMPI_NCCL_LIBRARY": ""}
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=ROOT, timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    assert "NCCL has no pncclCommInitRank that can be found" in done.stderr


def test_a_page_of_a_process_that_died_in_nccls_init_is_removed_by_the_next_one(two: Ranks, folder: Path) -> None:
    before = left_behind()
    env = {**os.environ, "STUB_FOLDER": str(folder), "LD_PRELOAD": str(two.door), "STUB_DIES": "1"}
    words = [str(folder / "client"), uuid4().hex, "2", "0", "plain"]
    assert subprocess.run(words, env=env, timeout=SECONDS, check=False).returncode == -signal.SIGKILL
    assert len(left_behind() - before) == 1
    two.run("scalable")
    assert left_behind() <= before


def test_a_binder_in_python_is_never_waited_for(two: Ranks, folder: Path) -> None:
    """A program that opens NCCL by name and holds the GIL in its calls, where the binder wants it."""
    name, processes = uuid4().hex, []
    for rank in (0, 1):
        words = [sys.executable, str(HERE / "python_client.py"), str(two.door), name, "2", str(rank)]
        stub = {"STUB_FOLDER": str(folder), "BLINKMPI_NCCL_LIBRARY": str(folder / "libnccl.so.2")}
        env = {**os.environ, **ENVIRONMENT, **stub}
        processes.append(subprocess.Popen(words, env=env, text=True, stdout=subprocess.PIPE))
    told = [process.communicate(timeout=SECONDS)[0] for process in processes]
    assert told[0] == told[1]
    assert told[0].startswith("bound: 0 while the GIL was held\nO 0 ")
