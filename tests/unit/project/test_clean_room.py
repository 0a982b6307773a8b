"""What pages tell a reader to type works: in an environment with the extras that the page names, and nothing else.

A page's commands run in their order on two cores, from a copy of the tree, and with their output in a file. blinkmpi is
installed from a wheel of this tree, the rest from pip's index.
"""

import os
import re
import shutil
import signal
import subprocess
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.unit.project.test_house import checkout
from tests.unit.project.test_package import make, tracked

pytestmark = [checkout, pytest.mark.mpi_skip, pytest.mark.slow, pytest.mark.long]

# Whose commands need no more than a laptop of two cores, and run as they stand.
LAPTOP = ("README.md", "docs/index.md", "docs/install.md", "docs/tutorial.md", "docs/cpu.md")
# Elsewhere a reader has as many cores as ranks; two cores get what settings.md says, as variables.
ELSEWHERE = ("docs/commands.md", "docs/nodes.md", "docs/troubleshooting.md")
OVERSUBSCRIBED = {
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
# Why a command does not run here.
NOT_HERE = {
    r"^make |^python3 -m venv|^pipx |^uvx ": "makes environments; blinkmpi's are made by the test",
    r"^pip ": "is what an environment is made of",
    r"(?<!examples/)\b(train|program)\.py|package\.module": "a program of the reader's",
    r"FILE|other\.json|all_reduce_perf|ring\.xml|mine\.py|allreduce\.xml": "a file of the reader's",
    r"--hostfile|--from-env|srun|--nnodes": "needs other machines, or a scheduler",
    r"mpirun -np 16 ": "needs more cores",
    r"symm_mem|--measure": "needs GPUs",
    r"blinkmpi top\b|nccl status|--pid": "watches a job that runs",
    r"blinkmpi advise --take": "asks the GPUs of this machine",
    r"benchmarks/small_calls|--sweep|--predict|blinkmpi tune|-e 1G": "measures for minutes",
    r"nccl count|nccl --by-name": "counts calls of a program that uses NCCL",
}
INSTALL = re.compile(r"pip install '(?:\.|blinkmpi)\[([\w,]+)\]'")
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:mpirun|blinkmpi|python3?|torchrun|pip|make|pipx|uvx|srun) \S")
OTHER_MACHINES = {"cc", "cuda12", "cuda13", "impi", "mpich"}
SECONDS = 120


def extras_of(page: str) -> tuple[str, ...]:
    """The extras that a page says to install: in its blocks of commands, or if it has none there, in its text.

    Without other MPIs, and what only machines with GPUs or without compilers want.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    typed = "\n".join(line for line in text.splitlines() if line.startswith("    "))
    found = INSTALL.findall(typed) or INSTALL.findall(text)
    return tuple(sorted({name for names in found for name in names.split(",")} - OTHER_MACHINES))


def commands(page: str) -> list[str]:
    """The commands of a page that run here, in their order."""
    found, fence = [], ""
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fence = "" if fence else line
            continue
        typed = line.removeprefix("$ ") if fence in ("```console", "```shell") else line[4:] if not fence else ""
        indented = fence or line.startswith("    ")
        if indented and COMMAND.match(typed) and reason(typed) is None:
            found.append(typed.partition("  #")[0].rstrip())
    return found


def reason(command: str) -> str | None:
    """Why a command does not run here."""
    return next((why for pattern, why in NOT_HERE.items() if re.search(pattern, command)), None)


def torch_of_makefile() -> list[str]:
    """pip's words for the torch without CUDA that the Makefile takes: the one of PyPI has gigabytes."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    wanted, index = (re.search(rf"^{name} \?= (\S+)$", text, re.MULTILINE) for name in ("TORCH", "TORCH_INDEX"))
    assert wanted is not None
    assert index is not None
    return [wanted[1], "--extra-index-url", index[1], "--retries", "1", "--timeout", "20"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, without the links by which Python would find the sources."""
    folder = tmp_path_factory.mktemp("clean") / "tree"
    for name in tracked():
        if not (ROOT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def room(tree: Path) -> Callable[[tuple[str, ...]], Path]:
    """Makes the environment of some extras, once; gives its folder of programs."""
    wheel = make("build_wheel", tree, tree.parent / "wheel")
    shutil.rmtree(tree / "build", ignore_errors=True)
    made: dict[tuple[str, ...], Path] = {}

    def of(extras: tuple[str, ...]) -> Path:
        if extras not in made:
            folder = tree.parent / f"room-{'-'.join(extras) or 'plain'}"
            venv.create(folder, with_pip=True)
            wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
            for words in ([torch_of_makefile()] if "torch" in extras else []) + [[wanted]]:
                argv = [folder / "bin" / "python", "-m", "pip", "install", "-qq", "--no-input", *words]
                done = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False)
                assert done.returncode == 0, done.stdout + done.stderr
            made[extras] = folder / "bin"
        return made[extras]

    return of


def outcome(command: str, bin_: Path, tree: Path, more: dict[str, str], log: Path) -> tuple[int, str]:
    """Run a command of a page on two cores, with its output in a file; its exit code and output."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    home = tree.parent / "home"
    home.mkdir(exist_ok=True)
    env = {"PATH": f"{bin_}:/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "TERM": "xterm-256color", **root, **more}
    cores = sorted(os.sched_getaffinity(0))[:2]
    with log.open("wb") as file:
        job = subprocess.Popen(["taskset", "-c", ",".join(map(str, cores)), "bash", "-c", command], cwd=tree, env=env,
                               stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)  # fmt: skip
        try:
            code = job.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            code = job.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [*LAPTOP, *ELSEWHERE])
def test_the_commands_of_a_page_run_where_only_its_extras_are(
    page: str, tree: Path, room: Callable[[tuple[str, ...]], Path], tmp_path: Path
) -> None:
    found, extras = commands(page), extras_of(page)
    assert found, f"{page} has no command that runs here; take it off the list"
    more = {} if page in LAPTOP else OVERSUBSCRIBED
    wrong = []
    for command in found:
        code, output = outcome(command, room(extras), tree, more, tmp_path / "output")
        faults = [f"ended with {code}"] * (code != 0)
        faults += ["ANSI codes in a file"] * ("\x1b" in output)
        faults += ["a traceback"] * ("Traceback (most recent call last)" in output)
        if faults:
            wrong.append(f"{command} [{','.join(extras)}]: {', '.join(faults)}\n{output[-2000:]}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize(("command", "runs"), [
    ("mpirun -np 2 python examples/train.py          # NumPy, or CuPy", True),
    ("mpirun -np 4 python train.py", False),
    ("blinkmpi topo dgx-1v", True),
    ("srun --gpus-per-node=8 python examples/train.py", False),
])  # fmt: skip
def test_what_needs_more_than_the_reader_has_is_left_out(command: str, runs: bool) -> None:
    assert (reason(command) is None) == runs


def test_extras_are_those_that_the_page_names() -> None:
    assert extras_of("docs/tutorial.md") == ("examples", "mpi", "torch")
    assert extras_of("README.md") == extras_of("docs/install.md") == extras_of("docs/troubleshooting.md") == ("mpi",)
    assert "mpirun -np 2 python examples/train.py" in commands("docs/tutorial.md")
