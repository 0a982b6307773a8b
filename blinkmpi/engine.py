"""What stands behind a Communicator: bootstrap, and the life of a call.

Bootstrap (all ranks together, and all fail together): settings, probe and
gather the machine, pack on rank 0, agree on the plan, open the transport.

A call: check the arguments locally; enter, which compares the call with all
peers before a scheme is chosen or data touched; then run our program, or MPI's
own collective, under the same deadline.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI, run

from .buffers import Foreign
from .calls import Prepared
from .errors import BlinkError, CollectiveTimeout, FallbackError, PeerLost, RemoteError, TopologyError
from .numerics import dtype_of
from .plan import Plan, Rule
from .program import Call, Program
from .requests import Request
from .select import choose, make_plan, program_for
from .settings import Settings, log, read
from .topology import Topology, gather, load
from .transport.host import FAILED, FOREIGN, HostTransport, Loaded

CACHE_SIZE = 64
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """A collective as the user called it."""

    name: str
    prepare: Callable[[int, int], Prepared]  # (rank, size): check the arguments; may raise Foreign
    mpi: Callable[[], MPI.Request]  # MPI's own, non-blocking


@dataclass(frozen=True)
class Options:
    """The keyword arguments of the Communicator; children inherit them."""

    topology: Topology | str | None = None
    plan: Plan | str | None = None
    timeout_s: float | None = None
    strict: bool = False
    deterministic: bool = False
    runner: str | None = None
    algo: str | None = None


class Engine:
    """State of one initialised communicator."""

    def __init__(self, comm: MPI.Intracomm, options: Options) -> None:
        self.private = comm.Dup()
        self.rank, self.n = self.private.rank, self.private.size
        self.options = options
        self.dead: BlinkError | None = None
        self.seq = 0
        self.transport: HostTransport | None = None
        self._cache: dict[tuple[Call, str], Loaded] = {}
        self._shown: set[str] = set()
        self.progress = Progress()
        try:
            self.settings: Settings = together(self.private, read)
            for text in self.settings.unknown if self.rank == 0 else ():
                log(self.settings, "WARN", text)
            timeout = options.timeout_s if options.timeout_s is not None else self.settings.timeout_s
            self.timeout_s = float(timeout)
            self._bootstrap()
        except BaseException:
            self.private.Free()
            raise

    # ---- bootstrap

    def _bootstrap(self) -> None:
        node = self.private.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        try:
            wanted = self.options.topology or self.settings.topo_file or None
            probed = gather(self.private, node, measure=wanted is None)
            self.one_node = len(probed.nodes) == 1
            self.emulated = wanted is not None
            self.machine = self._told(wanted) if wanted is not None else probed
            self.plans = self._agree_on_plan()
            if self.one_node:
                self.transport = HostTransport(
                    self.private,
                    runner=self.options.runner or self.settings.runner,
                    arena_bytes=self.settings.buffer_bytes,
                )
        finally:
            node.Free()
        self.why_mpi = "" if self.one_node else (
            f"the ranks lie on {len(probed.nodes)} nodes, and transports between nodes are MPI's own in this version"
        )  # fmt: skip
        if self.why_mpi and self.options.strict:
            raise FallbackError(f"strict=True: every call would go to MPI, because {self.why_mpi}")
        if self.rank == 0:
            if self.settings.topo_dump_file:
                write(self.settings.topo_dump_file, self.machine.to_json())
            if self.settings.graph_dump_file:
                write(self.settings.graph_dump_file, self.plans.to_json())
            runner = self.transport.runner_reason if self.transport else f"MPI: {self.why_mpi}"
            log(self.settings, "INFO", f"{self.n} ranks on {self.machine.name} ({self.plans.fingerprint}); {runner}")
            if self.transport and self.transport.window.shrunk:
                log(self.settings, "WARN", f"/dev/shm is small: {self.transport.arena_bytes} bytes of slots a rank")

    def _told(self, wanted: Topology | str) -> Topology:
        """The machine that the user named, the same on every rank."""

        def resolve() -> str:
            topology = load(wanted) if isinstance(wanted, str) else wanted.check()
            if topology.n != self.n:
                raise TopologyError(
                    f"{topology.name} has {topology.n} devices, the job has {self.n} ranks; "
                    "start as many ranks, or take a subset of the devices"
                )
            return topology.to_json()

        return Topology.from_json(self._from_root(resolve), source="topology from rank 0")

    def _agree_on_plan(self) -> Plan:
        """Rank 0 packs (or reads) the plan, everybody checks it. Across nodes there is none yet: MPI does it all."""
        if not self.one_node:
            return Plan(self.machine.name, self.machine.fingerprint, self.n, (), ())

        def make() -> str:
            given = self.options.plan or self.settings.graph_file or None
            if isinstance(given, Plan):
                return given.to_json()
            if given is not None:
                with open(given, encoding="utf-8") as file:
                    return Plan.from_json(file.read(), source=given).to_json()
            algo = self.options.algo if self.options.algo is not None else self.settings.algo
            return make_plan(self.machine, algo=algo, mpi=not self.options.deterministic).to_json()

        text = self._from_root(make)
        return together(self.private, lambda: Plan.from_json(text, source="plan from rank 0").check(self.machine))

    def _from_root(self, make: Callable[[], str]) -> str:
        """What ``make`` gives on rank 0, on every rank; its error on every rank."""
        text = together(self.private, make if self.rank == 0 else lambda: "")
        return str(self.private.bcast(text, root=0))

    # ---- a call

    def block(self, job: Job, timeout_s: float | None) -> None:
        """Do a blocking call, behind all non-blocking ones made before."""
        self.progress.drain()
        self._perform(self._prepare(job), job, timeout_s or self.timeout_s, blocking=True)

    def start(self, job: Job, timeout_s: float | None) -> MPI.Request:
        """Begin a non-blocking call; its arguments are read now, its errors are raised by ``Wait``."""
        if self.transport is None:
            return job.mpi()
        ready = self._prepare(job)
        if isinstance(ready, Foreign):
            return job.mpi()
        request = Request()

        def work() -> None:
            try:
                self._perform(ready, job, timeout_s or self.timeout_s, blocking=False)
            except BaseException as error:  # whatever it is, it belongs to the one who waits
                request.finish(error)
            else:
                request.finish(None)

        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self.progress.put(work)
        else:
            self._once("non-blocking calls complete at once, because MPI was not started with THREAD_MULTIPLE")
            work()
        return request

    def _prepare(self, job: Job) -> Prepared | Foreign | Exception:
        """Check this rank's arguments."""
        try:
            return job.prepare(self.rank, self.n)
        except Exception as error:  # also Foreign; peers must hear of errors before they are raised
            return error

    def _perform(self, ready: Prepared | Exception, job: Job, timeout_s: float, *, blocking: bool) -> None:
        """Enter and execute. Errors of arguments are raised on every rank, before data is touched."""
        if self.dead is not None:
            raise PeerLost(f"the communicator died in an earlier call: {self.dead}; start the job again, or Free it")
        self.seq += 1
        if isinstance(ready, Prepared):
            text = describe(ready.call)
        elif isinstance(ready, Foreign):
            text = f"{FOREIGN}{job.name}"
        else:
            text = f"{FAILED}{type(ready).__name__}: {ready}"
        try:
            foreign = self.transport.enter(self.seq, text, timeout_s) if self.transport else True
            if isinstance(ready, Prepared) and not foreign:
                self._run(ready, job, timeout_s, blocking=blocking)
                return
        except RemoteError:
            if isinstance(ready, Prepared | Foreign):
                raise
        except (CollectiveTimeout, PeerLost) as late:
            self.dead = late
            raise
        if not isinstance(ready, Prepared | Foreign):
            raise ready
        self._delegate(job, timeout_s)

    def _run(self, ready: Prepared, job: Job, timeout_s: float, *, blocking: bool) -> None:
        """Execute an entered call: by our program, or by MPI where the table says so."""
        if ready.call.total == 0 or self.transport is None:
            return
        rule = self.rule(ready.call, blocking=blocking)
        if rule.scheme == "mpi":
            self._say(ready.call, rule, None)
            self._delegate(job, timeout_s)
            return
        key = (ready.call, rule.scheme)
        loaded = self._cache.get(key)
        if loaded is None:
            loaded = self.transport.load(self.program(ready.call, rule))
            if len(self._cache) >= CACHE_SIZE:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = loaded
        self._say(ready.call, rule, loaded)
        self.transport.run(loaded, self.seq, ready.send, ready.recv, timeout_s)

    def program(self, call: Call, rule: Rule) -> Program:
        """The checked program of a call."""
        budget = self.transport.arena_bytes if self.transport else 0
        return program_for(self.plans, call, rule, budget_bytes=budget)

    def exchange(self, count: int) -> tuple[int, ...]:
        """Every rank's number; MPI's own, for what a call must know before it can enter."""
        mine, all_ranks = np.array([count], np.int64), np.empty(self.n, np.int64)
        self._wait(self.private.Iallgather(mine, all_ranks), "exchange of block lengths", self.timeout_s)
        return tuple(int(c) for c in all_ranks)

    def child_options(self, ranks: list[int]) -> Options:
        """Options for a communicator of some of our ranks, in this order."""
        told = self.machine.subset(ranks) if self.emulated else None
        return replace(self.options, topology=told, plan=None)

    def rule(self, call: Call, *, blocking: bool = True) -> Rule:
        """Which row of the table a call takes. Non-blocking calls never go to MPI."""
        rule = choose(self.plans, call)
        if rule.scheme == "mpi" and not blocking:
            rows = [r for r in self.plans.rules if r.collective == call.collective and r.scheme != "mpi"]
            rule = min(rows, key=lambda r: r.min_bytes) if rows else rule
        return rule

    def _delegate(self, job: Job, timeout_s: float) -> None:
        """Run MPI's own collective and wait for it under our deadline."""
        self._wait(job.mpi(), job.name, timeout_s)

    def _wait(self, request: MPI.Request, what: str, timeout_s: float) -> None:
        since = time.monotonic()
        polls = 0
        while not request.Test():
            polls += 1
            if polls % 64:
                os.sched_yield()
                continue
            waited = time.monotonic() - since
            if waited > timeout_s:
                self.dead = CollectiveTimeout(
                    f"rank {self.rank}: MPI's own {what} did not end within {timeout_s:g} s; a peer never came, "
                    "or it is slow: look at the other ranks, or raise timeout= (BLINKMPI_TIMEOUT)"
                )
                raise self.dead
            if waited > 0.05:
                time.sleep(1e-4)

    def _say(self, call: Call, rule: Rule, loaded: Loaded | None) -> None:
        """One log line per distinct call shape."""
        if self.rank == 0 and self.settings.wants("INFO"):
            how = "MPI's own"
            if loaded is not None:
                program = loaded.program
                trees = len({c.tree for c in program.channels})
                chunk = program.chunk * dtype_of(call.dtype).itemsize
                how = f"{rule.scheme}, {trees} trees, {chunk} B x {program.depth} slots, {loaded.runner} runner"
            self._once(f"{describe(call)}: {how}; {rule.reason}", "INFO")

    def _once(self, text: str, level: str = "WARN") -> None:
        """Log a text the first time."""
        if text not in self._shown:
            self._shown.add(text)
            log(self.settings, level, text)

    def close(self) -> None:
        """Free everything: collectively, or, if the communicator is dead, only what is local."""
        self.progress.close()
        if self.dead is None:
            if self.transport is not None:
                self.transport.close()
                self.transport = None
            self.private.Free()


class Progress:
    """One thread that runs non-blocking calls in the order in which they were made."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._open = 0
        self._idle = threading.Condition()

    def put(self, job: Callable[[], None]) -> None:
        """Run ``job`` behind all earlier ones. It must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="blinkmpi-progress", daemon=True)
            self._thread.start()
        with self._idle:
            self._open += 1
        self._jobs.put(job)

    def drain(self) -> None:
        """Wait until all jobs have run; a blocking call must not overtake them."""
        if self._open:
            with self._idle:
                self._idle.wait_for(lambda: self._open == 0)

    def close(self) -> None:
        """Finish the jobs and end the thread. Safe to call twice."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._idle:
                self._open -= 1
                self._idle.notify_all()


def together(comm: MPI.Intracomm, work: Callable[[], T]) -> T:
    """Run ``work`` on every rank; if it fails on one, it fails on all.

    Raises:
        The rank's own error where it failed; RemoteError, naming rank and error, elsewhere.
    """
    result: T | None = None
    error: BaseException | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    texts = comm.allgather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise RemoteError(f"rank {rank} failed: {text}")
    return result  # type: ignore[return-value]


def end_job_on_error(comm: MPI.Intracomm) -> None:
    """Make an uncaught exception on one rank end the whole job, as ``python -m mpi4py`` does. Installed once."""
    if comm.size == 1 or getattr(sys.excepthook, "blinkmpi", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        before(kind, error, trace)
        sys.stderr.flush()
        run.set_abort_status(error)

    hook.blinkmpi = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def describe(call: Call) -> str:
    """A call as people read it, and as ranks compare it."""
    count = call.counts[0] if len(set(call.counts)) == 1 else list(call.counts)
    parts = [f"{count} x {call.dtype}" if call.dtype else "", f"op {call.op}" if call.op else ""]
    parts.append(f"root {call.root}" if call.root >= 0 else "")
    return f"{call.collective}({', '.join(p for p in parts if p)})"


def write(path: str, text: str) -> None:
    """Write a file that a setting asked for."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
