"""What was found in readers: each ended in an exception of Python, after many seconds, or with all memory in use."""

import argparse
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blinkmpi.bench.options import MOST_SIZES, add_flags
from blinkmpi.bench.options import read as read_flags
from blinkmpi.bench.sweep import file as sweep_file
from blinkmpi.bench.sweep.file import Resources, expand, node_sizes
from blinkmpi.bench.sweep.file import parse as parse_sweep
from blinkmpi.cli.numbers import fraction
from blinkmpi.errors import ArgumentError, BlinkError, FormatError, PlanError, SettingsError, TopologyError
from blinkmpi.launch import hostfile
from blinkmpi.launch.allocation import allocation, nodelist, tasks_per_node
from blinkmpi.planning.planner import make_plan
from blinkmpi.runtime.bootstrap import read_plan
from blinkmpi.topology import Topology, load, machine
from blinkmpi.topology.importers import modify, parse_gpus
from blinkmpi.util import files
from blinkmpi.util.codec import Value, loads
from blinkmpi.util.files import read_file
from blinkmpi.util.launcher import launched_rank, launched_size
from blinkmpi.util.settings import read
from blinkmpi.util.text import brief, quoted
from tests.harness import wait_until
from tests.unit.fuzz.mutators import CALLS, promised
from tests.unit.topology.test_importers import smi

DIGITS = "9" * 10**6
MACHINE = machine("dgx-1v").subset([0, 1, 2, 3])
JSON = MACHINE.to_json()
PLAN = make_plan(MACHINE, roots=[0], collectives=["broadcast"]).to_json()
ONE_GPU = '<system><cpu numaid="0"><pci busid="0:1:0">{}</pci></cpu></system>'
LAUGHS = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10 if i else "ha" * 99}">' for i in range(12))


def gpus(count: int) -> str:
    """Our JSON of GPUs without links."""
    device = '{"kind": "gpu", "node": 0, "index": 1}'
    return f'{{"format": "blinkmpi.topology", "version": 1, "name": "x", "devices": [{",".join([device] * count)}]}}'


FILES: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "deep": (load, '{"a":' * 100_000, "nested too deeply"),
    "deep plan": (read_plan, '{"a":[' * 100_000, "nested too deeply"),
    "number of 128 bits": (load, JSON.replace("25000", "9" * 38, 1), r"\$\.links\[0\]\.lane_mbps: 9999"),
    "rate": (load, JSON.replace("25000", "9000000000000000000", 1), r"links\[0\] .* at most 1000000000000"),
    "long digits": (load, JSON.replace("25000", DIGITS, 1), "not a valid topology"),
    "long name": (load, JSON.replace('"dst": 1', '"dst": 7').replace("dgx-1v", "x" * 10**6), "vertices are"),
    "lines in a key": (load, JSON.replace('"name"', '"na\\nme"', 1), r"unknown field `na\\nme`"),
    "inconsistent": (load, JSON.replace('"src": 0', '"src": 99', 1), "FILE.*vertices are 0"),
    "GPUs": (load, gpus(100_000), "100000 devices; expected at most 65536"),
    "text": (load, "hello", "neither our JSON, nor NCCL's XML"),
    "wide text": (load, "hello " * 10**6, "neither our JSON, nor NCCL's XML"),
    "laughs": (load, f"<!DOCTYPE l [{LAUGHS}]>\n<system>&a11;</system>".replace("<!D", "<?xml?><!D", 1), "FILE"),
    "entity": (load, "<system>\n<!DOCTYPE l [<!ENTITY a 'b'>]>&a;</system>", "<!DOCTYPE ...> out"),
    "deep XML": (load, f"<system><cpu numaid='0'>{'<pci busid=`0:1:0`>'.replace('`', chr(34)) * 5000}", "not XML"),
    "deep bridges": (load, ONE_GPU.format("<pci busid='0:1:0'>" * 5000 + "</pci>" * 5000), "more than 32 others"),
    "NVLinks": (load, ONE_GPU.format('<gpu><nvlink target="0:2:0" tclass="0x03" count="1000000000"/></gpu>'),
                r"count='1000000000': expected a whole number of 0\.\.512"),
    "digits in XML": (load, ONE_GPU.format(f'<gpu dev="{"9" * 5000}"/>'), "FILE.*<gpu dev=.*expected a whole number"),
    "bus id": (load, ONE_GPU.format("<gpu/>").replace("0:1:0", "no\nbus"), "FILE.*<pci busid=.*no PCI bus id"),
    "two GPUs on one bus": (load, ONE_GPU.format("<gpu/>").replace("</cpu>", "<pci busid='0:1:0'><gpu/></pci></cpu>"),
                            "FILE.*lines 1 and 1: two <gpu> at 0000:01:00.0"),
    "GPUs in XML": (load, ONE_GPU.format("").replace("</cpu>", "<pci busid='0:2:0'><gpu/></pci>" * 3000 + "</cpu>"),
                    "more than 256 <gpu>"),
    "sm": (load, ONE_GPU.format('<gpu sm="7"><nvlink target="0:2:0" tclass="0x068000" count="1"/></gpu>'),
           "FILE.*rate unknown"),
    "NV": (load, smi("X NV999999999", "NV999999999 X"), "row GPU0, column GPU1"),
    "columns": (load, "\t".join(f"GPU{i}" for i in range(100_000)), "100000 GPUs; expected at most 255"),
    "slots": (hostfile.read, f"a slots={'9' * 5000}", "FILE.txt:1: .* slots; expected at least 1"),
    "hosts": (hostfile.read, "a\n" * 10**6, "expected at most 131072 lines"),
    "host name": (hostfile.read, "a" * 10**6, "FILE.txt:1: .*expected a host's name"),
    "binary": (hostfile.read, "\0\n\x1b[1m", r"FILE.txt:1: '\\x00'"),
    "digits in TOML": (sweep_file.load, f"iters = {'9' * 5000}", "no TOML"),
    "deep TOML": (sweep_file.load, f"flags = {'[' * 10_000}", "no TOML"),
    "key": (sweep_file.load, f"{'x' * 10**5} = 1", "there is no such key"),
    "wide number": (sweep_file.load, f"iters = {1 << 100}", "iters"),
    "endless": (sweep_file.load, "timeout = inf", "timeout: inf s"),
    "flag": (sweep_file.load, 'flags = ["-n\\u0000"]', "a command line cannot hold this"),
    "variable": (sweep_file.load, 'env = { "A=B" = "1" }', "env: 'A=B' is no name of a variable"),
    "weight": (read_plan, PLAN.replace('"weight": "', '"weight": "-', 1), r"packings\[0\].*trees\[0\].*weight -"),
    "long weight": (read_plan, PLAN.replace('"weight": "', f'"weight": "{"9" * 4000}', 1), "expected a fraction"),
    "exponent": (read_plan, PLAN.replace('"rate": "', '"rate": "1e999999999', 1), "expected a fraction"),
    "order": (read_plan, PLAN.replace('"dst": 1', '"dst": 0'), "parents first"),
    "divisor": (read_plan, PLAN.replace('"divisor": "1"', '"divisor": "0"'), "expected more than 0"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", list(FILES))
def test_a_file(what: str, tmp_path: Path) -> None:
    read_it, text, said = FILES[what]
    file = tmp_path / "FILE.txt"
    file.write_text(text)
    found = promised(lambda: read_it(str(file)), FormatError, TopologyError, PlanError, source="FILE.txt")
    with pytest.raises(BlinkError, match=said):
        raise found if isinstance(found, BlinkError) else AssertionError(found)


def sizes(*words: str) -> tuple[int, ...]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_flags(parser.parse_args(["all_reduce", *words]), 2).sizes


def runs(text: str) -> int:
    return len(expand(parse_sweep(text, source="x"), Resources(nodes=2, slots=4, gpus=False), source="x"))


NODES = ", ".join(f'"{i}+1"' for i in range(1, 2000))
WORDS: dict[str, tuple[Callable[[], Any], type[BlinkError], str]] = {
    "nodes of digits": (lambda: read({"BLINKMPI_NODES": "9" * 5000}), SettingsError, "BLINKMPI_NODES='999"),
    "unknown setting": (lambda: read({"BLINKMPI_DEBUG": DIGITS}), SettingsError, "BLINKMPI_DEBUG='999"),
    "gpus": (lambda: parse_gpus(",".join(["0-999999"] * 1000)), TopologyError, "more than 65536 devices"),
    "scale": (lambda: modify(MACHINE, scale=[f"nvlink={DIGITS}"]), TopologyError, "expected KIND=FACTOR"),
    "scale up": (lambda: modify(MACHINE, scale=[f"nvlink={'9' * 300}"]), TopologyError, "at most 1000000000000"),
    "link": (lambda: modify(MACHINE, drop_link=[f"{DIGITS}-0"]), TopologyError, "expected two vertices"),
    "exponent": (lambda: fraction("1e-999999999"), ArgumentError, "is no number"),
    "digits": (lambda: fraction(DIGITS), ArgumentError, "is no number"),
    "name": (lambda: machine("x" * 10**6), TopologyError, "unknown machine"),
    "long path": (lambda: load("x/" * 10**5), TopologyError, "cannot read topology file .*too long"),
    "tasks": (lambda: tasks_per_node(",".join(["1(x65536)"] * 10_000)), FormatError, "more than 65536 nodes"),
    "tasks of digits": (lambda: tasks_per_node("9" * 5000), FormatError, "SLURM_TASKS_PER_NODE"),
    "zeros": (lambda: nodelist(f"n[{'0' * 4000}1-65000]"), FormatError, "cannot read '000"),
    "long names": (lambda: nodelist(f"{'n' * 10**5}[1-65000]"), FormatError, "no name of a machine"),
    "ranges": (lambda: nodelist(f"n[{','.join(['1-65000'] * 10_000)}]"), FormatError, "more than 65536 names"),
    "LSF": (lambda: allocation({"LSB_MCPU_HOSTS": "a " + "9" * 5000}), FormatError, "LSB_MCPU_HOSTS"),
    "LSF without hosts": (lambda: allocation({"LSB_MCPU_HOSTS": "\n"}), FormatError, "no host in it"),
    "sizes": (lambda: sizes("-b", "0", "-e", "1G", "-i", "1"), ArgumentError, f"more than {MOST_SIZES} sizes"),
    "long size": (lambda: sizes("-b", DIGITS), ArgumentError, "expected a number of bytes"),
    "runs": (lambda: runs(f"nodes = [{NODES}]\nexecutors = ['auto', 'c', 'numpy']"), FormatError, "4096 runs"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", list(WORDS))
def test_a_word(what: str) -> None:
    work, error, said = WORDS[what]
    found = promised(work, error, calls=CALLS if what == "runs" else CALLS // 10)
    with pytest.raises(error, match=said):
        raise found if isinstance(found, BlinkError) else AssertionError(found)


def test_numbers_that_no_launcher_writes_are_none() -> None:
    assert launched_rank({"PMI_RANK": "9" * 5000}) is None
    assert launched_size({"PMI_SIZE": "9" * 5000}) == 1
    assert launched_rank({"PMI_RANK": "²", "PMIX_RANK": "3"}) == 3
    assert node_sizes("9" * 5000) == ()
    assert read({}).nodes == (), "no environment at all is not this process's"


def test_a_pipe_is_read_to_its_end_if_somebody_writes(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    begin, rest = JSON[:100].encode(), JSON[100:].encode()
    end = os.open(pipe, os.O_RDWR)  # which waits for no reader
    os.write(end, begin)

    def opened() -> int:
        return sum(os.path.realpath(f"/proc/self/fd/{name}") == str(pipe) for name in os.listdir("/proc/self/fd"))

    def write() -> None:
        wait_until(lambda: opened() > 1, "the reader comes")
        os.write(end, rest)
        os.close(end)

    writing = threading.Thread(target=write)
    writing.start()
    found = load(str(pipe))
    writing.join()
    assert found == MACHINE


def test_a_pipe_whose_writer_writes_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.1)
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    late = threading.Timer(5, os.write, (writer, b"text"))  # who waits for ever gets this
    late.start()
    with pytest.raises(OSError, match=r"its writer took more than 0\.1 s"):
        read_file(tmp_path / "pipe")
    assert late.is_alive(), "it was given up because something came"
    late.cancel()
    late.join()
    os.close(writer)


def test_a_file_of_the_kernel_has_no_size_and_is_read() -> None:
    assert read_file("/proc/self/cmdline")
    with pytest.raises(OSError, match="more than 1 MiB"):
        read_file("/dev/zero")


@pytest.mark.slow
def test_a_large_valid_file_is_read_soon() -> None:
    text = machine("dgx-2:1024").to_json()
    found = promised(lambda: Topology.from_json(text, source="x"))
    assert isinstance(found, Topology)
    assert found.n == 16384


class Defaults(Value, frozen=True):
    """A value with all kinds of fields."""

    name: str
    more: tuple[str, ...] = ()
    last: int = 3


def test_a_document_keeps_its_defaults_and_names_its_fields() -> None:
    head = '{"format": "blinkmpi.x", "version": 1, "name": "n"'
    assert loads(head + "}", Defaults, kind="x", version=1) == Defaults("n")
    for wrong, said in ((', "x": 1}', "unknown field `x`"), (', "last": ""}', r"\$\.last"), ("", "truncated")):
        with pytest.raises(FormatError, match=said):
            loads(head + wrong, Defaults, kind="x", version=1, source="S")
    with pytest.raises(FormatError, match="missing required field `name`"):
        loads('{"format": "blinkmpi.x", "version": 1}', Defaults, kind="x", version=1)


def test_a_foreign_text_is_one_short_line() -> None:
    assert quoted("a\nb") == r"'a\nb'"
    assert len(quoted("x" * 1000)) < 120
    assert brief("a\x1b[1m\n" + "y" * 9) == r"a\x1b[1m\n" + "y" * 9
    assert len(brief("z" * 10**6)) < 310
