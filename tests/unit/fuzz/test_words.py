"""Words of a command line and variables of the environment are read as they are meant, or refused with a reason."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blinkmpi.cli.numbers import fraction, whole
from blinkmpi.errors import ArgumentError, BlinkError, FormatError, SettingsError, TopologyError
from blinkmpi.launch.allocation import allocation
from blinkmpi.planning.selection import parse_algo
from blinkmpi.program.call import collective_named
from blinkmpi.topology import load, machine
from blinkmpi.topology.importers import modify, parse_gpus, parse_rates
from blinkmpi.topology.visible import available
from blinkmpi.util.launcher import launched_rank, launched_size
from blinkmpi.util.settings import KNOWN, PREFIX, Settings, read
from blinkmpi.util.text import parse_size
from tests.unit.fuzz.mutators import many, promised, spoilt_text

BOX = machine("dgx-1v")
RANGES = ("node[01-03,07],login", "rack[1-2]n[3-4]-ib", "a", "n[1-65536]")
WORDS: dict[str, tuple[Callable[[str], Any], type[BlinkError], tuple[str, ...]]] = {
    "TOPOLOGY": (load, BlinkError, ("dgx-1v", "dgx-a100:4", "cpu:8", "mi250")),
    "--gpus": (parse_gpus, TopologyError, ("1,4,5,6", "0-3,6", "0-999999", "7")),
    "--drop-link": (lambda text: modify(BOX, drop_link=[text]).check(), TopologyError, ("0-3", " 1 - 2 ")),
    "--scale": (lambda text: modify(BOX, scale=[text]).check(), TopologyError, ("pcie=0.5", "nvlink=1/20", "host=9")),
    "--rate": (lambda text: parse_rates([text]), TopologyError, ("nvlink=50", "net=12.5", "pcie=1/2")),
    "--bytes": (parse_size, ArgumentError, ("64K", "1.5M", "4G", "65536")),
    "--epsilon": (fraction, ArgumentError, ("1/20", "0.05", "5e-2")),
    "--max-trees": (whole, ArgumentError, ("4", "-1")),
    "--collective": (collective_named, SettingsError, ("allreduce", "all_reduce_perf", "Reduce_scatter_block")),
    "--algo": (parse_algo, SettingsError, ("allreduce:trees,onehop;broadcast:^mpi", "reduce:chain")),
}


@pytest.mark.slow
@pytest.mark.parametrize("flag", list(WORDS))
@many
@given(data=st.data())
def test_a_word_of_the_command_line(flag: str, data: st.DataObject) -> None:
    read_word, error, seeds = WORDS[flag]
    text = data.draw(spoilt_text(seeds))
    promised(lambda: read_word(text), error)


SCHEDULERS: tuple[dict[str, str], ...] = (
    {"SLURM_JOB_NODELIST": "node[01-03,07],login", "SLURM_TASKS_PER_NODE": "2(x3),1,4"},
    {"SLURM_NODELIST": "rack[1-2]n[3-4]-ib", "SLURM_TASKS_PER_NODE": "8(x4)"},
    {"LSB_MCPU_HOSTS": "hostA 4 hostB 2"},
    {"PBS_NODEFILE": "/nowhere/nodes"},
    {"LSB_DJOB_HOSTFILE": "/nowhere/hosts"},
)


@many
@given(data=st.data(), job=st.sampled_from(SCHEDULERS))
def test_what_a_scheduler_says(data: st.DataObject, job: dict[str, str]) -> None:
    said = {name: data.draw(st.just(text) | spoilt_text((text,))) for name, text in job.items()}
    found = promised(lambda: allocation(said), FormatError, ArgumentError)
    if not isinstance(found, BlinkError):
        assert found.ranks >= len(found.hosts) > 0
    elif isinstance(found, FormatError):
        assert any(name in str(found) for name in said) or "/nowhere" in str(found) or "hostfile" in str(found)


GIVEN = (
    {"CUDA_VISIBLE_DEVICES": "3,GPU-0,-1"}, {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    {"SLURM_JOB_GPUS": "0-2,7"}, {"SLURM_STEP_GPUS": "1"},
)  # fmt: skip


@many
@given(data=st.data(), job=st.sampled_from(GIVEN))
def test_which_gpus_a_process_was_given(data: st.DataObject, job: dict[str, str]) -> None:
    said = {name: data.draw(st.just(text) | spoilt_text((text,))) for name, text in job.items()}
    found = promised(lambda: available(BOX, said, dict), ArgumentError)
    if not isinstance(found, BlinkError):
        assert list(found.ranks) == sorted(set(found.ranks))
        assert all(0 <= rank < BOX.n for rank in found.ranks)


SETTINGS = {"DEBUG": "INFO", "TIMEOUT": "1.5", "BUFFSIZE": "8388608", "NODES": "4+4", "CMA_NTHREADS": "2",
            "CMA_DISABLE": "1", "EXECUTOR": "numpy", "CUDA_AWARE": "0", "GATE_FROM": "1048576",
            "END_WITH_LAUNCHER": "1", "TRACE": "t.json", "TRACE_EVENTS": "1024", "TIMES": "1"}  # fmt: skip


@many
@given(data=st.data(), name=st.sampled_from(sorted(KNOWN)), unknown=st.booleans())
def test_a_setting(data: st.DataObject, name: str, unknown: bool) -> None:
    key = name + data.draw(spoilt_text(("",))) if unknown else name
    text = data.draw(spoilt_text((SETTINGS.get(name, "x"), *SETTINGS.values())))
    found = promised(lambda: read({PREFIX + key: text}), SettingsError, source=PREFIX + name)
    if isinstance(found, Settings):
        assert 0 < found.timeout_s <= 1e9
        assert all(size > 0 for size in found.nodes)
        assert all(len(line) < 1000 and line.isprintable() for line in found.unknown)


@many
@given(data=st.data())
def test_what_a_launcher_says(data: st.DataObject) -> None:
    said = {name: data.draw(spoilt_text(("3",))) for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_SIZE")}
    assert (launched_rank(said) or 0) >= 0
    assert launched_size(said) >= 0
