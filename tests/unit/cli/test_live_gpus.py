"""What commands say of the GPUs of a job, without GPUs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from blinkmpi.cli import main as cli
from blinkmpi.planning.plan import Plan
from blinkmpi.topology import machine, modify

GPUS = modify(machine("hgx-h200"), gpus="0-3")
Command = Callable[..., str]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """What a command prints of GPUS, which so many ranks have; 0: which were named."""

    def call(text: str, ranks: int = 4) -> str:
        assert cli._command(cli._parser(with_bench=False).parse_args(text.split()), GPUS, ranks=ranks) == 0
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
