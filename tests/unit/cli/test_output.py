"""Where answers go: narrow terminals, readers who leave, full disks, users who have seen enough."""

import contextlib
import os
import pty
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from blinkmpi.cli import machine
from blinkmpi.util.launcher import RANK_VARIABLES
from tests.harness import ENVIRONMENT, mpirun, run_command


@pytest.mark.slow
@pytest.mark.parametrize("command", [
    "advise dgx-1v --take 4 --from 0,1,4,5,6", "subsets dgx-1p --gpus 0-4", "plan dgx-1v", "topo dgx-1v:2",
    "plan dgx-1v --collective allreduce", "plan dgx-1v --collective broadcast --pareto", "topo dgx-1v --diff dgx-1p",
    "simulate dgx-1v --bytes 64K",
])  # fmt: skip
def test_a_narrow_terminal_loses_no_word(blink: Any, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    words: list[list[str]] = [[], []]
    for some, columns in zip(words, ("300", "60"), strict=True):
        monkeypatch.setenv("COLUMNS", columns)
        _, out, _ = blink(command)
        assert "…" not in out
        some += [word for word in re.findall(r"[\w.,%]+", out) if not re.fullmatch(r"[\d.]+", word) or "." in word]
    planned = next((i for i, word in enumerate(words[0]) if word == "planned"), len(words[0]))
    wide, narrow = Counter(words[0][:planned]), Counter(words[1])
    assert not wide - narrow


@pytest.mark.slow
@pytest.mark.parametrize("command", ["topo cpu:2", "plan dgx-1v --json", "doctor"])
def test_an_answer_that_nobody_can_have_is_no_traceback(command: str) -> None:
    line = f"{sys.executable} -m blinkmpi {command}"
    for shell, code, said in (
        (f"{line} >&-", 0, ""),
        (f"{line} | true; exit ${{PIPESTATUS[0]}}", 0, ""),
        (f"{line} > /dev/full", 2, "blinkmpi: error: cannot write the answer: No space left on device"),
    ):
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
        assert done.stderr[: len(said) or None].startswith(said), done.stderr
        assert done.stderr.count("\n") == bool(said)
        assert done.returncode == code


def test_ctrl_c_ends_a_command_with_a_word(blink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "load", interrupted)
    assert blink("topo cpu:2") == (130, "", "blinkmpi: interrupted\n")


TOPO = [sys.executable, "-m", "blinkmpi", "topo", "dgx-1v"]
DOCTOR = [sys.executable, "-m", "blinkmpi", "doctor"]


def on_a_terminal(argv: list[str], **variables: str) -> str:
    """What a terminal gets of a command."""
    unset = ("NO_COLOR", "FORCE_COLOR", *RANK_VARIABLES)
    env = {name: value for name, value in os.environ.items() if name not in unset}
    ours, its = pty.openpty()
    with subprocess.Popen(
        argv, stdin=its, stdout=its, stderr=its, env={**env, "TERM": "xterm", **variables}
    ) as process:
        os.close(its)
        got = b""
        with contextlib.suppress(OSError):  # nobody has the other end any more
            while found := os.read(ours, 1 << 16):
                got += found
        os.close(ours)
    assert process.returncode == 0, got
    return got.decode()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_terminal_gets_styles_unless_it_wants_none(ranks: int) -> None:
    """NO_COLOR leaves nothing, bold and dim neither; under mpirun it is mpirun's terminal."""
    argv = [mpirun(), "-np", str(ranks), *DOCTOR] if ranks else TOPO
    assert "\x1b[1m" in on_a_terminal(argv, **ENVIRONMENT)
    assert "\x1b" not in on_a_terminal(argv, **ENVIRONMENT, NO_COLOR="1")


@pytest.mark.slow
def test_what_no_terminal_shows_has_no_styles() -> None:
    """Under mpirun neither, although each rank of Open MPI's has a terminal of its own."""
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    for variables, styled in (
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ):
        done = subprocess.run(
            TOPO, capture_output=True, text=True, check=True, env={**env, "TERM": "xterm", **variables}
        )
        assert ("\x1b" in done.stdout) == styled
    done_by_ranks = run_command(2, DOCTOR, timeout=60, env={"TERM": "xterm"})
    assert done_by_ranks.rc == 0, done_by_ranks.output
    assert "\x1b" not in done_by_ranks.output
