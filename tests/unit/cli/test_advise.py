"""``blinkmpi advise``: what it prints, in JSON too, and how it fails."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from blinkmpi.cli import advise as cli_advise
from blinkmpi.cli import live as cli_live
from blinkmpi.cli import machine as cli_machine
from blinkmpi.cli import main as cli
from blinkmpi.topology import from_gpus
from blinkmpi.util.launcher import RANK_VARIABLES
from tests.unit.topology.test_probe import recorded


@pytest.fixture
def advise(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command here; (exit code, stdout, stderr)."""
    for variable in (*RANK_VARIABLES, "CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS"):
        monkeypatch.delenv(variable, raising=False)

    def call(words: str) -> tuple[int, str, str]:
        try:
            code = cli.main(["advise", *words.split()])
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_the_best_sets_come_first(advise: Any) -> None:
    code, out, _ = advise("dgx-1v --take 4 --from 0,1,4,5,6,7 --json")
    assert code == 0
    found = json.loads(out)
    assert (found["format"], found["version"], found["take"]) == ("blinkmpi.advice", 1, 4)
    assert found["free"] == [0, 1, 4, 5, 6, 7]
    best, last = found["choices"][0], found["choices"][-1]
    assert (best["gpus"], best["rate_gbps"]["allreduce"], best["of_best"]) == ([4, 5, 6, 7], 75.0, 1.0)
    assert 0 < last["of_best"] < 1
    assert sum(choice["alike"] for choice in found["choices"]) + found["not_joined"] == 15
    without = next(choice for choice in found["choices"] if choice["ring_links"] != choice["links"])
    assert (without["rate_gbps"]["allreduce"], without["links"], without["ring_links"]) == (50, "nvlink", "host+pcie")


def test_the_table_says_where_sets_lie(advise: Any) -> None:
    code, out, _ = advise("dgx-a100:2 --take 8")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if "@" in line]
    assert rows[0][:4] == ["0-7@0", "2", "171.4", "100%"]
    assert rows[1][:4] == ["0-3@0", "0-3@1", "4900", "100"]
    assert "496 sets more that no links join" in advise("mi250 --take 3")[1]
    assert "1,4,5,6" in advise("dgx-1v --gpus 1,4,5,6 --take 4")[1]


@pytest.mark.parametrize(("words", "why"), [
    ("dgx-1v --take 9", "cannot take 9 GPUs"),
    ("dgx-1v --take x", "--take: 'x' is no whole number"),
    ("dgx-1v --take 2 --from 0,9", "cannot take devices"),
    ("dgx-1v --take 2 --from 0;1", "gpus '0;1'"),
    ("dgx-1v --take 2 --from 0-3 --gpus 0-3", "leave one of them out"),
    ("cpu:4 --take 2", "CPU ranks"),
])  # fmt: skip
def test_errors_are_one_line(advise: Any, words: str, why: str) -> None:
    code, out, err = advise(words)
    assert (code, out) == (2, "")
    assert err.startswith("blinkmpi: error: ")
    assert why in err
    assert err.count("\n") == 1


def test_how_many_must_be_said(advise: Any) -> None:
    code, _, err = advise("dgx-1v")
    assert code == 2
    assert "--take" in err


class Alone:
    """What ``main`` needs of a world of one process."""

    size, rank = 1, 0

    def Split_type(self, kind: int) -> "Alone":
        return self

    def Free(self) -> None:
        """Nothing to free."""

    def allgather_bytes(self, body: bytes) -> list[bytes]:
        return [body]

    def bcast_bytes(self, body: bytes, root: int) -> bytes:
        return body


@pytest.fixture
def live(advise: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command without TOPOLOGY in one process, on a recorded DGX-1V of which GPUs 0 and 1 are used."""
    box = from_gpus(recorded("nvml-dgx-1v"), hosts=["node"] * 8)
    monkeypatch.setattr(cli_machine, "world", lambda _args: Alone())
    monkeypatch.setattr(cli_machine, "mpi", lambda: (SimpleNamespace(COMM_TYPE_SHARED=0), ""))
    monkeypatch.setattr(cli_live, "live_machine", lambda world, node: box)
    monkeypatch.setattr(cli_advise.Nvml, "users", lambda _: {d.bus: int(d.index < 2) for d in box.devices})
    return advise


def test_on_the_live_machine_free_gpus_are_found(live: Any) -> None:
    code, out, _ = live("--take 4 --json")
    found = json.loads(out)
    assert (code, found["free"]) == (0, [2, 3, 4, 5, 6, 7])
    assert found["choices"][0]["gpus"] == [4, 5, 6, 7]
    assert found["why_free"] == "no process runs on 6 of 8 GPUs, says NVML"
    code, out, _ = live("--take 4")
    assert code == 0
    assert "chosen from 2,3,4,5,6,7 (no process runs on 6 of 8 GPUs, says NVML)" in out
    assert json.loads(live("--take 4 --from 0-3 --json")[1])["free"] == [0, 1, 2, 3]


def test_what_the_job_was_given_counts_before_what_is_free(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_GPUS", "0,1,2,3,4")
    found = json.loads(live("--take 4 --json")[1])
    assert (found["free"], found["why_free"]) == ([0, 1, 2, 3, 4], "SLURM_JOB_GPUS=0,1,2,3,4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    code, out, err = live("--take 4")
    assert (code, out) == (2, "")
    assert "cannot take 4 GPUs" in err
    assert "3 GPUs to choose from" in err
