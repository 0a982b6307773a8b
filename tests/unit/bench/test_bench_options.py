"""The benchmark's flags: what they mean, and what is refused with a reason."""

import argparse
import re

import pytest

from blinkmpi.bench.options import PEER_MEMORY, PEERS, add_flags, memory_for, read
from blinkmpi.errors import ArgumentError, BlinkError, SettingsError


def flags(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(words)


def test_defaults_are_those_of_nccl_tests() -> None:
    options = read(flags("all_reduce"), 4)
    assert options.collective == "allreduce"
    assert options.sizes == (32 << 20,)
    assert options.series == (("float32", "sum", -1),)
    assert (options.timing.wanted, options.timing.warmup, options.timing.checks) == (20, 1, 1)
    assert options.peers == ()
    assert options.executors == ("auto",)


def test_steps() -> None:
    assert read(flags("all_reduce", "-b", "1K", "-e", "20K", "-f", "4"), 2).sizes == (1024, 4096, 16384)
    assert read(flags("all_reduce", "-b", "0", "-e", "2K", "-i", "1K"), 2).sizes == (0, 1024, 2048)


def test_all_types_and_operations_leave_out_what_is_not_defined() -> None:
    series = read(flags("reduce_perf", "-d", "all", "-o", "all", "-r", "-1"), 2).series
    assert ("int8", "avg", 0) in series
    assert ("bfloat16", "avg", 1) in series
    assert len(series) == 10 * 5 * 2
    assert read(flags("Bcast", "-r", "1"), 2).series == (("float32", "", 1),)


@pytest.mark.parametrize(("words", "message"), [
    ("-G -1", "at least 0"), ("-G 2 -z 1", "leave one"), ("-y 1", "stream of their own"), ("-g 2", "one device"),
    ("-t 4", "one thread"), ("-R 1", "NCCL alone registers"), ("-r 4", "0..3"), ("-o mulsum", "device API"),
    ("-o xor", "unknown"), ("-d f8e4m3", "8-bit"), ("-d quad", "unknown"),
    ("-b 2M -e 1M", "more than"), ("-b 0 -f 2", "never reach"),
    ("-i 0", "never reach"), ("-n 0", "at least 1"), ("-T 0", "more than 0"),
    ("--compare gloo", "use mpi, nccl, symm_mem"), ("--executor rust", "use auto, c, numpy"),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_with_a_reason(words: str, message: str) -> None:
    with pytest.raises(BlinkError, match=re.escape(message)):
        read(flags("all_reduce" if "-r" not in words.split() else "reduce", *words.split()), 4)


def test_a_collective_without_data_or_name_is_refused() -> None:
    with pytest.raises(ArgumentError, match="cannot time barrier"):
        read(flags("barrier"), 2)
    with pytest.raises(SettingsError, match="unknown"):
        read(flags("all_to_some"), 2)


@pytest.mark.parametrize(("words", "gpu", "memory"), [
    ("", False, "host"),
    ("", True, "gpu"),
    ("--memory host --compare mpi", True, "host"),
    ("-R 0 -G 3 --persistent --compare nccl,symm_mem", True, "gpu"),
    ("-R 0", False, "host"),
])  # fmt: skip
def test_buffers_lie_on_gpus_where_the_ranks_have_some(words: str, gpu: bool, memory: str) -> None:
    args = flags("all_reduce", *words.split())
    assert memory_for(args, read(args, 2), gpu=gpu) == memory


@pytest.mark.parametrize(("words", "gpu", "message"), [
    ("--memory gpu", False, "have no GPUs"),
    ("-G 1", False, "no CUDA graphs"),
    ("-G 1 --memory host", True, "no CUDA graphs"),
    ("-R 2", False, "no device memory"),
    ("--persistent", False, "GPU memory"),
    ("--compare nccl", False, "gpu memory only; leave it out"),
    ("--compare mpi,nccl", True, "--compare mpi: it is measured on host memory only; add --memory host"),
])  # fmt: skip
def test_what_ranks_without_gpus_cannot_do_is_refused(words: str, gpu: bool, message: str) -> None:
    args = flags("all_reduce", *words.split())
    with pytest.raises(ArgumentError, match=re.escape(message)):
        memory_for(args, read(args, 2), gpu=gpu)
    assert set(PEER_MEMORY) == set(PEERS)


def test_minimum_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TESTS_MIN_BW", "2")
    assert read(flags("all_reduce"), 2).minimum_bandwidth == 2
    monkeypatch.setenv("BLINKMPI_TESTS_MIN_BW", "3.5")
    assert read(flags("all_reduce"), 2).minimum_bandwidth == 3.5
    monkeypatch.setenv("BLINKMPI_TESTS_MIN_BW", "fast")
    with pytest.raises(SettingsError, match="GB/s"):
        read(flags("all_reduce"), 2)
