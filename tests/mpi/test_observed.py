"""What running ranks say of their calls: stats, traces, and ``blinkmpi top``, also where ranks die or disks fail."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import TraceError
from blinkmpi.runtime import inspection
from blinkmpi.top import find
from blinkmpi.util.shared_memory import SHM
from tests.harness import PATIENCE_S, ROOT, Job, mpi, wait_until
from tests.mpi.faults import fault_tolerance

COUNT = 60_000
ENDLESS = """
import numpy as np, blinkmpi
from mpi4py import MPI
comm, x = blinkmpi.Communicator(MPI.COMM_WORLD), np.ones(100_000, np.float32)
comm.Allreduce(MPI.IN_PLACE, x)
print("ready", flush=True)
while True:
    comm.Allreduce(MPI.IN_PLACE, x)
    x /= comm.size
"""


def events_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def ranks_in(path: Path) -> set[int]:
    """The ranks of which a file has events; none while it is being written."""
    try:
        return {e["pid"] for e in events_of(path) if e["ph"] == "X"}
    except json.JSONDecodeError:
        return set()


@contextmanager
def traced(comm: MPI.Intracomm, **settings: str) -> Iterator[Path]:
    """The file of a trace of what is made meanwhile, under settings; removed at the end."""
    path = Path(f"/tmp/blinkmpi-test-{comm.bcast(secrets.token_hex(8))}.json")
    try:
        with mock.patch.dict(os.environ, {"BLINKMPI_TRACE": str(path), **settings}):
            yield path
    finally:
        comm.Barrier()
        if comm.rank == 0:
            path.unlink(missing_ok=True)


def with_setting(comm: MPI.Intracomm, name: str, value: str, **options: Any) -> blinkmpi.Communicator:
    """A communicator made under a setting."""
    os.environ[f"BLINKMPI_{name}"] = value
    try:
        return blinkmpi.Communicator(comm, **options)
    finally:
        del os.environ[f"BLINKMPI_{name}"]


# ---------------------------------------------------------------- stats


@mpi(ranks=(1, 2, 4), timeout=90)
def test_every_call_is_counted(comm: MPI.Intracomm) -> None:
    n, rank = comm.size, comm.rank
    for executor in ("auto", "numpy"):
        with with_setting(comm, "TIMES", "1", executor=executor, algo="allreduce:^mpi;broadcast:^mpi") as ours:
            x, y = np.ones(COUNT), np.empty(COUNT)
            since = time.monotonic()
            assert ours.stats().calls == 0
            for _ in range(3):
                ours.Allreduce(x, y)
            ours.Iallreduce(x, y).Wait()
            ours.Bcast(y)
            ours.Barrier()
            ours.Allreduce(np.ones(3, "c16"), np.empty(3, "c16"), MPI.PROD)
            ours.Allreduce(np.ones(3, [("a", "f8")])["a"], np.empty(3), MPI.Op.Create(lambda a, b, _: None))
            everybody = ours.gather_stats()
            own, elapsed = ours.stats(), time.monotonic() - since
        assert own == everybody[rank] == type(own).from_json(own.to_json())
        calls = {c.collective: c.calls for c in own.collectives}
        assert calls == {"allreduce": 6, "broadcast": 1, "barrier": 1}, (executor, calls)
        protocols = {p.protocol: p for p in own.protocols}
        assert protocols["mpi"].calls == 1
        assert protocols["mpi"].bytes is None
        for stats in everybody:
            for link in stats.links:
                ends = link.source, link.target
                other = next(k for k in everybody[link.target].links if (k.source, k.target) == ends)
                assert (link.bytes, link.calls) == (other.bytes, other.calls)
        total = sum(stats.sent_bytes for stats in everybody)
        assert total == sum(t.bytes for stats in everybody for t in stats.trees)
        assert total >= (4 * 2 * (n - 1) + n - 1) * COUNT * 8  # spanning trees, both ways, and a broadcast's
        if n > 1:
            moved = [t for t in own.trees if t.collective == "allreduce"]
            assert moved
            assert all(t.busy_s and 0 < t.busy_s < elapsed for t in moved if t.bytes > 1000), (executor, own)
            assert sum(w.wait_s for s in everybody for w in s.waits) > 0
            assert {w.rank for w in own.waits} <= set(range(n)) - {rank}
        assert "not measured" in str(own)  # MPI's bytes
    comm.Barrier()


@pytest.mark.parametrize(("algo", "vectors"), [("chain", 4), ("one_shot", 5)])
@mpi(ranks=(3,), timeout=60, env={"BLINKMPI_NODES": "1+2", "BLINKMPI_TIMES": "1"})
def test_links_between_nodes_are_counted_by_their_ranks(comm: MPI.Intracomm, algo: str, vectors: int) -> None:
    with blinkmpi.Communicator(comm, algo=f"allreduce:{'^mpi' if algo == 'one_shot' else algo}") as ours:
        ours.Allreduce(np.ones(COUNT), np.empty(COUNT))
        everybody = ours.gather_stats()
    links = {(k.source, k.target): k.bytes for s in everybody for k in s.links if k.source == s.rank}
    assert links == {(k.source, k.target): k.bytes for s in everybody for k in s.links if k.target == s.rank}
    assert sum(links.values()) == vectors * COUNT * 8
    assert all(source != target for source, target in links)
    assert {p.protocol for p in everybody[0].protocols} == {"network"}
    assert algo == "one_shot" or any(w.rank == -1 for s in everybody for w in s.waits)


@mpi(ranks=(2,), timeout=60)
def test_without_the_setting_times_are_not_measured(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        ours.Allreduce(np.ones(COUNT), np.empty(COUNT))
        stats = ours.stats()
        assert inspection.stats(ours.context).links == stats.links
    assert not stats.timed
    assert all(k.busy_s is None for k in (*stats.links, *stats.trees))
    assert not stats.waits


# ---------------------------------------------------------------- traces


@pytest.mark.parametrize("executor", ["auto", "numpy"])
@mpi(ranks=(2, 4), timeout=60)
def test_a_trace_has_every_chunk_of_every_rank(comm: MPI.Intracomm, executor: str) -> None:
    with traced(comm) as path:
        with blinkmpi.Communicator(comm, executor=executor, algo="allreduce:^mpi") as ours:
            for _ in range(2):
                ours.Allreduce(np.ones(COUNT), np.empty(COUNT))
            with ours.Split(comm.rank % 2) as half:
                half.Barrier()
            stats = ours.gather_stats()
        comm.Barrier()
        events = events_of(path)
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == set(range(comm.size))
    calls = Counter((e["pid"], e["name"]) for e in slices if e["args"].get("what"))
    for rank in range(comm.size):
        assert calls[rank, "allreduce"] == 2
        assert calls[rank, "barrier"] == 1
    chunks = [e for e in slices if "chunk" in e["args"]]
    assert len(chunks) == len({(e["pid"], e["tid"], e["name"], e["args"]["call"]) for e in chunks})
    trees = {t.tree for s in stats for t in s.trees}
    assert {e["args"]["tree"] for e in chunks} == trees
    whole: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for e in slices:
        if e["args"].get("what", "").startswith("allreduce"):
            whole[e["pid"]].append((e["ts"], e["ts"] + e["dur"]))
    for e in chunks:
        assert any(a - 0.002 <= e["ts"] <= e["ts"] + e["dur"] <= b + 0.002 for a, b in whole[e["pid"]])
    arrows = {which: Counter(e["id"] for e in events if e["ph"] == which) for which in "sf"}
    assert set(arrows["s"].values()) == {1}
    if executor == "numpy":  # every chunk went through a slot
        assert arrows["s"] == arrows["f"]


@mpi(ranks=(2,), timeout=60)
def test_a_trace_says_what_it_dropped(comm: MPI.Intracomm) -> None:
    with traced(comm, BLINKMPI_TRACE_EVENTS="16") as path:
        with blinkmpi.Communicator(comm) as ours:
            for _ in range(40):
                ours.Barrier()
        comm.Barrier()
        events = events_of(path)
    about = [e["args"] for e in events if e["name"] == "blinkmpi"]
    assert [a["events"] for a in about] == [16, 16]
    assert all(a["dropped"] >= 24 for a in about)


@mpi(ranks=(2,), timeout=60)
def test_a_trace_that_cannot_be_written_is_an_error_on_every_rank(comm: MPI.Intracomm) -> None:
    with pytest.raises(TraceError, match=r"/none/t\.json.*give a path in a folder that exists"):
        with_setting(comm, "TRACE", "/tmp/none/t.json")
    with blinkmpi.Communicator(comm) as ours:  # nothing is left of it
        ours.Barrier()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_events_of_the_others_are_kept_where_a_rank_dies(tmp_path: Path, how: signal.Signals) -> None:
    """Under mpirun without fault tolerance the others may be killed before they have written: that is up to it."""
    path = tmp_path / "t.json"
    env = {"PYTHONPATH": str(ROOT), "BLINKMPI_TRACE": str(path)}
    with Job(3, [sys.executable, "-c", ENDLESS], timeout=60, env=env, options=fault_tolerance()) as job:
        job.wait_for("ready", count=3)
        job.signal(1, how)
        wanted = {0, 2} if how == signal.SIGKILL else {0, 1, 2}
        wait_until(lambda: ranks_in(path) >= wanted, "their events are there")


# ---------------------------------------------------------------- top


def top(*flags: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_"))} | {"COLUMNS": "140"}
    argv = [sys.executable, "-m", "blinkmpi", "top", *flags]
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_top_shows_a_running_job() -> None:
    env = {"PYTHONPATH": str(ROOT), "BLINKMPI_TIMES": "1"}
    with Job(3, [sys.executable, "-c", ENDLESS], timeout=6 * PATIENCE_S, env=env) as job:
        job.wait_for("ready", count=3)
        pids = job.pids()
        done = top("--json", "--pid", str(pids[0]))
        assert done.returncode == 0, done.stderr
        (found,) = json.loads(done.stdout)["communicators"]
        assert found["n"] == 3
        assert {r["rank"]: r["pid"] for r in found["ranks"]} == pids
        before = {r["rank"]: r["stats"]["collectives"][0]["calls"] for r in found["ranks"]}
        frame = top("--once", "--seconds", "0.5", "--pid", str(pids[1]))
        assert frame.returncode == 0, frame.stderr
        for text in ("communicator 0: 3 ranks", "0 -> 1", "allreduce, ", "waited for", str(pids[2]), "running"):
            assert text in frame.stdout, frame.stdout
        job.signal(2, signal.SIGSTOP)
        stat = Path(f"/proc/{pids[2]}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "rank 2 stops")
        (found,) = json.loads(top("--json", "--pid", str(pids[0])).stdout)["communicators"]
        states = {r["rank"]: r["state"] for r in found["ranks"]}
        assert states[2] == "stopped"
        assert all(r["stats"]["collectives"][0]["calls"] >= before[r["rank"]] for r in found["ranks"])
        job.signal(2, signal.SIGCONT)


def test_top_passes_over_a_file_that_is_longer_than_any_memory() -> None:
    """Another user's, whatever its name; to map it fails."""
    file = os.open(SHM, os.O_TMPFILE | os.O_RDWR)
    try:
        os.ftruncate(file, 1 << 50)
        assert find._read(f"/proc/self/fd/{file}", 0, 1 << 50) is None
    finally:
        os.close(file)


def test_top_says_when_there_is_no_job() -> None:
    done = top("--once", "--pid", str(os.getpid()))
    assert done.returncode == 1
    assert f"process {os.getpid()} has no communicator of blinkmpi open" in done.stdout
    assert json.loads(top("--json", "--pid", str(os.getpid())).stdout)["communicators"] == []


@pytest.mark.parametrize("flags", [("--seconds", "0"), ("--seconds", "nan"), ("--pid", "-1"), ("--pid", "x")])
def test_top_refuses_what_is_no_number(flags: tuple[str, str]) -> None:
    done = top("--once", *flags)
    assert done.returncode == 2
    assert f"blinkmpi: error: {flags[0]} " in done.stderr
