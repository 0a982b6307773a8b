"""What stands behind a Communicator: bootstrap, and the life of a call.

Bootstrap (all ranks together, and all fail together): settings, probe and
gather the machine, pack on rank 0, agree on the plan, open the transport.

A call: check the arguments locally; enter, which compares the call with all
peers before a scheme is chosen or data touched; then run our program, or MPI's
own collective, under the same deadline.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI, run

from .bootstrap import Options as Options
from .bootstrap import agree_on_plan, check_timeout, dump_files, is_time, settle, told_machine
from .buffers import Foreign, ForeignOp, hold, mpi_op
from .calls import Prepared, in_mpi
from .errors import (
    ArgumentError,
    BlinkError,
    BufferTypeError,
    CollectiveTimeout,
    DeviceError,
    FallbackError,
    MismatchError,
    PeerLost,
    RemoteError,
    TopologyError,
)
from .gpu import Bound, GpuRoad
from .miad import Miad
from .numerics import dtype_of
from .plan import Plan, Rule
from .plan_diff import PlanDifference, plan_differences
from .program import Call, Program
from .requests import Persistent, Request
from .select import Gpus, by_slots, choose, program_for
from .settings import log
from .topology import Topology, gather
from .topology.gather import gather_gpus
from .topology.gpu import GpuFacts
from .topology.probe import probe
from .transport.cuda.device import Gpu, cupy, device_count, why_none
from .transport.host import FAILED, FOREIGN, HostTransport, Loaded
from .transport.native import cache_dir
from .tuned import file_of

CACHE_SIZE = 64
LOOK_SECONDS = 0.2  # how often a wait for MPI looks after the peers
Work = Callable[[], BaseException | None]
Finish = Callable[[BaseException | None], None]
CHOSEN: list[int] = []  # the GPU of this process, when it has one
UNCAUGHT = threading.Event()  # an exception is about to end this process, and with it the job


class Job(NamedTuple):
    """A collective, and (see :meth:`of`) the arguments with which the user called it."""

    name: str
    prepare: Callable[..., Prepared]  # of rank, size and the arguments: checks them; may raise Foreign
    method: Callable[..., MPI.Request]  # of a communicator and the arguments: MPI's own, non-blocking
    args: tuple[Any, ...] = ()

    def of(self, *args: Any) -> Job:
        """The call with these arguments."""
        return Job(self.name, self.prepare, self.method, args)

    def held(self) -> tuple[Job, list[MPI.Datatype]]:
        """The call with arguments for later, when MPI reads them in another thread, and datatypes to free then."""
        held = [hold(arg) for arg in self.args]
        return self.of(*(arg for arg, _ in held)), [datatype for _, own in held for datatype in own]

    def mpi(self, comm: MPI.Intracomm) -> MPI.Request:
        """Begin MPI's own collective on ``comm``."""
        return self.method(comm, *(mpi_op(a) if isinstance(a, str) else a for a in self.args))


@dataclass(frozen=True, slots=True)
class Way:
    """How a checked call will be done: by a loaded program, by MPI, or (neither) by meeting alone."""

    loaded: Loaded | None
    mpi: bool
    text: str = ""  # what the ranks compare


class Engine:
    """State of one initialised communicator.

    ``private`` carries our own messages and the calls that we hand to MPI, in their order; the user's calls that
    never come here run on the Communicator itself, at the same time if they like.
    """

    def __init__(self, comm: MPI.Intracomm, options: Options, part: Topology | None = None) -> None:
        self.public = MPI.Intracomm(comm)  # the Communicator's own handle, without its class
        self.private = self.public.Dup()
        self.rank, self.n = self.private.rank, self.private.size
        self.options = options
        self.dead: BaseException | None = None
        self._open = ""  # a collective of MPI's own that has begun and not ended
        self.seq = 0
        self.transport: HostTransport | None = None
        self._ways: dict[tuple[Call, bool], Way] = {}
        self._bound: dict[tuple[Any, ...], Bound] = {}  # calls on GPU memory that were made before
        self._shown: set[str] = set()
        self.progress, self.events = Progress(), Progress()
        self.gpus: GpuRoad | None = None
        self.why_no_gpus = ""
        try:
            self.settings = settle(self.private, options)
            self.timeout_s = float(options.timeout_s or self.settings.timeout_s)
            self._bootstrap(part)
        except Exception:
            self.private.Free()
            raise

    # ---- bootstrap

    def _bootstrap(self, part: Topology | None) -> None:
        """Find the machine (``part`` is what a parent knows of it), plan, and open the transport."""
        node = self.private.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        try:
            wanted = self.options.topology or self.settings.topo_file or None
            probed = gather(self.private, node, measure=wanted is None and part is None)
            self.one_node = len(probed.nodes) == 1
            self.emulated = wanted is not None
            self.machine = told_machine(self.private, wanted, self.n) if wanted is not None else part or probed
            self.plans = Plan(self.machine.name, self.machine.fingerprint, self.n, (), ())  # across nodes: none yet
            self.why_no_gpus = "the ranks lie on several nodes"
            if self.one_node:
                self._open_gpus(node, wanted)
                self.plans = self._host_plans()
            found = self.gpus or self
            dump_files(self.private, self.settings, found.machine, found.plans)
            if self.one_node:
                self.transport = HostTransport(
                    self.private,
                    runner=self.options.runner or self.settings.runner,
                    arena_bytes=self.settings.buffer_bytes,
                    cma=not self.settings.cma_disable,
                    say=self._once,
                )
                if self.transport.no_cma:
                    if self.options.strict and self.transport.native and not self.settings.cma_disable:
                        why = f"strict=True: bytes would cross in two copies, because {self.transport.no_cma}"
                        self.transport.close()
                        raise FallbackError(f"{why}; allow it, or set BLINKMPI_CMA_DISABLE=1")
                    self.plans = by_slots(self.plans)
        finally:
            node.Free()
        self.why_mpi = "" if self.one_node else (
            f"the ranks lie on {len(probed.nodes)} nodes, and transports between nodes are MPI's own in this version"
        )  # fmt: skip
        if self.why_mpi and self.options.strict:
            raise FallbackError(f"strict=True: every call would go to MPI, because {self.why_mpi}")
        if self.rank == 0:
            runner = self.transport.runner_reason if self.transport else f"MPI: {self.why_mpi}"
            log(self.settings, "INFO", f"{self.n} ranks on {self.machine.name} ({self.plans.fingerprint}); {runner}")
            if self.transport and self.transport.native and self.transport.no_cma and not self.settings.cma_disable:
                log(self.settings, "WARN", f"two copies where one would do: {self.transport.no_cma}")
            if self.transport and self.transport.window.shrunk:
                log(self.settings, "WARN", f"/dev/shm is small: {self.transport.arena_bytes} bytes of slots a rank")

    def _open_gpus(self, node: MPI.Comm, wanted: Topology | str | None) -> None:
        """Take a GPU per rank, if every rank has one: find their machine, plan, map their memory."""
        gpu: Gpu | None = None
        facts: GpuFacts | Exception | str
        if self.settings.gpu_disable:
            facts = "BLINKMPI_GPU_DISABLE is set"
        elif not (facts := why_none()):
            try:
                gpu = Gpu(choose_device(node.rank, node.size))
                facts = probe(gpu.bus_id)
            except BlinkError as error:
                gpu, facts = None, str(error)
        try:
            found, reason = gather_gpus(self.private, node, facts)
        except TopologyError as error:  # the same on all ranks: two of them on one GPU, say
            found, reason = None, str(error)
        if gpu is None or found is None:
            self.why_no_gpus = reason
            if self.rank == 0:
                log(self.settings, "INFO", f"no GPUs: {reason}")
            return
        machine = self.machine if wanted is not None else found
        emulated = [d.uuid for d in machine.devices] != [
            d.uuid for d in found.devices
        ]  # else it is this one, corrected
        plans = self._gpu_plans(machine, gpu, emulated=emulated)
        self.gpus = GpuRoad(self.private, gpu, machine, plans, emulated=emulated, say=self._once_on_rank_0)
        if self.rank == 0:
            what = f"{self.n} GPUs, {machine.name}{' (emulated)' if emulated else ''}"
            log(self.settings, "INFO", f"{what}, {gpu.name}, {gpu.versions}")

    def replan(self) -> tuple[PlanDifference, ...]:
        """Probe the machine again, plan, and go on with the new plan; collective. Returns what is different."""
        self.progress.drain()
        self.events.drain()
        self.alive()
        if self.transport is None:
            return ()
        before = self.road.plans
        wanted = self.options.topology or self.settings.topo_file or None
        node = self.private.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        try:
            if wanted is None:
                self.machine = gather(self.private, node)
            if self.gpus is not None:
                found = gather_gpus(self.private, node, probe(self.gpus.gpu.bus_id)).topology
                machine = found if wanted is None and found is not None else self.gpus.machine
                self.gpus.take(machine, self._gpu_plans(machine, self.gpus.gpu, emulated=self.gpus.emulated))
            self.plans = self._host_plans()
        finally:
            node.Free()
        self._ways.clear()
        self._bound.clear()
        changes = plan_differences(before, self.road.plans)
        for change in changes if self.rank == 0 else ():
            text = f"{change.collective} {change.what}: {change.one or 'none'} -> {change.other or 'none'}"
            log(self.settings, "INFO", f"new plan: {text.strip()}")
        return changes

    def _host_plans(self) -> Plan:
        """The plan for host memory; on a job with GPUs, what the user says of plans is about those."""
        options = replace(self.options, algo="", plan=None) if self.gpus else self.options
        plans = agree_on_plan(self.private, self.machine, options, self.settings)
        return by_slots(plans) if self.transport and self.transport.no_cma else plans

    def _gpu_plans(self, machine: Topology, gpu: Gpu, *, emulated: bool) -> Plan:
        table = None if emulated else file_of(cache_dir(), gpu.name, machine)
        links: Gpus = "slots" if emulated else "onehop"
        return agree_on_plan(self.private, machine, self.options, self.settings, links, table)

    # ---- a call

    def block(self, job: Job, timeout_s: float | None, stream: Any = None) -> None:
        """Do a blocking call, behind all non-blocking ones made before; with ``stream``, only enqueue it there."""
        self.progress.drain()
        key = None
        if self.gpus is not None and timeout_s is None:
            key = call_key(job, stream)
            bound = self._bound.get(key) if key is not None else None
            if bound is not None:
                self._launch(bound)
                if stream is None:
                    self._await_gpu(bound.stream, bound.text, self.seq)
                return
        ready = self._prepare(job, timeout_s)
        if stream is not None and isinstance(ready, Prepared) and not ready.on_device:
            ready = ArgumentError("stream= is for buffers in GPU memory; leave it out, or pass GPU arrays")
        if isinstance(ready, Prepared) and ready.on_device:
            made = self._enqueue(ready, stream_address(stream), self._deadline(timeout_s))
            if key is not None and made is not None and made.tuner is None:
                if len(self._bound) >= CACHE_SIZE:
                    del self._bound[next(iter(self._bound))]
                self._bound[key] = made
            if stream is None and made is not None:
                self._await_gpu(made.stream, made.text, self.seq)
            return
        self._perform(ready, job, self._deadline(timeout_s), blocking=True)

    def start(self, job: Job, timeout_s: float | None, stream: Any = None) -> MPI.Request:
        """Begin a non-blocking call. Its arguments are read now; what peers or time do wrong is raised by ``Wait``."""
        if self.transport is None:
            return job.mpi(self.private)
        ready = self._prepare(job, timeout_s)
        if isinstance(ready, Prepared) and ready.on_device:
            return self._start_gpu(ready, stream_address(stream), self._deadline(timeout_s))
        if isinstance(ready, ForeignOp):  # on every rank
            self._fall_back(job, ready)
            return job.mpi(self.public)
        own: list[MPI.Datatype] = []
        if isinstance(ready, Foreign):
            try:
                job, own = job.held()
            except Exception as error:  # an object that does not show its memory
                ready = error

        def work() -> BaseException | None:
            try:
                self._perform(ready, job, self._deadline(timeout_s), blocking=False)
            except BaseException as error:  # whatever it is, it belongs to the one who waits
                return error
            finally:
                for datatype in own:
                    datatype.Free()
            return None

        request = Request()
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self.progress.put(work, request.finish)
        else:
            self._once("non-blocking calls complete at once, because MPI was not started with THREAD_MULTIPLE")
            request.finish(work())
        if isinstance(ready, Prepared | Foreign):
            return request
        raise ready  # as MPI does, and the peers hear of it

    @property
    def road(self) -> GpuRoad | Engine:
        """What the machine, plans and rules of this job are asked of: the GPUs, if every rank has one."""
        return self.gpus or self

    def gpu_road(self) -> GpuRoad:
        """The GPUs, to register buffers, after which no call is launched as before.

        Raises:
            DeviceError: if there are none; PeerLost if the communicator is dead.
        """
        self.alive()
        if self.gpus is None:
            raise DeviceError(f"this job has no GPUs: {self.why_no_gpus}")
        self._bound.clear()
        return self.gpus

    # ---- a call on GPU memory

    def persist(self, job: Job, stream: Any) -> Persistent | None:
        """A call to be started many times, on GPU memory; None if its buffers are the host's."""
        ready = self._prepare(job, None)
        if not isinstance(ready, Prepared) or not ready.on_device or self.gpus is None:
            return None
        bound = self.gpus.bind(ready, describe(ready.call), stream_address(stream), self.timeout_s)
        wait = partial(self._await_gpu, bound.stream, bound.text)
        return Persistent(partial(self._launch, bound), lambda: wait(self.seq), bound.idle)

    def _enqueue(self, ready: Prepared, stream: int | None, timeout_s: float) -> Bound | None:
        """Put a call on a stream; returns it, to be made again, or None if there is nothing to do."""
        self.alive()
        text = describe(ready.call)
        if self.gpus is None or self.transport is None:
            raise BufferTypeError(self.why_no_gpus)
        if not ready.call.total:
            self.seq += 1
            self.transport.pass_by(self.seq, gpu_text(text))
            return None
        try:
            bound = self.gpus.bind(ready, text, stream, timeout_s)
        except BaseException as fatal:  # the peers may be in the call already
            self._die(fatal)
            raise
        if bound.tuner is None or bound.gpu.capturing(bound.stream):
            self._launch(bound)
        else:
            self._measure(bound, bound.tuner)
        return bound

    def _measure(self, bound: Bound, tuner: Miad) -> None:
        """Make a call whose chunk is still looked for: wait for it, and tell each other how long it took."""
        with bound.gpu.timed(bound.stream) as seconds:
            self._launch(bound)
        self._await_gpu(bound.stream, bound.text, self.seq)
        tuner.learn(max(self.exchange(int(seconds() * 1e9))) * 1e-9)

    def _launch(self, bound: Bound) -> None:
        """Enqueue a call that is settled."""
        self.alive()
        if self.gpus.transport.gave_up:  # type: ignore[union-attr]
            self._raise_gpu(bound.text)
        self.seq += 1
        self.transport.pass_by(self.seq, gpu_text(bound.text))  # type: ignore[union-attr]
        bound.start()

    def _start_gpu(self, ready: Prepared, stream: int | None, timeout_s: float) -> MPI.Request:
        """Enqueue now; the request completes when the stream is through."""
        self.progress.drain()
        bound = self._enqueue(ready, stream, timeout_s)
        seq, request = self.seq, Request()
        if bound is None:
            request.finish(None)
            return request
        gpu, text, event = bound.gpu, bound.text, bound.gpu.mark(bound.stream)

        def work() -> BaseException | None:
            gpu.use()
            try:
                self._await_gpu(event, text, seq)
            except BaseException as error:  # it belongs to the one who waits
                return error
            return None

        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self.events.put(work, request.finish)
        else:
            self._once("non-blocking calls complete at once, because MPI was not started with THREAD_MULTIPLE")
            request.finish(work())
        return request

    def _await_gpu(self, on: Any, text: str, seq: int) -> None:
        """Wait until a stream (an address) or an event is through; look after the peers now and then."""
        gpus, host = self.gpus, self.transport
        assert gpus is not None
        assert host is not None
        began = looked = time.monotonic()
        polls, lost, found = 0, 0.0, None
        while not gpus.gpu.idle(on):
            polls += 1
            if polls % 64:
                continue
            now = time.monotonic()
            if now - began > 0.001:
                time.sleep(2e-5)
            if now - looked < LOOK_SECONDS:
                continue
            looked = now
            if found is None:
                found = host.stray(seq, gpu_text(text))
                gone = host.ended()
                lost = (lost or now) if gone else 0.0
                if found is None and lost and now - lost > 1.0:
                    found = PeerLost(f"GPU call {text}: {host.states(gone, seq)}; start the job again")
                if found is not None:
                    gpus.transport.abort()
        if gpus.transport.gave_up:
            if found is not None:
                self._die(found)
                raise found
            self._raise_gpu(text)

    def _raise_gpu(self, text: str) -> None:
        """Raise what a kernel that gave up has left, or what the rank said that made it give up."""
        assert self.gpus is not None
        assert self.transport is not None
        self.alive()
        error = self.gpus.failed(text)
        assert error is not None
        until = time.monotonic() + 1.0
        try:
            while isinstance(error, PeerLost) and time.monotonic() < until:  # the first to give up knows why
                self.transport.heed(self.seq)
                time.sleep(0.01)
        except BlinkError as heard:
            error = heard
        self._die(error)
        raise error

    def alive(self) -> None:
        """Raise PeerLost if an earlier call left the communicator dead."""
        if self.dead is not None:
            why = f"{type(self.dead).__name__}: {self.dead}"
            raise PeerLost(f"the communicator died earlier; start the job again. It was {why}") from self.dead

    def _deadline(self, timeout_s: float | None) -> float:
        """The time that a call may wait; a bad one is an error that the peers are told of, in the time of all."""
        return timeout_s if timeout_s is not None and is_time(timeout_s) else self.timeout_s

    def _prepare(self, job: Job, timeout_s: float | None) -> Prepared | Exception:
        """Check this rank's arguments."""
        self.alive()
        try:
            if timeout_s is not None:
                check_timeout(timeout_s)
            ready = job.prepare(self.rank, self.n, *job.args)
            if ready.on_device and self.gpus is None:
                raise BufferTypeError(f"{job.name} of GPU memory: {self.why_no_gpus}; pass NumPy copies")
            return ready
        except (MismatchError, RemoteError, CollectiveTimeout, PeerLost):  # of an exchange: all ranks know
            raise
        except Foreign as why:
            return type(why)(*why.args)  # without the traceback, whose frames keep the user's buffers
        except Exception as error:  # peers must hear of it before it is raised
            return error

    def _perform(self, ready: Prepared | Exception, job: Job, timeout_s: float, *, blocking: bool) -> None:
        """Enter and execute. Errors of arguments are raised on every rank, before data is touched."""
        self.alive()
        self.seq += 1
        try:
            way = self._way(ready.call, blocking) if isinstance(ready, Prepared) else Way(None, mpi=True)
        except Exception as error:
            ready, way = error, Way(None, mpi=True)
        try:
            refused = self._execute(ready, way, job, timeout_s)
        except BaseException as fatal:  # in the middle of the call, whatever it is
            self._die(fatal)
            raise
        if refused is not None:
            raise refused

    def _execute(self, ready: Prepared | Exception, way: Way, job: Job, timeout_s: float) -> Exception | None:
        """Meet the others and do it; returns an error after which the communicator lives on."""
        failed = None if isinstance(ready, Prepared | Foreign) else ready
        if isinstance(ready, Prepared):
            text = way.text
        else:
            text = f"{FAILED}{type(failed).__name__}: {failed}" if failed else f"{FOREIGN}{job.name}"
        try:
            if self.transport is None:
                by_mpi = True
            elif way.loaded is not None and isinstance(ready, Prepared):
                by_mpi = self.transport.call(way.loaded, self.seq, text, ready.send, ready.recv, timeout_s)  # type: ignore[arg-type]
                if not by_mpi:
                    return None
            else:
                by_mpi = self.transport.enter(self.seq, text, timeout_s)
        except (MismatchError, RemoteError) as error:  # nobody has touched data, and all ranks know
            return failed or error
        if failed is not None:
            return failed
        if by_mpi or way.mpi:
            if self.transport is not None:
                self.transport.heed(self.seq)
            try:
                if by_mpi and self.transport is not None:
                    self._fall_back(job, ready if isinstance(ready, Foreign) else "another rank's arguments are MPI's")
                request = job.mpi(self.private)
            except Exception as error:  # strict, on every rank; or MPI wants other arguments: it has not begun
                return error
            self._wait(request, job.name, timeout_s)
        return None

    def _fall_back(self, job: Job, why: Foreign | str) -> None:
        """Say once that a call is MPI's, and why; an error if ``strict``."""
        text = f"{job.name}: MPI's own, because {why}"
        if self.options.strict:
            raise FallbackError(f"strict=True: {text}; pass arguments that blinkmpi takes, or leave strict out")
        if self.rank == 0:
            self._once(text, "INFO")

    def _way(self, call: Call, blocking: bool) -> Way:
        """How to do a call, by the plan's table."""
        way = self._ways.get((call, blocking))
        if way is None:
            way = Way(None, self.transport is None, describe(call))
            if call.total and self.transport is not None:
                rule = self.rule(call, blocking=blocking)
                mpi = rule.scheme == "mpi"
                way = Way(None if mpi else self.transport.load(self.program(call, rule), rule.road), mpi, way.text)
                self._say(call, rule, way.loaded)
            if len(self._ways) >= CACHE_SIZE:
                del self._ways[next(iter(self._ways))]
            self._ways[call, blocking] = way
        return way

    def program(self, call: Call, rule: Rule) -> Program:
        """The checked program of a call."""
        budget = self.transport.arena_bytes if self.transport else 0
        return program_for(self.plans, call, rule, budget_bytes=budget)

    def exchange(self, count: int) -> tuple[int, ...]:
        """Every rank's number, for what a call must know before it can enter."""
        self.progress.drain()
        self.alive()
        self.seq += 1
        try:
            if self.transport is not None:
                return self.transport.exchange(self.seq, count, self.timeout_s)
            mine, all_ranks = np.array([count], np.int64), np.empty(self.n, np.int64)
            self._wait(self.private.Iallgather(mine, all_ranks), "exchange of block lengths", self.timeout_s)
            return tuple(int(c) for c in all_ranks)
        except (MismatchError, RemoteError):
            raise
        except BaseException as fatal:
            self._die(fatal)
            raise

    def child(self, ranks: list[int]) -> tuple[Options, Topology | None]:
        """For a communicator of some of our ranks, in this order: its options, and its part of the machine."""
        part = self.machine.subset(ranks) if self.one_node else None
        return replace(self.options, topology=part if self.emulated else None, plan=None), part

    def rule(self, call: Call, *, blocking: bool = True) -> Rule:
        """The row of the table that a call takes. Non-blocking calls never go to MPI, nor what it does not do alike."""
        rule = choose(self.plans, call)
        if rule.scheme == "mpi" and not (blocking and in_mpi(call)):
            rows = [r for r in self.plans.rules if r.collective == call.collective and r.scheme != "mpi"]
            rule = min(rows, key=lambda r: r.min_bytes) if rows else rule
        return rule

    def _wait(self, request: MPI.Request, what: str, timeout_s: float) -> None:
        """Poll a request of MPI's until it is complete; look after the peers now and then."""
        since = looked = now = time.monotonic()
        polls = 0
        self._open = what
        try:
            while not request.Test():
                polls += 1
                if polls % 64:
                    os.sched_yield()
                    continue
                now = time.monotonic()
                if now - looked > LOOK_SECONDS or now - since >= timeout_s:
                    looked = now
                    self._look(what, now - since, timeout_s)
                if now - since > 0.05:
                    time.sleep(1e-4)
            self._open = ""
        except MPI.Exception as error:
            if error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
                self._look(what, now - since, timeout_s)
                raise PeerLost(f"call {self.seq}, MPI's own {what}: {error}; start the job again") from error
            raise

    def _look(self, what: str, waited_s: float, timeout_s: float) -> None:
        """Look after the peers during a wait for MPI."""
        if self.transport is not None:
            peers = self.transport.peers(f"its part of MPI's own {what}")
            self.transport.look(self.seq, lambda: peers, waited_s, timeout_s)
        elif waited_s >= timeout_s:
            raise CollectiveTimeout(
                f"rank {self.rank}: MPI's own {what} did not end within {timeout_s:g} s; a peer never came, "
                "or it is slow: look at the other ranks, or raise timeout= (BLINKMPI_TIMEOUT)"
            )

    def _say(self, call: Call, rule: Rule, loaded: Loaded | None) -> None:
        """One log line per distinct call shape."""
        if self.rank == 0 and self.settings.wants("INFO"):
            how = "MPI's own"
            if loaded is not None:
                program = loaded.program
                trees = len({c.tree for c in program.channels})
                chunk = program.chunk * dtype_of(call.dtype).itemsize
                road = "chunks by cma" if loaded.lent else f"x {program.depth} slots"
                how = f"{rule.scheme}, {trees} trees, {chunk} B {road}, {loaded.runner} runner"
            self._once(f"{describe(call)}: {how}; {rule.reason}", "INFO")

    def _once(self, text: str, level: str = "WARN") -> None:
        """Log a text the first time."""
        if text not in self._shown:
            self._shown.add(text)
            log(self.settings, level, text)

    def _once_on_rank_0(self, text: str, level: str) -> None:
        if self.rank == 0:
            self._once(text, level)

    # ---- the end

    def close(self) -> None:
        """Free everything: collectively, or, if the communicator is dead, only what is local."""
        self.progress.close()
        self.events.close()
        if self.dead is not None:
            self._die(self.dead)
            return
        if self.transport is not None:
            self.seq += 1
            try:
                self.transport.enter(self.seq, "free()", self.timeout_s)
            except BaseException as error:
                self._die(error)
                raise
            if self.gpus is not None:
                self.gpus.close(collectively=True)
                self.gpus = None
            self.transport.close()
            self.transport = None
        self.private.Free()

    def _die(self, error: BaseException) -> None:
        """Never use the communicator again, and tell the peers why. Safe to call twice."""
        self.dead = self.dead or error
        if self.gpus is not None:
            self.gpus.transport.abort()
        if self.transport is not None:
            self.transport.abort(self.dead)
        atexit.unregister(self._end)
        atexit.register(self._end)

    def _end(self) -> None:
        """At Python's end: MPI_Finalize waits for every rank and every call, so end the job if one does not come."""
        if UNCAUGHT.is_set() or MPI.Is_finalized():
            return  # the job is being ended, or has met already
        missing = self.transport.part(self.timeout_s) if self.transport else list(range(self.n))
        if not missing and not self._open:
            return
        run.set_abort_status(1)
        if not missing:
            log(self.settings, "WARN", f"rank {self.rank} ends the job: MPI's own {self._open} was left open")
            return
        if self.transport and self.rank == min(set(range(self.n)).difference(missing)):
            who = self.transport.states(missing)
            log(self.settings, "WARN", f"rank {self.rank} ends the job, or MPI_Finalize would wait for ever: {who}")


class Progress:
    """One thread that runs non-blocking calls in the order in which they were made."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Work, Finish] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._open = 0
        self._idle = threading.Condition()

    def put(self, job: Work, finish: Finish) -> None:
        """Run ``job`` behind all earlier ones, then ``finish`` with the error that it returns. They must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="blinkmpi-progress", daemon=True)
            self._thread.start()
        with self._idle:
            self._open += 1
        self._jobs.put((job, finish))

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
        while (item := self._jobs.get()) is not None:
            job, finish = item
            error = job()
            del item, job  # and with them the user's buffers: who has waited finds them free
            finish(error)
            del error, finish
            with self._idle:
                self._open -= 1
                self._idle.notify_all()


def end_job_on_error(comm: MPI.Intracomm) -> None:
    """Make an uncaught exception on one rank end the whole job, as ``python -m mpi4py`` does. Installed once."""
    if comm.size == 1 or getattr(sys.excepthook, "blinkmpi", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        before(kind, error, trace)
        sys.stderr.flush()
        UNCAUGHT.set()
        run.set_abort_status(error)

    hook.blinkmpi = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def call_key(job: Job, stream: Any) -> tuple[Any, ...] | None:
    """What makes two calls on CuPy arrays the same launch; None where an argument is something else."""
    arrays = sys.modules["cupy"].ndarray
    key: list[Any] = [job.prepare, stream_address(stream)]
    for arg in job.args:
        if type(arg) is arrays:
            if not arg.flags.c_contiguous:
                return None
            key += (arg.data.ptr, arg.size, arg.dtype.num)
        elif isinstance(arg, MPI.Op):
            key.append(arg.handle)
        elif arg is MPI.IN_PLACE:
            key.append("in place")
        elif arg is None or isinstance(arg, int | str):
            key.append(arg)
        else:
            return None
    if stream is None:
        key.append(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return tuple(key)


def stream_address(stream: Any) -> int | None:
    """The address of a CUDA stream: CuPy's, torch's, or a number; None for none.

    Raises:
        ArgumentError: for anything else.
    """
    if stream is None or isinstance(stream, int):
        return stream
    for name in ("ptr", "cuda_stream"):
        found = getattr(stream, name, None)
        if isinstance(found, int):
            return found
    raise ArgumentError(f"stream={stream!r}: expected a CuPy or torch stream, or its address")


def choose_device(local_rank: int, local_size: int) -> int:
    """Which of the GPUs that this process sees is its own: by its place on the node, unless the user chose one.

    Raises:
        DeviceError: if there are fewer GPUs than ranks.
    """
    if not CHOSEN:
        count, current = device_count(), int(cupy().cuda.runtime.getDevice())
        if count == 1 or current:  # isolated by the launcher, or chosen by the user
            CHOSEN.append(current)
        elif local_rank < count:
            CHOSEN.append(local_rank)
        else:
            raise DeviceError(f"{local_size} ranks on a node, of whose GPUs this process sees {count}; "
                              "start one rank per GPU")  # fmt: skip
    return CHOSEN[0]


@lru_cache(maxsize=256)
def gpu_text(text: str) -> str:
    """A call on GPU memory, as ranks compare it on the host."""
    return f"{text} in GPU memory"


@lru_cache(maxsize=256)
def describe(call: Call) -> str:
    """A call as people read it, and as ranks compare it."""
    count = call.counts[0] if len(set(call.counts)) == 1 else list(call.counts)
    parts = [f"{count} x {call.dtype}" if call.dtype else "", f"op {call.op}" if call.op else ""]
    parts.append(f"root {call.root}" if call.root >= 0 else "")
    return f"{call.collective}({', '.join(p for p in parts if p)})"
