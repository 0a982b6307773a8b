"""Gathering over a communicator of threads: one topology for all, or one error for all."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count, product
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blinkmpi.errors import BlinkError, FormatError, RemoteError, TopologyError
from blinkmpi.topology import ProcessInfo, Topology, exchange, gather, live
from blinkmpi.topology.live import SLOT_BYTES, copy_test, cpu_topology, page_aligned, this_process
from blinkmpi.topology.network_rate import ROUNDS, even_out, net_rate, partners

HERE = threading.local()
WAIT_SECONDS = 100  # for another rank, which on a busy machine gets a core now and then


@dataclass
class Group:
    """Some ranks that meet: what each brings is there for all once all have come."""

    size: int
    slots: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = [None] * self.size
        self.barrier = threading.Barrier(self.size)
        pairs = product(range(self.size), repeat=2)
        self.messages: dict[tuple[int, int], queue.Queue[bytes]] = {pair: queue.Queue() for pair in pairs}


@dataclass
class ThreadComm:
    """One rank's end of a group, with the methods that gather asks for."""

    group: Group
    rank: int

    def __post_init__(self) -> None:
        self.size = self.group.size

    def allgather_bytes(self, sendobj: Any, /) -> list[Any]:
        self.group.slots[self.rank] = sendobj
        self.group.barrier.wait(WAIT_SECONDS)
        got = list(self.group.slots)
        self.group.barrier.wait(WAIT_SECONDS)
        return got

    def bcast_bytes(self, obj: Any, root: int, /) -> Any:
        return self.allgather_bytes(obj)[root]

    def Barrier(self) -> None:
        self.allgather_bytes(None)

    def Sendrecv(self, sendbuf: Any, dest: int, _tag: int, recvbuf: Any, source: int, _other: int, /) -> None:
        self.group.messages[self.rank, dest].put(bytes(sendbuf[:1]))
        self.group.messages[source, self.rank].get(timeout=WAIT_SECONDS)
        HERE.seconds = clock() + (0.01 if {self.rank, dest} <= {0, 4} else 0.04)


def clock() -> float:
    """Seconds that this thread's messages have taken."""
    return getattr(HERE, "seconds", 0.0)


def on_ranks(
    nodes: list[int], work: Callable[[Any, Any], Any], *, comm_type: type[ThreadComm] = ThreadComm
) -> list[Any]:
    """Run ``work(comm, node_comm)`` on a thread for each rank, ``nodes[rank]`` being the launcher's node of it."""
    world = Group(len(nodes))
    groups = {node: Group(nodes.count(node)) for node in nodes}
    results: list[Any] = [None] * len(nodes)

    def body(rank: int) -> None:
        HERE.rank = rank
        node_comm = ThreadComm(groups[nodes[rank]], nodes[:rank].count(nodes[rank]))
        try:
            results[rank] = work(comm_type(world, rank), node_comm)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(len(nodes))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(2 * WAIT_SECONDS)
    assert not any(t.is_alive() for t in threads), "a rank hangs"
    return results


def only_one(results: list[Any]) -> Topology:
    """All ranks hold this topology."""
    for result in results:
        if isinstance(result, Exception):
            raise result
        assert result == results[0]
    made = results[0]
    assert isinstance(made, Topology)
    return made


def fail_on(monkeypatch: pytest.MonkeyPatch, name: str, rank: int, error: Exception) -> None:
    """Let one function of the module fail on one rank."""
    real = getattr(live, name)

    def maybe(*args: Any) -> Any:
        if HERE.rank == rank:
            raise error
        return real(*args)

    monkeypatch.setattr(live, name, maybe)


def one_error(results: list[Any], rank: int, error: Exception) -> None:
    """``rank`` raised ``error``, and all others a RemoteError that names both."""
    assert results[rank] is error
    for other in (r for at, r in enumerate(results) if at != rank):
        assert type(other) is RemoteError
        assert f"rank {rank} failed" in str(other)
        assert str(error) in str(other)
        assert type(error).__name__ in str(other)


def test_all_ranks_get_one_measured_node() -> None:
    made = only_one(on_ranks([0, 0, 0], gather))
    assert made.n == 3
    assert made.nodes == (0,)
    assert made.memory_of(0) == 3
    assert sorted((k.src, k.dst) for k in made.links) == [(0, 3), (1, 3), (2, 3), (3, 0), (3, 1), (3, 2)]
    assert {k.origin for k in made.links} == {"measured"}
    assert len({k.lane_mbps for k in made.links}) == 1
    assert all(d.host for d in made.devices)


def test_unmeasured_takes_the_table() -> None:
    made = only_one(on_ranks([0, 0], lambda c, n: gather(c, n, measure=False)))
    assert {(k.lane_mbps, k.origin) for k in made.links} == {(8000, "table")}
    assert "assumed 8 GB/s" in made.source


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 0]])
def test_the_launchers_nodes_are_joined_by_an_assumed_network(nodes: list[int]) -> None:
    made = only_one(on_ranks(nodes, lambda c, n: gather(c, n, measure=False)))
    first_seen = list(dict.fromkeys(nodes))
    assert [d.node for d in made.devices] == [first_seen.index(n) for n in nodes]
    assert [d.index for d in made.devices] == [nodes[:r].count(n) for r, n in enumerate(nodes)]
    assert [s.kind for s in made.switches] == ["memory", "memory", "net"]
    assert {(k.lane_mbps, k.origin) for k in made.links if k.kind == "net"} == {(1000, "table")}
    assert "1 GB/s assumed" in made.source


def test_ranks_that_share_no_memory_are_nodes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "this_process", lambda: ProcessInfo("box", 1, f"boot/{HERE.rank % 2}", (0,)))
    made = only_one(on_ranks([0, 0, 0], lambda c, n: gather(c, n, measure=False)))
    assert [d.node for d in made.devices] == [0, 1, 0]


def test_exchange_gives_every_part_in_rank_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "this_process", lambda: ProcessInfo("box", 100 + HERE.rank, "boot", (HERE.rank,)))
    results = on_ranks([0, 1, 0], lambda c, n: exchange(c, n, measure=False))
    assert results[0] == results[1] == results[2]
    assert [(p.pid, p.leader) for p in results[0]] == [(100, 0), (101, 1), (102, 0)]


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", ["this_process", "copy_test"])
@pytest.mark.parametrize("error", [TopologyError("the disk is made of cheese"), ZeroDivisionError("oops")])
def test_one_rank_that_fails_fails_all(monkeypatch: pytest.MonkeyPatch, rank: int, name: str, error: Exception) -> None:
    fail_on(monkeypatch, name, rank, error)
    one_error(on_ranks([0, 0, 1], gather), rank, error)


def test_rank_0_failing_to_build_fails_all(monkeypatch: pytest.MonkeyPatch) -> None:
    error = TopologyError("no such thing")
    fail_on(monkeypatch, "cpu_topology", 0, error)
    one_error(on_ranks([0, 0], lambda c, n: gather(c, n, measure=False)), 0, error)


def test_two_failing_ranks_raise_their_own_and_the_others_name_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> ProcessInfo:
        if HERE.rank:
            raise TopologyError(f"mine is {HERE.rank}")
        return this_process()

    monkeypatch.setattr(live, "this_process", broken)
    told, *own = on_ranks([0, 0, 0], lambda c, n: gather(c, n, measure=False))
    assert [str(r) for r in own] == ["mine is 1", "mine is 2"]
    assert type(told) is RemoteError
    assert "rank 1 failed" in str(told)
    assert "so did ranks [2]" in str(told)
    assert "mine is 1" in str(told)


class GarblingComm(ThreadComm):
    """Rank 1 receives broken text."""

    def bcast_bytes(self, obj: Any, root: int, /) -> Any:
        body = super().bcast_bytes(obj, root)
        text, error = msgspec.msgpack.decode(body)
        return msgspec.msgpack.encode((text[:-9], error)) if self.rank == 1 else body


def test_a_rank_that_cannot_read_the_topology_fails_all() -> None:
    results = on_ranks([0, 0, 0], lambda c, n: gather(c, n, measure=False), comm_type=GarblingComm)
    assert isinstance(results[1], FormatError)
    assert "topology from rank 0" in str(results[1])
    one_error(results, 1, results[1])


def test_the_place_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = this_process()
    assert usual.place
    assert usual.cores
    monkeypatch.setenv("BLINKMPI_NODE_ID", "rack 7")
    monkeypatch.setattr(live, "BOOT_ID", "/nowhere/at/all")
    assert this_process().place == "rack 7"


@pytest.mark.parametrize("name", ["BOOT_ID", "SHM"])
def test_a_system_that_does_not_say_is_a_typed_error_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("BLINKMPI_NODE_ID", raising=False)
    monkeypatch.setattr(live, name, "/nowhere/at/all")
    with pytest.raises(TopologyError, match=r"/nowhere/at/all.*set BLINKMPI_NODE_ID") as caught:
        this_process()
    assert isinstance(caught.value, BlinkError)


def test_a_copy_goes_into_the_slot_and_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    milliseconds = count()
    monkeypatch.setattr(live, "time", SimpleNamespace(perf_counter=lambda: next(milliseconds) / 1000))
    slots = [page_aligned(SLOT_BYTES) for _ in range(2)]
    assert copy_test(slots, 1)() == round(2 * SLOT_BYTES / 1e-3 / 1e6), "MB/s"
    assert (slots[1] == 1).all(), "the slot holds what the vector held"


parts = st.builds(
    ProcessInfo,
    host=st.sampled_from(("a", "b")),
    pid=st.just(1),
    place=st.sampled_from(("x", "y")),
    cores=st.lists(st.integers(0, 3), max_size=3).map(tuple),
    copy_mbps=st.none() | st.integers(1, 10**6),
    leader=st.integers(0, 1),
)


@given(st.lists(parts, min_size=1, max_size=9))
def test_two_ranks_share_a_memory_if_launcher_and_place_agree(given_parts: list[ProcessInfo]) -> None:
    made = cpu_topology(given_parts)
    assert Topology.from_json(made.to_json()) == made
    memory = [[k.dst for k in made.links if k.src == r] for r in range(made.n)]
    assert all(len(m) == 1 for m in memory)
    for a, p in enumerate(given_parts):
        for b, q in enumerate(given_parts):
            assert (memory[a] == memory[b]) == ((p.leader, p.place) == (q.leader, q.place))
            assert (memory[a] == memory[b]) == (made.devices[a].node == made.devices[b].node)
    for node in made.nodes:
        rates = {k.lane_mbps for k in made.links if k.kind == "memory" and made.memory_of(node) in (k.src, k.dst)}
        known = [given_parts[r].copy_mbps for r in made.ranks_of(node) if given_parts[r].copy_mbps is not None]
        assert len(rates) == 1
        if known:
            (rate,) = rates
            mean = sum(k for k in known if k) / len(known)
            assert abs(rate - mean) <= max(1, 0.06 * mean), "two digits of the mean"


# ---------------------------------------------------------------- between nodes


@given(st.integers(2, 40))
def test_in_every_round_each_node_has_one_other(n: int) -> None:
    rounds = [partners(i, n) for i in range(n)]
    for i, mine in enumerate(rounds):
        assert len(set(mine)) == len(mine)
        assert i not in mine
        assert all(i in rounds[j] for j in mine)
        assert len(mine) >= min(n - 1, ROUNDS - n % 2)


def test_rates_that_are_alike_are_one() -> None:
    assert even_out([98, 1021, 103, 24]) == [100, 1000, 100, 24]
    assert even_out([91, 100, 84]) == [95, 95, 84]
    assert even_out([3]) == [3]


def test_the_best_of_all_rounds_is_a_nodes_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blinkmpi.topology.network_rate.time", SimpleNamespace(perf_counter=clock))
    firsts = [0, 4, 7]
    group = Group(8)
    with ThreadPoolExecutor(3) as pool:
        rates = list(pool.map(lambda r: net_rate(ThreadComm(group, r), firsts), firsts))
    assert rates == [419, 419, 105], "4 MiB in 10 ms, and in 40"
    assert net_rate(ThreadComm(group, 1), firsts) is None
    assert net_rate(ThreadComm(group, 0), [0]) is None


def test_measured_network_rates_are_in_the_machine() -> None:
    parts = [
        ProcessInfo("a", 1, "a", (0,), 5000, 0, 99),
        ProcessInfo("a", 2, "a", (1,), 5000, 0),
        ProcessInfo("b", 3, "b", (0,), 5000, 2, 24),
    ]
    made = cpu_topology(parts)
    links = {(k.src, k.dst): (k.mbps, k.origin) for k in made.links if k.kind == "net"}
    rates = {(3, 5): 99, (5, 3): 99, (4, 5): 24, (5, 4): 24}
    assert links == {pair: (mbps, "measured") for pair, mbps in rates.items()}
    assert "between nodes 0.099, 0.024 GB/s measured" in made.source
    unknown = cpu_topology([msgspec.structs.replace(part, net_mbps=None) for part in parts])
    assert {k.origin for k in unknown.links if k.kind == "net"} == {"table"}
