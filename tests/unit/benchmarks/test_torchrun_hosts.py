"""The benchmark of torchrun on two hosts beside mpiexec: what it makes of the rounds, and what it refuses."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.benchmarks.scripts import script


@pytest.fixture
def program() -> Any:
    return script("torchrun_hosts")


def test_a_row_has_the_median_of_the_ratios_of_rounds(program: Any) -> None:
    rounds = [
        {"torchrun": {"all_reduce 8": ours}, "mpiexec": {"all_reduce 8": theirs}}
        for ours, theirs in ((10.0, 20.0), (100.0, 110.0), (40.0, 30.0))
    ]
    (row,) = program.rows_of(rounds)
    assert (row["collective"], row["size"]) == ("all_reduce", 8)
    assert row["us"] == {"torchrun": [10.0, 100.0, 40.0], "mpiexec": [20.0, 110.0, 30.0]}
    assert row["median_us"] == {"torchrun": 40.0, "mpiexec": 30.0}
    assert (row["ratio"], row["least"], row["most"]) == (1.1, 0.75, 2.0)
    assert "1.10 (0.75 to 2.00)" in program.table([row])


def test_a_folder_without_mpich_is_refused_with_what_to_do(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["torchrun_hosts.py", "--mpich", str(tmp_path), "-o", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        program.main()
    assert "pip install --prefix FOLDER mpich" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
