"""What tests of commands share: a command as a user types it, run in this process."""

from typing import Any

import pytest

from blinkmpi.cli import main as cli
from blinkmpi.util.launcher import RANK_VARIABLES


@pytest.fixture
def blink(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command here, as no rank of a job; (exit code, stdout, stderr)."""
    for variable in RANK_VARIABLES:
        monkeypatch.delenv(variable, raising=False)

    def call(text: str) -> tuple[int, str, str]:
        try:
            code = cli.main(text.split())
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call
