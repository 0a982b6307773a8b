"""The measurements between hosts, without hosts: what is started where, what is written and shown, and the exchange."""

import json
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from blinkmpi.bench.layout import Buffers
from blinkmpi.bench.nccl_tests import call_of_size
from blinkmpi.bench.options import memory_for, read
from blinkmpi.bench.time_host import measure
from blinkmpi.bench.timing import Contender, Timing
from blinkmpi.cli import main as cli
from blinkmpi.program.call import Call
from tests.harness import Outcome
from tests.unit.benchmarks.scripts import script


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Any:
    found: Any = script("hosts")
    monkeypatch.setattr(found, "missing", lambda: None)
    monkeypatch.setattr(found, "forbidden", lambda: None)
    return found


def timed(us: float, **more: Any) -> dict[str, Any]:
    return {"us": us, "spread_us": [us, us, us], "wrong": 0, "iterations": 5, **more}


def swept(name: str, ranks: tuple[int, ...]) -> dict[str, Any]:
    """What ``blinkmpi bench`` writes, as far as it is read here."""
    devices = [{"hostname": f"host{i}"} for i, k in enumerate(ranks) for _ in range(k)]
    row: dict[str, Any] = {"size": 1 << 16, "type": "float", "redop": "sum", "root": -1}
    row["blinkmpi"] = {"scheme": "mpi", "executor": "mpi", "predicted_us": 700.0, "bound_us": None}
    for place in ("out_of_place", "in_place"):
        row[place] = {"time": 2000.0, "nwrong": 0}
        row["blinkmpi"][place] = {"compare": {"mpi": {"time": 1000.0, "ratio": 0.5, "nwrong": 0}}}
    ours = {"ranks": sum(ranks), "collective": name, "compare": ["mpi"], "hostnames": ["host0", "host1"]}
    return {"config": {"devices": devices}, "results": [row], "blinkmpi": ours}


class FakeWorld:
    """Hosts that are not there: notes what is done with them, and answers as the ranks would."""

    worlds: list[Any] = []  # noqa: RUF012
    answer: Any = None

    def __init__(self, n: int, *, links: int = 1) -> None:
        self.names = [f"host{i}" for i in range(n)]
        self.links, self.shaped, self.jobs = links, [], []
        FakeWorld.worlds.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def shape(self, host: str, rate: str, *, link: int) -> None:
        self.shaped.append((host, rate, link))

    def run(self, layout: Any, argv: list[str], *, timeout: float, env: dict[str, str]) -> Outcome:
        self.jobs.append((layout, argv, env))
        assert timeout > 0
        return FakeWorld.answer(layout, argv, env)


def answer(layout: tuple[int, ...], argv: list[str], env: dict[str, str]) -> Outcome:
    """Ranks that all do well."""
    if "bench" in argv:
        Path(argv[argv.index("-J") + 1]).write_text(json.dumps(swept(argv[argv.index("bench") + 1], layout)))
        return Outcome(0, "", 1.0, False, ())
    wires = [timed(6e5 * (i + 1), ends=[0, sum(layout[: i + 1])]) for i in range(len(layout) - 1)]
    row = {"size": 64 << 20, "ours": timed(8e5), "mpi": timed(1.6e6), "wires": wires}
    row |= {"predicted_us": 9e5, "bound_us": 7e5, "how": {"scheme": "cluster"}}
    if "OMPI_MCA_coll" in env:
        row["mpi"] = timed(2e6)
    told = {"versions": {"python": "3"}, "env": [], "machine": {"name": "cpu", "fingerprint": "f"}}
    folder = Path(argv[argv.index("--out") + 1])
    (folder / "result.json").write_text(json.dumps({"row": row, **told}))
    return Outcome(0, "", 1.0, False, ())


@pytest.fixture
def world(hosts: Any, monkeypatch: pytest.MonkeyPatch) -> type[FakeWorld]:
    monkeypatch.setattr(hosts, "World", FakeWorld)
    monkeypatch.setattr(FakeWorld, "worlds", [])
    monkeypatch.setattr(FakeWorld, "answer", staticmethod(answer))
    return FakeWorld


def test_set_ups_and_what_their_ranks_run(hosts: Any, tmp_path: Path) -> None:
    assert len({step.name for step in hosts.STEPS}) == len(hosts.STEPS)
    assert [step.name for step in hosts.STEPS if "equal" in step.name] == ["equal"], "--only can name each"
    for step in hosts.STEPS:
        assert len(step.hosts.ranks) == len(step.hosts.rates)
        words = hosts.command(step, "64M", 5, tmp_path, 99.0)
        if step.collective:
            args = cli.parsed(words[3:])
            options = read(args, 8)
            assert memory_for(args, options, gpu=False) == "host"
            assert [size >> 10 for size in options.sizes] == [64, 256, 1024, 4096, 16384, 65536]
            assert options.peers == ("mpi",)
            assert args.predict
        else:
            args = hosts.arguments(words[2:])
            assert args.rank == ",".join(map(str, step.hosts.ranks))
            assert (args.size, args.repeats, args.out, args.budget) == ("64M", 5, tmp_path, 99)
    slow, two = (next(step.hosts for step in hosts.STEPS if step.name == name) for name in ("slow-host", "two-links"))
    assert slow.text == "2+2+2 ranks, 800mbit, 800mbit, 200mbit"
    assert two.text == "4+4 ranks, 2 links of 400mbit a host"
    assert slow.expected_us(25_000_000) == 1e6, "200 Mbit/s are 25 MB/s"
    assert two.expected_us(100_000_000) == 1e6
    assert hosts.firsts((3, 5, 2)) == [0, 3, 8]


def test_the_time_is_shared(hosts: Any) -> None:
    left, shares = 1500.0, [step.share for step in hosts.STEPS]
    for i in range(len(shares)):  # every step takes all that it may
        left -= hosts.limits(shares[i:], left)
    assert left >= 0


def test_every_step_writes_a_file_and_a_line(
    hosts: Any, world: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hosts.main(["--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    lines = {line[:42].strip(): line[42:].split() for line in said.splitlines()}
    assert lines["4+4 ranks, 800mbit a host"] == [
        "64", "800.0", "600.0", "0.75", "671.1", "0.84", "2.00", "2.50", "700.0", "900.0", "0",
    ]  # fmt: skip
    assert lines["2+2+2 ranks, 800mbit, 800mbit, 200mbit"][2:4] == ["1200.0", "1.50"], "the slower wire"
    sweep = said.index("all_reduce, 4+4 ranks, 800mbit a host")
    assert said[sweep:].splitlines()[1].split() == [
        "64", "2.00", "1.00", "0.50", "2.00", "1.00", "0.50", "-", "0.70", "0",
    ]  # fmt: skip
    assert said.rstrip().endswith("all steps ended well")

    assert [len(one.jobs) for one in world.worlds] == [2, 2, 2, 2, 1, 1, 1, 1]
    assert world.worlds[2].shaped == [("host0", "800mbit", 0), ("host1", "800mbit", 0), ("host2", "200mbit", 0)]
    assert world.worlds[3].links == 2
    assert world.worlds[3].shaped == [(f"host{i}", "400mbit", link) for i in range(2) for link in range(2)]
    usual, without = (job[2] for job in world.worlds[0].jobs)
    assert "OMPI_MCA_coll" not in usual
    assert without["OMPI_MCA_coll"] == "^han"

    names = sorted(path.name for path in tmp_path.glob("*"))
    assert names == sorted(f"hosts-{step.name}.json" for step in hosts.STEPS)
    document = json.loads((tmp_path / "hosts-equal.json").read_text())
    assert document["hosts"]["ranks"] == [4, 4]
    assert document["hosts"]["rates"] == ["800mbit", "800mbit"]
    assert [(row["mpi_coll"], row["ratio"]) for row in document["results"]] == [("all", 2.0), ("^han", 2.5)]
    assert {"commit", "date", "hardware", "versions"} <= set(document["blinkmpi"])
    assert hosts.main(["--out", str(tmp_path), "--only", "equal"]) == 0
    assert (tmp_path / "hosts-equal.json.0").exists(), "nothing is overwritten"

    (tmp_path / "hosts-equal.json.0").unlink()
    made: Any = script("report")
    page = made.render(made.read(tmp_path))
    name = "[hosts-equal.json](#hosts-equaljson)"
    row = f"800.0 | 600.0 | 0.75 | 671.1 | 0.84 | 1600.0 | 2.00 | 2.50 | 900.0 | 700.0 | 0 | {name} |"
    assert f"| allreduce, 4+4 ranks, 800mbit a host | 64 MiB | {row}" in page
    assert "| 64 KiB | mpi | 2.00 | 1.00 | 0.50 | 2.00 | 1.00 | 0.50 | 0.70 | - | 0 |" in page
    assert "- command: `python benchmarks/hosts.py --only two-links`" in page
    assert "namespaces of one machine" in page
    assert "## Summary" not in page, "these files have a section of their own"


def test_without_files_the_section_says_so() -> None:
    made: Any = script("report")
    file = swept("all_reduce", (2,))
    page = made.render([("a.json", file)])
    assert "## Several hosts" in page
    assert "\nNot measured.\n" in page
    assert "virtual nodes" not in page


def test_what_goes_wrong_is_told(
    hosts: Any, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(layout: tuple[int, ...], argv: list[str], env: dict[str, str]) -> Outcome:
        if "OMPI_MCA_coll" in env:
            return Outcome(3, "no han here", 1.0, False, ())
        if "bench" in argv:
            layout = (sum(layout), 0)
        return answer(layout, argv, env)

    monkeypatch.setattr(world, "answer", staticmethod(fails))
    assert hosts.main(["--out", str(tmp_path), "--only", "uneven"]) == 1
    said = capsys.readouterr().out
    assert "uneven, ^han: exit status 3" in said
    assert "no han here" in said
    assert json.loads((tmp_path / "hosts-uneven.json").read_text())["failed"] == ["uneven, ^han: exit status 3"]
    made: Any = script("report")
    page = made.render(made.read(tmp_path))
    assert "| 1600.0 | 2.00 | - | 900.0 | 700.0 | 0 |" in page
    assert "- failed: uneven, ^han: exit status 3" in page

    assert hosts.main(["--out", str(tmp_path), "--only", "sizes-broadcast"]) == 1
    assert "not on ['host0'" in capsys.readouterr().out
    monkeypatch.setattr(world, "answer", staticmethod(lambda *_: Outcome(143, "...", 9.0, True, ())))
    assert hosts.main(["--out", str(tmp_path), "--only", "slow-host"]) == 1
    assert "slow-host, all: no end after" in capsys.readouterr().out
    assert hosts.main(["--out", str(tmp_path), "--only", "slow-host", "--budget", "5"]) == 1
    assert "slow-host: not started, 5 s left" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        hosts.main(["--out", str(tmp_path), "--only", "nothing"])
    assert "the steps are equal, uneven" in capsys.readouterr().err
    monkeypatch.setattr(hosts, "missing", lambda: "no tc: apt-get install iproute2")
    with pytest.raises(SystemExit):
        hosts.main(["--out", str(tmp_path)])
    assert "no tc: apt-get install iproute2" in capsys.readouterr().err


def test_wrong_values_of_any_library_are_an_error(
    hosts: Any, world: type[FakeWorld], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def errs(layout: tuple[int, ...], argv: list[str], env: dict[str, str]) -> Outcome:
        outcome = answer(layout, argv, env)
        file = Path(argv[argv.index("--out") + 1]) / "result.json"
        found = json.loads(file.read_text())
        found["row"]["wires"][0]["wrong"] = 7
        file.write_text(json.dumps(found))
        return outcome

    monkeypatch.setattr(world, "answer", staticmethod(errs))
    assert hosts.main(["--out", str(tmp_path), "--only", "equal"]) == 1
    assert hosts.wrong_in(json.loads((tmp_path / "hosts-equal.json").read_text())) == 14


class Pair:
    """One of two ranks whose peer sends what it must, or does not; enough of a communicator for ``measure``."""

    def __init__(self, call: Call, sends: bool) -> None:
        self.sent = Buffers([call]).views(call)[0]
        self.sends = sends

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def Barrier(self) -> None:
        pass

    def Allgather(self, send: Any, recv: Any) -> None:
        recv[0] = send

    def allreduce(self, value: Any) -> Any:
        return value

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def allgather_bytes(self, body: bytes) -> list[bytes]:
        return [body]

    def Sendrecv(self, send: Any, dest: int, tag: int, recv: Any, source: int, recvtag: int) -> None:
        assert (dest, source) == (4, 4)
        if self.sends:
            recv[:] = self.sent


def test_an_exchange_is_timed_and_checked_like_a_collective(hosts: Any) -> None:
    call = call_of_size("allreduce", 8, 1 << 20, "float32", "sum", -1)
    for sends in (True, False):
        comm = Pair(call, sends)
        hosts.fill(comm.sent, 4, "float32")
        wire = hosts.Exchange(comm, call, Buffers([call]), (0, 4))
        (found,) = measure(comm, None, [Contender(wire, wire.run)], Timing(iterations=3))
        assert found.iterations == 3
        assert found.wrong == (0 if sends else call.counts[0])
    other = hosts.Exchange(comm, call, Buffers([call]), (4, 6))
    other.run()
    assert other.wrong().count == 0, "this rank has no part in it"
    assert np.isnan(wire.recv).all()
