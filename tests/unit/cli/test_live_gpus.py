"""What commands say of the GPUs of a job, without GPUs."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from blinkmpi.cli import explain
from blinkmpi.cli import main as cli
from blinkmpi.planning.plan import Plan
from blinkmpi.topology import machine, modify

GPUS = modify(machine("hgx-h200"), gpus="0-3")
Command = Callable[..., str]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """What a command prints of GPUS, which so many ranks have; 0: which were named."""

    def call(text: str, ranks: int = 4) -> str:
        args = cli.parsed(text.split())
        module = import_module(f"blinkmpi.cli.{args.command}")
        monkeypatch.setattr(module, "on_machine", lambda _, answer: answer(GPUS, ranks))
        monkeypatch.setattr(explain, "world", lambda _: SimpleNamespace(size=1))
        assert module.run(args) == 0
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize(("ranks", "protocols"), [(4, {"direct", "rs_ag", "ll128_two_shot", "slots"}), (0, {"slots"})])
def test_a_plan_of_live_gpus_has_their_protocols(
    command: Command, tmp_path: Path, ranks: int, protocols: set[str]
) -> None:
    file = tmp_path / "plan.json"
    command(f"plan -o {file}", ranks)
    found = {rule.protocol for rule in Plan.from_json(file.read_text(), source=str(file)).rules}
    assert protocols <= found if ranks else protocols == found


@pytest.mark.parametrize(
    ("call", "protocol"),
    [("1K", "ll16_one_shot"), ("16M", "direct"), ("256M", "rs_ag"), ("16M --collective reduce_scatter", "direct"),
     ("16K --collective bcast", "ll16"), ("256M --dtype bfloat16", "")],
)  # fmt: skip
def test_an_explanation_of_live_gpus_names_the_protocol(command: Command, call: str, protocol: str) -> None:
    text = f"explain --bytes {call}"
    assert f"protocol    {protocol}" in command(text)
    assert "protocol    " not in command(text, 0)
