"""Links of real GPUs, measured: rates that can be, bytes that arrive, and a file that is found again."""

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from mpi4py import MPI

from blinkmpi.cli import live as cli_live
from blinkmpi.cli import main as cli
from blinkmpi.cli import topo as cli_topo
from blinkmpi.topology.measured import FAST, NOWHERE, Measured, link_rates, links_between
from blinkmpi.transport.cuda.device import Gpu, device_count
from blinkmpi.transport.cuda.link_rates import Rates
from blinkmpi.util.together import gathered
from tests.gpu.helpers import at_least, sizes
from tests.harness import mpi

RANKS = sizes(2, 3, 4, 5, 6, 7, 8)[-1:]
ODD = 16 * 100_003  # bytes: 16-byte packs that no grid divides
MOST_MBPS = 1_000_000

pytestmark = [pytest.mark.gpu, at_least(2)]


@contextlib.contextmanager
def common_folder(comm: MPI.Intracomm) -> Iterator[str]:
    """A folder of all ranks, removed in the end."""
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else "", 0)
    try:
        yield folder
    finally:
        comm.Barrier()
        if comm.rank == 0:
            shutil.rmtree(folder)


def measure(comm: MPI.Intracomm, folder: str, *words: str) -> tuple[str, str]:
    """What the command prints on this rank: stdout and stderr."""
    args = cli.parsed(["topo", *words])
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    text, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, {"BLINKMPI_CACHE_DIR": folder}),
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(errors),
    ):
        assert cli_topo.measure(args, comm, node) == 0
        machine = cli_live.live_machine(comm, node)
    node.Free()
    slow = [k for k in machine.links if k.origin == "measured"]
    return text.getvalue(), errors.getvalue() + f"{len(slow)} links as measured\n"


@mpi(ranks=RANKS, timeout=180)
def test_the_links_are_measured_and_kept(comm: MPI.Intracomm) -> None:
    with common_folder(comm) as folder:
        text, errors = measure(comm, folder, "--measure", "--json")
        again, said = measure(comm, folder, "--measure", "--json")
        shown, _ = measure(comm, folder, "--measure")
        files = sorted(Path(folder).glob("links-*.json"))
    if comm.rank:
        assert not text
        return
    print(shown)
    found, n = Measured.from_json(text), comm.size
    assert "measuring [##########]" in errors
    assert len(files) == 1
    assert "measuring" not in said, "the second time it is read"
    assert Measured.from_json(again).rows == tuple(sorted(found.rows, key=lambda r: (r.what, r.src, r.dst)))
    assert f"measured {found.date}, from the cache" in shown
    assert found.driver[0].isdigit()
    assert not found.missing
    rates = {(r.what, r.src, r.dst): r.mbps or 0 for r in found.rows}
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    for what in ("copy", "copy-both", "push", "push-both"):
        assert all(1_000 < rates[what, a, b] < MOST_MBPS for a, b in pairs)
    assert all(1 < (r.us or 0) < 100 for r in found.rows if r.what == "flag")
    assert sum(r.what == "flag" for r in found.rows) == len(pairs)
    for r in range(n):
        for way in ((r, NOWHERE), (NOWHERE, r)):
            assert 1_000 < rates["host", *way] < MOST_MBPS
            assert 100 < rates["host-all", *way] < MOST_MBPS


@mpi(ranks=RANKS, timeout=120)
def test_copies_do_not_beat_the_table(comm: MPI.Intracomm) -> None:
    """No link carries more than what it is made for, and most carry most of it."""
    with common_folder(comm) as folder:
        text, _ = measure(comm, folder, "--measure", "--json")
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        machine = cli_live.live_machine(comm, node)
        node.Free()
    if comm.rank:
        return
    found = Measured.from_json(text)
    for link, mbps in link_rates(machine, found).items():
        if link.kind in FAST:
            assert 0.5 * link.mbps < mbps < 1.05 * link.mbps, link
    if all(k.kind in FAST for k in links_between(machine, 0, 1)):
        push = [r.mbps or 0 for r in found.rows if r.what == "push"]
        copy = [r.mbps or 0 for r in found.rows if r.what == "copy"]
        assert min(push) > 0.5 * max(copy)


@mpi(ranks=RANKS, timeout=60)
def test_what_is_timed_arrives(comm: MPI.Intracomm) -> None:
    me, n = comm.rank, comm.size
    gpu = Gpu(me % device_count())
    port = Rates(gpu, me, n, nbytes=ODD, host_bytes=ODD)
    try:
        assert not any(gathered(comm, lambda: port.connect(comm.allgather(port.handle())), dict[int, str]))
        peer, source = (me + 1) % n, (me - 1) % n
        for salt, move in ((1, port.copy), (101, port.push)):
            port.send(bytes((salt + me + i) % 251 for i in range(ODD)))
            comm.Barrier()
            assert move(peer, 2) > 0
            comm.Barrier()
            assert port.received(ODD) == bytes((salt + source + i) % 251 for i in range(ODD))
            comm.Barrier()
        assert port.to_host(1) > 0
        assert port.from_host(1) > 0
        for _ in range(2):  # words of the first must not count for the second
            for a, b in ((x, y) for x in range(n) for y in range(x + 1, n)):
                comm.Barrier()
                if me in (a, b):
                    assert 1e-7 < port.flag(a + b - me) < 1e-3
    finally:
        port.disconnect()
        comm.Barrier()
        port.close()
