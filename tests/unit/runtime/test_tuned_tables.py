"""A plan on GPUs takes the rows of a tuned table, if they were measured with the kernels that are there."""

import datetime
from pathlib import Path
from typing import Any

import pytest

from blinkmpi.planning.plan import Plan, Rule
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.tuned_table import TunedTable
from blinkmpi.runtime.bootstrap import Options, agree_on_plan
from blinkmpi.topology import machine, modify
from blinkmpi.transport.cuda.kernels import compiler
from blinkmpi.util.settings import read
from tests.unit.topology.test_gather import on_ranks

PAIR = modify(machine("hgx-h200"), gpus="0,1")
ROW = Rule("allreduce", 0, "onehop", 1 << 20, 7, "measured by blinkmpi tune")


@pytest.mark.parametrize("same", [True, False])
def test_a_table_knows_its_kernels(tmp_path: Path, capfd: pytest.CaptureFixture[str], same: bool) -> None:
    kernels = compiler.kernels_digest() if same else "of other kernels"
    today = datetime.date.today().isoformat()
    table = TunedTable("NVIDIA H200", 2, PAIR.name, today, {}, (ROW,), kernels)
    path = tmp_path / "tuned.json"
    path.write_text(table.to_json())

    def work(comm: Any, _: Any) -> tuple[bool, bool]:
        plans = agree_on_plan(comm, PAIR, Options(), read({}), "onehop", path)
        plans.with_parts([("allreduce", 0), ("broadcast", 0), ("broadcast", 1)])
        return ROW in plans.plan.rules, any(rule.collective == "broadcast" for rule in plans.plan.rules)

    assert on_ranks([0, 0], work) == [(same, True)] * 2
    said = capfd.readouterr().err
    assert said.count("measured with other kernels") == (not same), "once, by the rank that plans"


def test_the_digest_is_of_the_kernels_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in compiler.KERNELS.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    before = compiler.kernels_digest()
    monkeypatch.setattr(compiler, "KERNELS", tmp_path)
    digest = compiler.kernels_digest.__wrapped__
    assert digest() == before
    (tmp_path / "stages.cu").write_text((tmp_path / "stages.cu").read_text() + "// changed\n")
    assert digest() != before


def test_a_given_plan_that_was_made_without_the_gpus_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    for gpus, warned in (("", True), ("onehop", False)):
        plan = make_plan(PAIR, gpus=gpus, collectives=["allreduce", "reduce_scatter"])  # type: ignore[arg-type]
        for job, warns in (("onehop", warned), ("slots", False)):

            def work(comm: Any, _: Any, job: Any = job, plan: Plan = plan) -> Plan:
                return agree_on_plan(comm, PAIR, Options(plan=plan), read({}), job).plan

            assert on_ranks([0, 0], work) == [plan, plan]
            assert capfd.readouterr().err.count("knows no protocol but slots") == warns
