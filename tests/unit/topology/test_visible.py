"""What the environment and NVML say about free GPUs."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from blinkmpi.errors import ArgumentError
from blinkmpi.topology import from_gpus
from blinkmpi.topology.gpu import Unknown
from blinkmpi.topology.machines import machine
from blinkmpi.topology.visible import available
from tests.unit.topology.test_probe import recorded

FACTS = recorded("nvml-h200x8")
BOX = from_gpus(FACTS, hosts=["node"] * 8)
UUIDS = [device.uuid for device in BOX.devices]


def not_asked() -> Mapping[str, int | Unknown]:
    raise AssertionError("NVML is not asked where the environment says it")


def users(*counts: int | Unknown) -> Mapping[str, int | Unknown]:
    return {device.bus: count for device, count in zip(BOX.devices, counts, strict=False)}


@pytest.mark.parametrize(("variables", "ranks"), [
    ({"CUDA_VISIBLE_DEVICES": "3,1"}, (1, 3)),
    ({"CUDA_VISIBLE_DEVICES": " 0, 2,-1,5"}, (0, 2)),
    ({"CUDA_VISIBLE_DEVICES": UUIDS[4]}, (4,)),
    ({"CUDA_VISIBLE_DEVICES": f"{UUIDS[6]},0"}, (0, 6)),
    ({"CUDA_VISIBLE_DEVICES": "5", "SLURM_JOB_GPUS": "1,2"}, (5,)),
    ({"SLURM_JOB_GPUS": "0-2,7"}, (0, 1, 2, 7)),
    ({"SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": "1"}, (1,)),
    ({"SLURM_JOB_GPUS": "8-15"}, tuple(range(8))),  # Slurm shows these eight alone
])  # fmt: skip
def test_the_environment_counts_first(variables: dict[str, str], ranks: tuple[int, ...]) -> None:
    found = available(BOX, variables, not_asked)
    assert found.ranks == ranks
    assert "_" in found.why


@pytest.mark.parametrize(("variables", "why"), [
    ({"CUDA_VISIBLE_DEVICES": ""}, "no GPU is visible"),
    ({"CUDA_VISIBLE_DEVICES": "-1,0"}, "no GPU is visible"),
    ({"CUDA_VISIBLE_DEVICES": "0,8"}, "there is no GPU '8', expected 0..7"),
    ({"CUDA_VISIBLE_DEVICES": "1,1"}, "twice"),
    ({"CUDA_VISIBLE_DEVICES": "GPU-0"}, "8 GPUs of this machine begin with 'GPU-0'"),
    ({"CUDA_VISIBLE_DEVICES": "MIG-1"}, "there is no GPU 'MIG-1'"),
    ({"SLURM_JOB_GPUS": "a"}, "no list of numbers"),
    ({"SLURM_JOB_GPUS": "7,8"}, "there is no GPU '8'"),
])  # fmt: skip
def test_what_the_environment_says_wrong(variables: dict[str, str], why: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        available(BOX, variables, not_asked)
    assert why in str(caught.value)
    assert str(caught.value).endswith("--from which GPUs to consider")
    assert next(iter(variables)) in str(caught.value)


def test_a_uuid_may_be_shortened() -> None:
    four = BOX.subset([0, 1, 2, 3])
    names = [replace(d, uuid=f"GPU-{letter}{d.uuid[5:]}") for d, letter in zip(four.devices, "abcd", strict=True)]
    named = replace(four, devices=tuple(names))
    assert available(named, {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-a000"}, not_asked).ranks == (0, 2)


def test_unlike_gpus_are_not_numbered_by_cuda_as_by_nvml() -> None:
    mixed = from_gpus([*FACTS[:4], *recorded("nvml-pcie-8")[4:]], hosts=["node"] * 8)
    assert len({device.name for device in mixed.devices}) == 2
    with pytest.raises(ArgumentError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        available(mixed, {"CUDA_VISIBLE_DEVICES": "0,1"}, not_asked)
    ordered = {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert available(mixed, ordered, not_asked).ranks == (0, 1)


def test_gpus_without_processes_are_free() -> None:
    found = available(BOX, {}, lambda: users(0, 2, 0, 0, 1, 0, 0, 0))
    assert (found.ranks, found.why) == ((0, 2, 3, 5, 6, 7), "no process runs on 6 of 8 GPUs, says NVML")
    some = available(BOX, {"SLURM_JOB_GPUS": ""}, lambda: users(0, 0, 1, *[Unknown("NVMLError_NoPermission: no")] * 5))
    assert some.ranks == (0, 1)
    assert some.why.endswith("; 5 left out: NVMLError_NoPermission: no")


def test_nothing_known_to_be_free_is_an_error_with_the_reason() -> None:
    with pytest.raises(ArgumentError, match="8 of 8 are in use; say with --from"):
        available(BOX, {}, lambda: users(*[1] * 8))
    with pytest.raises(ArgumentError, match=r"of 8 it is not known \(NVML does not show it\); say with --from"):
        available(machine("dgx-1v"), {}, dict)
