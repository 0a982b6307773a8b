"""Versions and settings to paste into a report, and what may have been meant by a word that does not exist."""

import json

import pytest

from blinkmpi.cli import env, main


def test_what_is_set_is_shown_with_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLINKMPI_TIMEOUT", "17")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("HOME_OF_SECRETS", "x")
    monkeypatch.delenv("BLINKMPI_DEBUG", raising=False)
    assert main.main(["env", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    by_name = {setting["name"]: setting for setting in told["settings"]}
    assert (by_name["BLINKMPI_TIMEOUT"]["value"], by_name["BLINKMPI_TIMEOUT"]["from"]) == ("17", "environment")
    assert (by_name["BLINKMPI_DEBUG"]["value"], by_name["BLINKMPI_DEBUG"]["from"]) == (None, "default")
    assert told["others"]["NCCL_NVLS_ENABLE"] == "0"
    assert "HOME_OF_SECRETS" not in told["others"]
    assert told["packages"]["blinkmpi"]
    assert main.main(["env"]) == 0
    short = capsys.readouterr().out
    assert "BLINKMPI_TIMEOUT" in short
    assert "BLINKMPI_DEBUG" not in short
    assert main.main(["env", "--all"]) == 0
    assert "BLINKMPI_DEBUG" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "value", "why"), [
    ("BLINKMPI_TIMEOUT", "soon", "BLINKMPI_TIMEOUT='soon': expected a number"),
    ("BLINKMPI_TIMEUOT", "1", "did you mean BLINKMPI_TIMEOUT?"),
])  # fmt: skip
def test_a_wrong_setting_is_named(
    name: str, value: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert main.main(["env"]) == 1
    assert why in capsys.readouterr().out


def test_nothing_set_is_said() -> None:
    assert env.found({})["others"] == {}


@pytest.mark.parametrize(("words", "usage", "why"), [
    (["tpoo"], "usage: blinkmpi [-h]", "there is no command 'tpoo'; did you mean topo?"),
    (["xyzzy"], "usage: blinkmpi [-h]", "there is no command 'xyzzy'; blinkmpi -h has all"),
    (["plan", "dgx-1v", "--colective", "reduce"], "usage: blinkmpi plan", "did you mean --collective?"),
    (["explain", "dgx-1v", "--quux=3"], "usage: blinkmpi explain", "unrecognized arguments: --quux=3\n"),
    (["bench", "all_reduce", "--compair", "mpi"], "usage: blinkmpi bench", "did you mean --compare?"),
])  # fmt: skip
def test_what_may_have_been_meant(words: list[str], usage: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.parsed(words)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(usage)
    assert why in told
