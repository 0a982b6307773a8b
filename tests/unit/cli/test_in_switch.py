"""What the commands say of sums in the switches: both bounds, a packing, a simulation, and that nothing runs them."""

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(name="blink")
def _in_one_line(blink: Any) -> Any:
    """Run a command here; (exit code, stdout with single blanks, stderr)."""

    def call(text: str) -> tuple[int, str, str]:
        code, out, err = blink(text)
        return code, out if "--json" in text else " ".join(out.split()), err

    return call


def test_a_machine_is_shown_with_both_bounds_if_its_switches_make_sums(blink: Any) -> None:
    code, out, err = blink("topo hgx-h100")
    assert (code, err) == (0, "")
    assert "NVSwitch (vertex 8) reduces and multicasts (SHARP)" in out
    assert "trees of copies at most 257.1 GB/s: GPU 0 |" in out
    assert "in switches at most 450 GB/s with sums in the switches (SHARP), not executed here: GPU" in out
    for text in ("topo dgx-a100", "topo hgx-h100 --sharp none"):
        _, other, _ = blink(text)
        assert "SHARP" not in other
        assert "at most" not in other


def test_a_machine_whose_links_join_nothing_says_so_in_place_of_bounds(blink: Any) -> None:
    code, out, err = blink("topo hgx-h100 --drop-link 0-8")
    assert (code, err) == (0, "")
    assert "allreduce needs links that join all 8 ranks" in out


@pytest.mark.parametrize("flags", ["", "--collective allreduce"])
def test_a_plan_says_beside_its_own_rate_what_the_switches_could_do(blink: Any, flags: str) -> None:
    code, out, err = blink(f"plan b200 {flags}")
    assert (code, err) == (0, "")
    assert "900 GB/s over nvlink, equal to its bound, with sums in the switches (SHARP), not executed here" in out
    assert "in the switches" not in blink(f"plan b200 --sharp none {flags}")[1].lower()


def test_of_too_many_ranks_the_bound_alone_is_said_with_the_reason(blink: Any) -> None:
    code, out, err = blink("plan hgx-h100:33 --collective allreduce")
    assert (code, err) == (0, "")
    assert (
        "at most 400 GB/s with sums in the switches (SHARP), not executed here (not packed: 264 ranks; expected" in out
    )


def test_the_report_has_both_and_says_that_one_is_not_executed(blink: Any) -> None:
    found = json.loads(blink("plan hgx-h100:4 --sharp nvswitch,net --collective allreduce --json")[1])
    beside = found["allreduce_in_switches"]
    assert found["rate_gbps"] == pytest.approx(8000 / 31)
    assert (beside["rate_gbps"], beside["bound_gbps"], beside["scheme"]) == (400, 400, "sharp")
    assert beside["executed"] is False
    assert len(beside["trees"]) == 8
    assert "allreduce_in_switches" not in json.loads(blink("plan hgx-h100 --collective broadcast --json")[1])


def test_the_method_is_taken_by_name_and_its_trees_name_the_switches(blink: Any, tmp_path: Path) -> None:
    code, out, err = blink("plan hgx-h100 --collective allreduce --method sharp")
    assert (code, err) == (0, "")
    assert "sharp: sums in 1 switch; meets the bound; not executed here" in out
    assert "450 GB/s, equal to the bound of any schedule at the rates listed for these links" in out
    assert "0>NVSwitch NVSwitch>1,2,3,4,5,6,7" in out
    picture = tmp_path / "sharp.svg"
    assert blink(f"plan hgx-h100 --collective allreduce --method sharp --plot {picture}")[0] == 0
    assert picture.read_text().startswith("<?xml")


def test_the_table_of_all_leaves_the_other_collectives_out(blink: Any) -> None:
    out = blink("plan hgx-h100 --method sharp")[1]
    assert "allreduce sharp 1 2 450 450 yes" in out
    assert "not by this method: broadcast, reduce, allgather" in out


@pytest.mark.parametrize(("command", "message"), [
    ("plan dgx-a100 --collective allreduce --method sharp", "no switch on its nvlink links reduces and multicasts"),
    ("plan hgx-h100 --collective broadcast --method sharp", "sums in the switches are for allreduce, not broadcast"),
    ("plan hgx-h100 --collective allreduce --method sharp --lang", "no program of ranks makes; leave --lang"),
    ("plan hgx-h100 --collective allreduce --method sharp --pareto", "leave --lang and --pareto out"),
    ("simulate hgx-h100 --collective gather --in-switch", "sums in the switches are for allreduce, not gather"),
    ("simulate dgx-2 --in-switch", "no switch on its nvlink links reduces and multicasts"),
    ("simulate hgx-h100 --in-switch --algorithm x.py", "leave --algorithm out"),
    ("topo hgx-h100 --sharp pcie", "no switch of kind 'pcie' that can reduce and multicast (SHARP)"),
    ("topo dgx-1v --sharp net", "of its kinds of switches these can: none"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(blink: Any, command: str, message: str) -> None:
    code, out, err = blink(command)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_call_is_run_on_every_ranks_data_and_priced(blink: Any) -> None:
    code, out, err = blink("simulate hgx-h100 --in-switch --bytes 1M")
    assert (code, err) == (0, "")
    assert "8 ranks of hgx-h100, scheme sharp, not executed here" in out
    assert "every element right, against NumPy" in out
    found = json.loads(blink("simulate hgx-h100 --in-switch --bytes 1G --json")[1])
    copies = json.loads(blink("simulate hgx-h100 --bytes 1G --json")[1])
    assert (found["scheme"], found["executed"], "executed" in copies) == ("sharp", False, False)
    assert copies["seconds"] / found["seconds"] == pytest.approx(7 / 4, rel=0.01)
