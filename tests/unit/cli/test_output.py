"""Where answers go: narrow terminals, readers who leave, full disks, users who have seen enough."""

import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from blinkmpi.cli import machine
from blinkmpi.cli import main as cli
from blinkmpi.util.launcher import RANK_VARIABLES


@pytest.fixture
def blink(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    for variable in RANK_VARIABLES:
        monkeypatch.delenv(variable, raising=False)

    def call(text: str) -> tuple[int, str, str]:
        code = cli.main(text.split())
        out, err = capsys.readouterr()
        return code, out, err

    return call


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
