"""The order of calls on a GPU, in a model of CUDA's streams, events and graphs: who follows whom, by which nodes."""

import ctypes
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from blinkmpi.transport.cuda.device import Capture
from blinkmpi.transport.cuda.order import PER_THREAD, Order, OrderState
from blinkmpi.transport.host import c_structs

STREAMS = (1, 2, 3)


@dataclass(eq=False)
class Work:
    """A piece of work, or in a graph a node of it, and what must end before it begins."""

    what: str
    before: set["Work"]
    event: int = 0

    def follows(self, other: "Work") -> bool:
        """Whether it comes behind another one, in any case."""
        seen, todo = set(), [self]
        while todo:
            work = todo.pop()
            if work is other:
                return True
            if work not in seen:
                seen.add(work)
                todo += work.before
        return False


@dataclass(eq=False)
class Graph:
    number: int
    nodes: list[Work] = field(default_factory=list)

    def add(self, what: str, before: Iterable[Work], event: int = 0) -> Work:
        self.nodes.append(Work(what, set(before), event))
        return self.nodes[-1]

    def nodes_at(self, numbers: Iterable[int]) -> list[Work]:
        return [self.nodes[number - 1] for number in numbers]


class Cuda:
    """A GPU as ``Order`` sees it: handles of nodes are their numbers in their graph, from 1 on."""

    def __init__(self) -> None:
        self.ends: dict[int, set[Work]] = {s: set() for s in STREAMS}  # of each stream: what later work follows
        self.events: dict[int, set[Work]] = {}
        self.graphs: dict[int, Graph] = {}  # of the streams that are captured
        self.aside: dict[int, set[Work]] = {}  # their ends outside of these
        self.captures = 0

    def capturing(self, stream: int) -> bool:
        return stream in self.graphs

    def capture(self, stream: int) -> Capture:
        graph = self.graphs[stream]
        numbers = tuple(graph.nodes.index(node) + 1 for node in self.ends[stream])
        return Capture(graph.number, graph.number, numbers)

    def event(self) -> ctypes.c_void_p:
        self.events[len(self.events) + 1] = set()
        return ctypes.c_void_p(len(self.events))

    def after(self, stream: int, other: int) -> None:
        if other in self.graphs and stream not in self.graphs:
            self._join(stream, self.graphs[other])
        assert self.graphs.get(stream) is self.graphs.get(other), "two captures cannot wait for each other"
        self.ends[stream] = self.ends[stream] | self.ends[other]

    def wait(self, stream: int, event: ctypes.c_void_p, *, external: bool = False) -> None:
        assert external == self.capturing(stream)
        if external:
            self.ends[stream] = {self.graphs[stream].add("wait", self.ends[stream], event.value or 0)}
        else:
            self.ends[stream] = self.ends[stream] | self.events[event.value or 0]

    def record(self, stream: int, event: ctypes.c_void_p) -> None:
        assert not self.capturing(stream)
        self.events[event.value or 0] = set(self.ends[stream])

    def add_record(self, capture: Capture, event: ctypes.c_void_p) -> int:
        graph = self.graph(capture)
        graph.add("record", [], event.value or 0)
        return len(graph.nodes)

    def move_node(self, capture: Capture, node: int, before: Sequence[int]) -> None:
        graph = self.graph(capture)
        moved = graph.nodes[node - 1]
        assert moved.before == set(graph.nodes_at(before))
        moved.before = set(graph.nodes_at(capture.before))

    def graph(self, capture: Capture) -> Graph:
        return next(graph for graph in self.graphs.values() if graph.number == capture.graph)

    # ---- the user's part

    def begin_capture(self, stream: int) -> Graph:
        self.captures += 1
        self._join(stream, Graph(self.captures))
        return self.graphs[stream]

    def _join(self, stream: int, graph: Graph) -> None:
        self.aside[stream], self.ends[stream], self.graphs[stream] = self.ends[stream], set(), graph

    def end_capture(self, graph: Graph) -> None:
        for stream in [s for s, g in self.graphs.items() if g is graph]:
            del self.graphs[stream]
            self.ends[stream] = self.aside.pop(stream)

    def kernel(self, stream: int) -> Work:
        if self.capturing(stream):
            made = self.graphs[stream].add("call", self.ends[stream])
        else:
            made = Work("call", set(self.ends[stream]))
        self.ends[stream] = {made}
        return made

    def launch(self, graph: Graph, stream: int) -> list[Work]:
        """Run a graph; its calls, in the order in which they were captured. Events are taken as they are now."""
        at_start, made = set(self.ends[stream]), {}
        then = dict(self.events)
        for node in sorted(graph.nodes, key=lambda node: node.what == "record"):  # which stands before what it follows
            before = {made[b] for b in node.before} or at_start
            made[node] = Work(node.what, before | (self.events[node.event] if node.what == "wait" else set()))
            if node.what == "record":
                then[node.event] = {made[node]}
        self.events = then
        self.ends[stream] = at_start | set(made.values())
        return [made[node] for node in graph.nodes if node.what == "call"]


class Process:
    """Makes calls by an Order."""

    def __init__(self, *, mixes: bool = True) -> None:
        self.cuda, self.order, self.mixes = Cuda(), Order(), mixes
        self.ran: list[Work] = []

    def call(self, stream: int) -> Work:
        gpu: Any = self.cuda
        self.order.begin(gpu, stream, None, mixes=self.mixes)
        made = self.cuda.kernel(stream)
        self.order.end(gpu, stream, mixes=self.mixes)
        return made

    def run(self, stream: int) -> None:
        self.ran.append(self.call(stream))

    def captured(self, streams: Iterable[int]) -> Graph:
        """A graph of calls on these streams."""
        first, *others = streams
        graph = self.cuda.begin_capture(first)
        self.call(first)
        for stream in others:
            if not self.cuda.capturing(stream):
                self.cuda.after(stream, first)
            self.call(stream)
        self.cuda.end_capture(graph)
        return graph

    def launch(self, graph: Graph, stream: int) -> None:
        self.ran += self.cuda.launch(graph, stream)

    @property
    def in_order(self) -> bool:
        return all(b.follows(a) for a, b in zip(self.ran, self.ran[1:], strict=False))


@pytest.mark.parametrize("seed", range(40))
def test_calls_run_as_they_are_launched(seed: int) -> None:
    rng, process = random.Random(seed), Process()
    graphs: list[Graph] = []
    for _ in range(60):
        what = rng.choice(["call", "graph", "launch", "launch"])
        if what == "call":
            process.run(rng.choice(STREAMS))
        elif what == "graph":
            if not process.order.state.chained:  # the device is synchronised before the first capture
                process.ran.clear()
            graphs.append(process.captured(rng.choices(STREAMS, k=rng.randint(1, 5))))
        elif graphs:
            process.launch(rng.choice(graphs), rng.choice(STREAMS))
        assert process.in_order
    for graph in graphs:
        for node in graph.nodes:
            assert not any(b.what == "record" for b in node.before), "nothing waits for one"
        assert [[node.what for node in graph.nodes].count(what) for what in ("wait", "record")] == [1, 1]


def test_without_mixing_graphs_have_no_nodes_of_ours_and_may_overlap() -> None:
    process = Process(mixes=False)
    process.run(1)
    graph = process.captured([1, 2])
    assert [node.what for node in graph.nodes] == ["call", "call"]
    assert not process.order.state.chained
    process.launch(graph, 1)
    process.launch(graph, 2)
    assert not process.in_order


def test_calls_before_the_first_capture_come_before_its_graph() -> None:
    for first, launched in ((1, 2), (2, 3)):
        process = Process()
        process.run(first)
        process.launch(process.captured([3 - first]), launched)
        assert process.in_order


def test_two_captures_at_once_do_not_wait_for_each_other() -> None:
    process = Process()
    graphs = [process.cuda.begin_capture(s) for s in (1, 2)]
    for stream in (1, 2, 1, 2):
        process.call(stream)
    for graph in graphs:
        process.cuda.end_capture(graph)
    process.run(3)
    for graph in reversed(graphs):
        process.launch(graph, 3)
    process.launch(graphs[0], 1)
    assert process.in_order


def test_streams_that_alternate_wait_for_the_call_alone() -> None:
    """And not for what came behind it on its stream."""
    process = Process(mixes=False)
    for stream in (1, 2, 1):
        process.run(stream)
    later = process.cuda.kernel(1)
    process.run(2)
    assert process.in_order
    assert not process.ran[-1].follows(later)
    again = process.cuda.kernel(2)
    process.run(2)
    process.run(1)
    assert process.in_order
    assert process.ran[-1].follows(again), "a second call on the same stream comes behind it, too"


def test_a_call_that_was_recorded_is_waited_for_while_its_stream_is_captured() -> None:
    for mixes in (True, False):
        process = Process(mixes=mixes)
        for stream in (1, 2):
            process.run(stream)
        graph = process.cuda.begin_capture(2)
        if mixes:
            process.call(2)
        process.run(3)
        process.cuda.end_capture(graph)
        assert process.in_order


@pytest.mark.parametrize("seed", range(20))
def test_without_graphs_calls_follow_one_another(seed: int) -> None:
    rng, process = random.Random(seed), Process(mixes=False)
    for _ in range(100):
        process.run(rng.choice(STREAMS))
        for _ in range(rng.randint(0, 2)):
            process.cuda.kernel(rng.choice(STREAMS))
        assert process.in_order


def test_each_thread_has_a_default_stream_of_its_own() -> None:
    """All have one handle: so a call there waits, and records behind itself, each time."""
    gpu, order, told = Cuda(), Order(), list[str]()
    gpu.ends[PER_THREAD] = set()
    for name in ("wait", "record"):
        setattr(gpu, name, lambda stream, _, name=name: told.append(f"{name} {stream}"))
    for stream in (PER_THREAD, PER_THREAD, 1):
        order.begin(gpu, stream, None, mixes=True)  # type: ignore[arg-type]
        order.end(gpu, stream, mixes=True)  # type: ignore[arg-type]
    assert told == ["record 2", "wait 2", "record 2", "wait 1", "record 1"]


def test_c_has_the_same_structure() -> None:
    assert c_structs.fields("launches.h", "order_t") == [
        ("event", ctypes.c_int64), *((name, kind) for name, kind in OrderState._fields_[1:])
    ]  # fmt: skip
