"""Times of calls on CPU ranks from the costs of their steps: the model, with given costs, and what is kept of them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from blinkmpi.errors import FormatError, SettingsError
from blinkmpi.forecast import rates as step_rates
from blinkmpi.forecast import simulate
from blinkmpi.forecast.rates import Hardware, StepCost, StepRates, file_of, hardware_of, read
from blinkmpi.forecast.steps import SHARED_BYTES, HostSteps
from blinkmpi.planning.plan import Rule
from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import program_for
from blinkmpi.runtime.context import Context
from blinkmpi.topology import machine
from blinkmpi.transport.host.single_copy import exported_channels, in_long_chunks
from tests.unit.trees.packings import even_call

HERE = Hardware("a processor", 2, 2, "6.1", "C")
MIB = 1 << 20


def cost(kind: str, us: float, nbytes: int = MIB, *, collective: str = "allgather", in_place: bool = False) -> StepCost:
    return StepCost(collective, in_place, nbytes, kind, us, us, us)


def kept(*costs: StepCost, meeting_us: float = 2.0) -> StepRates:
    return StepRates(HERE, "2026-11-23", meeting_us, costs)


def steps_of(collective: str, n: int, *, cma: bool, count: int = 1 << 20) -> HostSteps:
    """The steps of a call of float32; ``count`` elements of a vector, or of a block."""
    plan = make_plan(machine(f"cpu:{n}"), mpi=False)
    call = even_call(collective, n, count, root=0)
    rule = replace(plan.rule(collective, 1 << 40), protocol="cma" if cma else "slots", chunk_bytes=1 << 18)
    program = program_for(plan, call, rule)
    exported = exported_channels(program) if cma else {}
    return HostSteps(in_long_chunks(program, exported, 4), exported, stream=False, threads=1)


def us_of(steps: HostSteps, us: float, cores: int) -> float:
    return simulate.seconds(steps, lambda _: us, cores=cores, meeting_us=0.0) * 1e6


# ---------------------------------------------------------------- the model


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_that_only_copy_take_as_long_as_their_bytes(n: int) -> None:
    """Each rank of an allgather by cma copies all blocks and waits for nobody; two on a core take twice as long."""
    steps = steps_of("allgather", n, cma=True)
    alone = us_of(steps, 100.0, cores=n)
    assert alone == pytest.approx(100.0 * 4 * n)  # 4 MiB a block
    assert us_of(steps, 100.0, cores=n // 2) == pytest.approx(2 * alone)
    assert us_of(steps, 100.0, cores=64) == pytest.approx(alone)


def test_a_root_that_only_waits_leaves_its_core_to_another_rank() -> None:
    """Of three readers on two cores, two share one, whoever shares the other with the root."""
    steps = steps_of("broadcast", 4, cma=True)
    assert us_of(steps, 100.0, cores=4) == pytest.approx(400.0)
    assert us_of(steps, 100.0, cores=2) == pytest.approx(800.0)


@pytest.mark.parametrize("cma", [True, False])
@pytest.mark.parametrize("collective", ["allreduce", "reduce_scatter", "broadcast", "allgather", "reduce"])
@pytest.mark.parametrize("cores", [1, 2, 3, 4])
def test_no_call_beats_its_work_nor_leaves_all_cores_idle(collective: str, cma: bool, cores: int) -> None:
    steps = steps_of(collective, 4, cma=cma)
    work = [sum(100.0 * steps.mib(stage) for stage, waits in steps.rows(r) if not waits) for r in range(4)]
    found = us_of(steps, 100.0, cores)
    assert max(sum(work) / cores, *work) - 1e-6 <= found <= sum(work) + 1e-6


def test_a_long_call_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = steps_of("allreduce", 4, cma=False, count=1 << 22)
    whole = us_of(steps, 100.0, 2)
    monkeypatch.setattr(simulate, "MOST_STEPS", 200)
    assert us_of(steps, 100.0, 2) == pytest.approx(whole, rel=0.05)


def test_kinds_say_what_a_step_does() -> None:
    reduced = steps_of("allreduce", 4, cma=True)
    kinds = {reduced.kind(stage) for stage, waits in reduced.rows(0) if not waits}
    assert kinds == {"sum of float32: 3cma+own > result", "cma > result"}
    slots = steps_of("allreduce", 4, cma=False)
    assert {slots.kind(stage) for stage, _ in slots.rows(0)} == {
        "own > slot", "sum of float32: own+3slot > result+slot", "slot > result",
    }  # fmt: skip
    shared = HostSteps(steps_of("broadcast", 2, cma=True).program, {0: None}, stream=True, threads=2)  # type: ignore[dict-item]
    (stage,) = [stage for stage, waits in shared.rows(1) if not waits]
    assert stage.count * 4 >= SHARED_BYTES
    assert shared.kind(stage) == "cma > result past the caches, two threads"


def test_a_forecast_needs_the_cost_of_every_kind() -> None:
    steps = steps_of("allgather", 2, cma=True)
    own, other = cost("own > result", 50.0), cost("cma > result", 150.0)
    rule = Rule("allgather", 0, "direct")
    known, unknown = (simulate.BySteps(some, lambda *_: steps) for some in (kept(own, other), kept(own)))
    assert known.seconds(steps.program.call, rule) == pytest.approx((2.0 + 4 * 50 + 4 * 150) * 1e-6)
    assert unknown.seconds(steps.program.call, rule) is None


# ---------------------------------------------------------------- costs


def test_a_cost_lies_between_those_of_the_lengths_beside_it() -> None:
    some = kept(cost("x", 10.0), cost("x", 30.0, 4 * MIB), cost("x", 90.0, collective="broadcast"))
    assert some.cost("allgather", 2 * MIB, "x", in_place=False) == pytest.approx(20.0)
    assert some.cost("allgather", 64 * MIB, "x", in_place=False) == 30.0
    assert some.cost("allgather", 1, "x", in_place=True) == 10.0
    assert some.cost("broadcast", 4 * MIB, "x", in_place=False) == 90.0
    assert some.cost("gather", MIB, "x", in_place=False) is not None
    assert some.cost("allgather", MIB, "y", in_place=False) is None


def test_the_fastest_pass_is_that_of_an_operand_that_moves() -> None:
    fold = cost("sum of float32: 3cma+own > result", 200.0)
    still = cost("own > result", 1.0, in_place=True)
    assert kept(fold, still, cost("cma > result", 60.0)).fastest_pass(MIB) == 50.0
    assert kept(fold).fastest_pass(4 * MIB) is None


def test_newer_costs_take_the_place_of_those_of_their_collective() -> None:
    old = kept(cost("x", 1.0), cost("x", 2.0, collective="broadcast"))
    both = old.joined(kept(cost("x", 3.0), meeting_us=9.0))
    assert (both.meeting_us, [(c.collective, c.us) for c in both.costs]) == (
        9.0,
        [("broadcast", 2.0), ("allgather", 3.0)],
    )


# ---------------------------------------------------------------- files


def test_what_was_kept_is_read_where_it_was_measured(tmp_path: Path) -> None:
    path = file_of(tmp_path, HERE)
    assert read(path, HERE) is None
    some = kept(cost("x", 10.5))
    path.write_text(some.to_json())
    assert read(path, HERE) == some
    assert file_of(tmp_path, replace(HERE, ranks=4)) != path
    with pytest.raises(SettingsError, match=r"was measured with 2 ranks on 2 cores of a processor.*blinkmpi tune"):
        read(path, replace(HERE, cpu="another"))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", kept(cost("x", -1.0)).to_json(), kept(cost("x", 1.0, 0)).to_json(), kept().to_json()[:-40]]
)
def test_a_file_that_is_spoilt_is_an_error_that_names_it(text: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"steps\.json"):
        read(path, HERE)


def test_what_cannot_be_read_is_said_and_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINKMPI_CACHE_DIR", str(tmp_path))
    said: list[str] = []
    host = SimpleNamespace(executor_reason="C")
    job = SimpleNamespace(forecasts=True, n=2, host=host, log_once=said.append)
    own = hardware_of(2, "C")
    path = file_of(tmp_path, own)
    of = Context.step_rates.func
    assert of(job) is None
    assert said == []  # there is no file
    path.write_text("{")
    assert of(job) is None
    assert path.name in said.pop()
    path.write_text(kept(cost("x", 1.0)).to_json())
    assert of(job) is None
    assert "was measured with" in said.pop()
    path.write_text(replace(kept(cost("x", 1.0)), hardware=own).to_json())
    assert of(job) is not None
    assert said == []
    assert step_rates.FORMAT_VERSION == 1
