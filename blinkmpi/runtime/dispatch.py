"""The life of a call, on the ground that all ranks have found and opened together.

Check the arguments locally; enter, which compares the call with all peers
before a scheme is chosen or data touched; then run our program, or MPI's own
collective, under the same deadline.
"""

from __future__ import annotations

import atexit
import os
import time
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from mpi4py import MPI, run

from ..errors import (
    ArgumentError,
    BufferTypeError,
    CollectiveTimeout,
    DeviceError,
    FallbackError,
    MismatchError,
    PeerLost,
    RemoteError,
)
from ..planning.diff import PlanDifference
from ..planning.plan import Rule
from ..program.call import Call
from ..program.reduction import Array, dtype_of
from ..topology import Topology
from ..transport.host.liveness import FAILED, FOREIGN
from ..transport.host.loaded import Loaded, Repeat
from ..util.settings import log
from .arguments import Prepared, call_key
from .bootstrap import Options, check_timeout, is_time
from .buffers import Foreign, ForeignOp, lies_on_device
from .context import Ground
from .cuda_calls import GpuCalls
from .cuda_context import CudaContext
from .mpi_fallback import Job, describe
from .process_exit import LOST, UNCAUGHT
from .requests import Persistent, Progress, Request

CACHE_SIZE = 64
LOOK_SECONDS = 0.2  # how often a wait for MPI looks after the peers


@dataclass(frozen=True, slots=True)
class Way:
    """How a checked call will be done: by a loaded program, by MPI, or (neither) by meeting alone."""

    loaded: Loaded | None
    mpi: bool
    text: str = ""  # what the ranks compare


class Engine(Ground):
    """What stands behind one Communicator: its ground (see there), and its calls, from the first to the last."""

    def __init__(self, comm: MPI.Intracomm, options: Options, part: Topology | None = None) -> None:
        super().__init__(comm, options, part)
        self.dead: BaseException | None = None
        self._open = ""  # a collective of MPI's own that has begun and not ended
        self.seq = 0
        self._ways: dict[tuple[Call, bool], Way] = {}
        # calls on NumPy arrays that were made before
        self._made: dict[tuple[Any, ...], tuple[Prepared, Way, Repeat | None]] = {}
        self._scratch: Array = np.empty(0, np.uint8)  # what calls by way of memory of our own receive into, one by one
        self.progress = Progress()
        self.gpu_calls = GpuCalls(self.gpus, self.transport, self) if self.gpus is not None else None

    # ---- a call

    def block(self, job: Job, args: tuple[Any, ...], timeout_s: float | None, stream: Any = None) -> None:
        """Do a blocking call, behind all non-blocking ones made before; with ``stream``, only enqueue it there."""
        self.progress.drain()
        gpus = self.gpu_calls
        if gpus is not None and timeout_s is None and gpus.again(job.prepare, args, stream):
            return
        key = call_key(job.prepare, args) if timeout_s is None and stream is None else None
        made = self._made.get(key) if key is not None else None
        if made is not None:
            self._again(*made, job, args)
            return
        job = job.of(*args)
        ready = self._prepare(job, timeout_s)
        if stream is not None and isinstance(ready, Prepared) and not ready.on_device:
            ready = ArgumentError("stream= is for buffers in GPU memory; leave it out, or pass GPU arrays")
        if gpus is not None and isinstance(ready, Prepared) and ready.on_device:
            gpus.block(job, ready, stream, self._deadline(timeout_s))
            return
        self._perform(ready, job, self._deadline(timeout_s), blocking=True)
        if key is not None and isinstance(ready, Prepared):
            self._remember(key, ready)

    def _again(self, ready: Prepared, way: Way, repeat: Repeat | None, job: Job, args: tuple[Any, ...]) -> None:
        """Make a call that was made before. Short, because in emptied caches each line here costs."""
        if self.dead is not None:
            self.alive()
        self.seq += 1
        done = None
        if repeat is not None:
            try:
                done = self.transport.again(repeat, self.seq)
            except BaseException as fatal:  # an interrupt: the others are in the call
                self.die(fatal)
                raise
        if not done:
            self._run(ready, way, job.of(*args), self.timeout_s, begun=done is False)
        elif ready.home is not None:
            ready.settle()

    def _remember(self, key: tuple[Any, ...], ready: Prepared) -> None:
        """Keep what was settled for a call, if nothing but the buffers' content can be different the next time.

        Not if Python runs it, which needs the arrays themselves.
        """
        way = self._ways.get((ready.call, True))
        theirs = [part[0] for part in key if isinstance(part, tuple)]  # (address, read-only): see call_key
        if way is None or not theirs or (way.loaded is not None and way.loaded.executor != "c"):
            return
        if len(self._made) >= CACHE_SIZE:
            del self._made[next(iter(self._made))]
        spots = ready.spots()
        send, recv = cast(Any, spots.send), cast(Any, spots.recv)
        loaded, text = way.loaded, way.text
        repeat = self.transport.repeat(loaded, text, send, recv, self.timeout_s) if loaded is not None else None
        self._made[key] = (spots, way, repeat)

    def start(self, job: Job, timeout_s: float | None, stream: Any = None) -> MPI.Request:
        """Begin a non-blocking call. Its arguments are read now; what peers or time do wrong is raised by ``Wait``."""
        ready = self._prepare(job, timeout_s)
        if self.gpu_calls is not None and isinstance(ready, Prepared) and ready.on_device:
            self.progress.drain()
            return self.gpu_calls.start(ready, stream, self._deadline(timeout_s))
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

    def cuda_context(self) -> CudaContext:
        """The GPUs, to register buffers, after which no call is launched as before.

        Raises:
            DeviceError: if there are none; PeerLost if the communicator is dead.
        """
        self.alive()
        if self.gpus is None:
            raise DeviceError(f"this job has no GPUs: {self.why_no_gpus}")
        self.gpu_calls.forget()  # type: ignore[union-attr]
        return self.gpus

    def persist(self, job: Job, stream: Any) -> Persistent | None:
        """A call to be started many times, on GPU memory; None if its buffers are the host's."""
        ready = self._prepare(job, None)
        if isinstance(ready, Exception) and not isinstance(ready, Foreign) and any(map(lies_on_device, job.args)):
            raise ready
        if self.gpu_calls is None or not isinstance(ready, Prepared) or not ready.on_device:
            return None
        return self.gpu_calls.persist(ready, stream, self.timeout_s)

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
            if ready.on_device and self.gpus is not None:
                self.gpus.check(job.name, ready)
            if ready.home is not None and ready.recv is None:
                ready = ready.by_way_of(self._room(ready.home.nbytes))
            return ready
        except (MismatchError, RemoteError, CollectiveTimeout, PeerLost):  # of an exchange: all ranks know
            raise
        except Foreign as why:
            return type(why)(*why.args)  # without the traceback, whose frames keep the user's buffers
        except Exception as error:  # peers must hear of it before it is raised
            return error

    def _room(self, nbytes: int) -> Array:
        """Memory of our own for a call, which the next one may use again."""
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
            # calls that were made before know where it was
            self._made = {key: made for key, made in self._made.items() if made[0].home is None}
        return self._scratch

    def _perform(self, ready: Prepared | Exception, job: Job, timeout_s: float, *, blocking: bool) -> None:
        """Enter and execute. Errors of arguments are raised on every rank, before data is touched."""
        self.alive()
        self.seq += 1
        try:
            way = self._way(ready.call, blocking) if isinstance(ready, Prepared) else Way(None, mpi=True)
        except Exception as error:
            ready, way = error, Way(None, mpi=True)
        self._run(ready, way, job, timeout_s)

    def _run(self, ready: Prepared | Exception, way: Way, job: Job, timeout_s: float, *, begun: bool = False) -> None:
        """Execute a call that has its number; raises what it refuses, and dies of all else."""
        try:
            refused = self._execute(ready, way, job, timeout_s, begun)
        except BaseException as fatal:  # in the middle of the call, whatever it is
            self.die(fatal)
            raise
        if refused is not None:
            raise refused

    def _execute(
        self, ready: Prepared | Exception, way: Way, job: Job, timeout_s: float, begun: bool
    ) -> Exception | None:
        """Meet the others and do it; returns an error after which the communicator lives on."""
        failed = None if isinstance(ready, Prepared | Foreign) else ready
        if isinstance(ready, Prepared):
            text = way.text
        else:
            text = f"{FAILED}{type(failed).__name__}: {failed}" if failed else f"{FOREIGN}{job.name}"
        try:
            if way.loaded is not None and isinstance(ready, Prepared):
                send, recv = cast(Any, ready.send), cast(Any, ready.recv)  # of the host: nothing else has such a way
                by_mpi = self.transport.call(way.loaded, self.seq, text, send, recv, timeout_s, begun=begun)
                if not by_mpi:
                    ready.settle()
                    return None
            else:
                by_mpi = self.transport.enter(self.seq, text, timeout_s)
        except (MismatchError, RemoteError) as error:  # nobody has touched data, and all ranks know
            return failed or error
        if failed is not None:
            return failed
        if by_mpi or way.mpi:
            self.transport.heed(self.seq)
            try:
                if by_mpi:
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
            way = Way(None, mpi=False, text=describe(call))
            if call.total:
                rule = self.rule(call, blocking=blocking)
                mpi = rule.scheme == "mpi"
                way = Way(None if mpi else self.transport.load(self.program(call, rule), rule.protocol), mpi, way.text)
                self._say(call, rule, way.loaded)
            if len(self._ways) >= CACHE_SIZE:
                del self._ways[next(iter(self._ways))]
            self._ways[call, blocking] = way
        return way

    def exchange(self, count: int) -> tuple[int, ...]:
        """Every rank's number, for what a call must know before it can enter."""
        self.progress.drain()
        self.alive()
        self.seq += 1
        try:
            return self.transport.exchange(self.seq, count, self.timeout_s)
        except (MismatchError, RemoteError):
            raise
        except BaseException as fatal:
            self.die(fatal)
            raise

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
        peers = self.transport.peers(f"its part of MPI's own {what}")
        self.transport.look(self.seq, lambda: peers, waited_s, timeout_s)

    def _say(self, call: Call, rule: Rule, loaded: Loaded | None) -> None:
        """One log line per distinct call shape."""
        if self.rank == 0 and self.settings.wants("INFO"):
            how = "MPI's own"
            if loaded is not None:
                program = loaded.program
                trees = len({c.tree for c in program.channels})
                chunk = program.chunk * dtype_of(call.dtype).itemsize
                protocol = "chunks by cma" if loaded.lent else f"x {program.depth} slots"
                how = f"{rule.scheme}, {trees} trees, {chunk} B {protocol}, {loaded.executor} executor"
            self._once(f"{describe(call)}: {how}; {rule.reason}", "INFO")

    def say_once(self, text: str) -> None:
        """Log a warning the first time."""
        self._once(text)

    @staticmethod
    def describe(ready: Prepared) -> str:
        """A call as people read it, and as ranks compare it."""
        return describe(ready.call)

    # ---- another plan

    def replan(self) -> tuple[PlanDifference, ...]:
        """Probe the machine again, plan, and go on with the new plan; collective. Returns what is different."""
        self.progress.drain()
        self.alive()
        if self.gpu_calls is not None:
            self.gpu_calls.events.drain()
        changes = self._plan_again()
        self._ways.clear()
        self._made.clear()
        if self.gpu_calls is not None:
            self.gpu_calls.forget()
        return changes

    # ---- the end

    def close(self) -> None:
        """Free everything: collectively, or, if the communicator is dead, only what is local."""
        self.progress.close()
        if self.gpu_calls is not None:
            self.gpu_calls.events.close()
        if self.dead is not None:
            self.transport.helper.close()
            self.die(self.dead)
            return
        self.seq += 1
        try:
            self.transport.enter(self.seq, "free()", self.timeout_s)
        except BaseException as error:
            self.die(error)
            raise
        super().close()

    def die(self, error: BaseException) -> None:
        """Never use the communicator again, and tell the peers why. Safe to call twice."""
        self.dead = self.dead or error
        if self.gpus is not None:
            self.gpus.transport.abort()
        self.transport.abort(self.dead)
        atexit.unregister(self._end)
        atexit.register(self._end)

    def _end(self) -> None:
        """At Python's end: MPI_Finalize waits for every rank and every call, so end the job if one does not come."""
        if UNCAUGHT.is_set() or MPI.Is_finalized():
            return  # the job is being ended, or has met already
        missing = self.transport.part(self.timeout_s)
        if self.transport.witness.lost():
            LOST.set()
        if not missing and not self._open:
            return
        run.set_abort_status(1)
        if not missing:
            log(self.settings, "WARN", f"rank {self.rank} ends the job: MPI's own {self._open} was left open")
            return
        if self.rank == min(set(range(self.n)).difference(missing)):
            who = self.transport.witness.states(missing)
            log(self.settings, "WARN", f"rank {self.rank} ends the job, or MPI_Finalize would wait for ever: {who}")
