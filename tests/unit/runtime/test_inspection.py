"""What is said of calls on GPUs, without GPUs."""

from types import SimpleNamespace
from typing import Any

from blinkmpi.planning.planner import make_plan
from blinkmpi.planning.selection import choose
from blinkmpi.program.call import Call, call_of_bytes
from blinkmpi.runtime import inspection
from blinkmpi.runtime.outlook import Outlook
from blinkmpi.topology import machine, modify

GPUS = modify(machine("hgx-h200"), gpus="0-3")


def on_gpus() -> Any:
    """What a communicator of GPUs knows, by its own table."""
    plan = make_plan(GPUS, gpus="onehop", collectives=["allreduce", "reduce_scatter"])

    def rule(call: Call, *, registered: bool = True, plan: Any) -> Any:
        return choose(plan, call, registered=registered)

    gpus = SimpleNamespace(
        gpu=SimpleNamespace(name="NVIDIA H200"), here=None, emulated=False, forecasts=None, machine=GPUS, rule=rule,
        planned=SimpleNamespace(about=lambda *_: plan),
    )  # fmt: skip
    found = SimpleNamespace(gpus=gpus, main=gpus, emulated=False, step_rates=None, forecasts=None)
    found.executor = property.__get__(vars(Outlook)["executor"], found)
    return found


def test_what_other_than_registered_buffers_take_is_said_where_it_differs() -> None:
    for nbytes, differs in ((1 << 20, ""), (16 << 20, "onehop by slots"), (256 << 20, "chain by slots")):
        said = inspection.explanation(on_gpus(), call_of_bytes("allreduce", 4, nbytes))
        assert said.live[0] == "CUDA kernels on NVIDIA H200"
        found = [line for line in said.live if "not registered" in line]
        assert found == ([f"buffers that are not registered: {differs}"] if differs else [])
