"""The life of a call on GPU memory: enqueue it, wait for it, raise what went wrong.

The ranks meet in the kernel. On the host a rank only notes which call it is in,
so that a rank that waits can tell a peer that does something else, or is gone.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, Protocol, cast

from mpi4py import MPI

from ..errors import (
    ArgumentError,
    BlinkError,
    CollectiveTimeout,
    DeviceError,
    MismatchError,
    PeerLost,
    RemoteError,
    TopologyError,
)
from ..planning.plan import Plan
from ..topology import Topology
from ..topology.gather import gather_gpus
from ..topology.gpu import GpuFacts
from ..topology.measured import applied
from ..topology.probe import probe
from ..transport.cuda.device import Gpu, cupy, device_count, why_none
from ..transport.host.executor import SEQ_BITS, HostTransport
from ..util.cache_folder import cache_dir
from ..util.settings import Settings, log
from .arguments import Prepared
from .chunk_search import Miad
from .cuda_aware import agree, ladder, library_path
from .cuda_context import Bound, CudaContext, on_gpu
from .requests import Persistent, Progress, Request

CACHE_SIZE = 256
HELD = 64
LOOK_SECONDS = 0.2  # how often a wait looks after the peers
GRACE_S = 1.0  # after which a peer whose process has ended counts as lost, if its part is still owed
SHORT_S = 0.001  # a wait polls without sleeping for so long
CHOSEN: list[int] = []  # the GPU of this process, when it has one


class Call(Protocol):
    """A collective and the arguments with which the user called it."""

    @property
    def prepare(self) -> Callable[..., Prepared]:
        """Which collective."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments."""


class Owner(Protocol):
    """What a communicator's engine does for its calls on GPU memory."""

    seq: int
    dead: BaseException | None

    def alive(self) -> None:
        """Raise PeerLost if the communicator is dead."""

    def die(self, error: BaseException) -> None:
        """Never use the communicator again."""

    def exchange(self, count: int) -> tuple[int, ...]:
        """Every rank's number."""

    def describe(self, ready: Prepared) -> str:
        """A call as people read it."""

    def say_once(self, text: str) -> None:
        """Log a warning the first time."""


class GpuCalls:
    """Calls on GPU memory of one communicator."""

    def __init__(self, protocol: CudaContext, host: HostTransport, owner: Owner) -> None:
        self.protocol, self._host, self._owner, self._transport = protocol, host, owner, protocol.transport
        self.events = Progress()
        self._held: deque[Bound] = deque(maxlen=HELD)  # whose own memory may still be read when they are forgotten
        self._made: dict[tuple[Any, ...] | None, Bound] = {}  # calls that were made before, by what makes them the same

    def forget(self) -> None:
        """Settle every call anew: buffers were registered, or the plan is another one."""
        self._made.clear()

    # ---- making calls

    def again(self, prepare: Callable[..., Prepared], args: tuple[Any, ...], stream: Any) -> bool:
        """Make a call that was made before on the same buffers; False if it was not."""
        bound = self._made.get(gpu_key(prepare, args, stream))
        if bound is None:
            return False
        self._launch(bound)
        if stream is None:
            self.wait(bound.stream, bound.text)
        return True

    def block(self, job: Call, ready: Prepared, stream: Any, timeout_s: float) -> None:
        """Make a call: enqueue it on ``stream``, or without one wait for the result."""
        bound = self._enqueue(ready, stream, timeout_s)
        if bound is None:
            return
        key = gpu_key(job.prepare, job.args, stream) if bound.tuner is None else None
        if key is not None:
            if len(self._made) >= CACHE_SIZE:
                del self._made[next(iter(self._made))]
            self._made[key] = bound
        if stream is None:
            self.wait(bound.stream, bound.text)

    def start(self, ready: Prepared, stream: Any, timeout_s: float) -> MPI.Request:
        """Enqueue now; the request completes when the stream is through."""
        bound = self._enqueue(ready, stream, timeout_s)
        request, seq = Request(), self._owner.seq
        if bound is None:
            request.finish(None)
            return request
        gpu, text, event = bound.gpu, bound.text, bound.gpu.mark(bound.stream)

        def work() -> BaseException | None:
            gpu.use()
            try:
                self.wait(event, text, seq)
            except BaseException as error:  # it belongs to the one who waits
                return error
            return None

        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self.events.put(work, request.finish)
        else:
            self._owner.say_once("non-blocking calls complete at once: MPI was not started with THREAD_MULTIPLE")
            request.finish(work())
        return request

    def persist(self, ready: Prepared, stream: Any, timeout_s: float) -> Persistent:
        """A call to be started many times."""
        bound = self._bind(ready, self._owner.describe(ready), stream, timeout_s)
        return Persistent(partial(self._launch, bound), partial(self.wait, bound.stream, bound.text), bound.idle)

    def _enqueue(self, ready: Prepared, stream: Any, timeout_s: float) -> Bound | None:
        """Put a call on a stream; returns it, to be made again, or None if there is nothing to do."""
        owner = self._owner
        owner.alive()
        text = owner.describe(ready)
        if not ready.call.total:
            owner.seq += 1
            self._host.pass_by(owner.seq, on_gpu(text))
            return None
        try:
            bound = self._bind(ready, text, stream, timeout_s)
        except BaseException as fatal:  # the peers may be in the call already
            owner.die(fatal)
            raise
        if bound.tuner is None or bound.gpu.capturing(bound.stream):
            self._launch(bound)
        else:
            self._measure(bound, bound.tuner)
        return bound

    def _bind(self, ready: Prepared, text: str, stream: Any, timeout_s: float) -> Bound:
        holder = self.protocol.gpu.current_stream() if stream is None else stream
        return self.protocol.bind(ready, text, stream_address(stream), holder, timeout_s)

    def _measure(self, bound: Bound, tuner: Miad) -> None:
        """Make a call whose chunk is still looked for: wait for it, and tell each other how long it took."""
        with bound.gpu.timed(bound.stream) as seconds:
            self._launch(bound)
        self.wait(bound.stream, bound.text)
        tuner.learn(max(self._owner.exchange(int(seconds() * 1e9))) * 1e-9)

    def _launch(self, bound: Bound) -> None:
        """Enqueue a call that is settled."""
        owner = self._owner
        if owner.dead is not None:
            owner.alive()
        if self._transport.gave_up:
            self._fail(bound.text)
        owner.seq = seq = owner.seq + 1
        if self.protocol.here:
            self._across(bound, seq)
            return
        self._host.pass_by(seq, bound.note)
        bound.start()
        if len(bound.keep) > 1:
            self._held.append(bound)

    def _across(self, bound: Bound, seq: int) -> None:
        """Make a call of several nodes: meet on the host, start the kernel, carry its chunks until it is through."""
        if bound.gpu.capturing(bound.stream):
            raise DeviceError(
                f"{bound.text}: calls between nodes cannot be captured in a graph; make them outside of it"
            )
        try:
            self._host.enter(seq, bound.note, bound.timeout_s)
        except (MismatchError, RemoteError):  # nothing has begun, and all ranks know
            raise
        except BlinkError as error:
            self._owner.die(error)
            raise
        if self._transport.aware:
            self._acquaint(bound, seq)
        base = (self._transport.calls + 1) << SEQ_BITS
        ends = bound.loaded.ends
        if ends:
            ends.start(base)
        bound.start()
        since = time.monotonic()

        def carry() -> bool:
            nonlocal since
            if self._transport.gave_up:
                return False
            more, moved = self._host.carry(seq, ends)
            now = time.monotonic()
            if moved or not more:
                since = now
            elif now - since > bound.timeout_s + GRACE_S:  # the kernel would have given up if it waited for a chunk
                raise CollectiveTimeout(
                    f"{bound.text}: nothing went between the nodes for {now - since:.0f} s; look at the other nodes, "
                    "or, if they are only slow, raise timeout= (BLINKMPI_TIMEOUT). The communicator is dead"
                )
            return more

        try:
            self.wait(bound.stream, bound.text, carry=carry)
        except BlinkError as error:
            self._owner.die(error)
            raise

    def _acquaint(self, bound: Bound, seq: int) -> None:
        """Let MPI do what it does with GPU memory that it sees for the first time, before a kernel runs."""
        try:
            net = self._host.net
            first = net.acquaint(bound.loaded.ends) if net and bound.loaded.ends else []
            until = time.monotonic() + bound.timeout_s
            while not MPI.Request.Testall(first):
                if net:
                    net.hear()
                self._host.heed(seq)
                if time.monotonic() > until:
                    raise CollectiveTimeout(
                        f"{bound.text}: the first messages from GPU memory took more than {bound.timeout_s:g} s; look "
                        "at the other nodes, or stage them (BLINKMPI_CUDA_AWARE=0). The communicator is dead"
                    )
        except MPI.Exception as error:
            lost = self._host.witness.cut(seq, error)
            self._owner.die(lost)
            raise lost from error
        except BlinkError as error:
            self._owner.die(error)
            raise

    # ---- waiting

    def wait(self, on: Any, text: str, seq: int | None = None, carry: Callable[[], bool] = lambda: False) -> None:
        """Wait until a stream (an address) or an event is through; look after the peers now and then.

        Args:
            text, seq: the call; None is the last one.
            carry: does meanwhile what is to be done on the host, and says whether there may be more of it.

        Raises:
            CollectiveTimeout, MismatchError, PeerLost: after which the communicator is dead.
        """
        number = self._owner.seq if seq is None else seq
        began = looked = time.monotonic()
        polls, lost_since = 0, 0.0
        found: BlinkError | None = None
        while (found is None and carry()) | (not self._idle(on, text, number)):
            polls += 1
            if polls % 64:
                continue
            now = time.monotonic()
            if now - began > SHORT_S:
                time.sleep(2e-5)
            if found is not None or now - looked < LOOK_SECONDS:
                continue
            looked = now
            found = self._host.witness.stray(number, on_gpu(text))
            gone = self._host.witness.ended()
            lost_since = (lost_since or now) if gone else 0.0
            if found is None and lost_since and now - lost_since > GRACE_S:
                found = PeerLost(f"GPU call {text}: {self._host.witness.states(gone, number)}; start the job again")
            if found is not None:
                self.protocol.transport.abort()
        if self.protocol.transport.gave_up or (found is not None and carry()):
            if found is not None:
                self._owner.die(found)
                raise found
            self._fail(text)

    def _idle(self, on: Any, text: str, seq: int) -> bool:
        """Whether a stream or event is through; what breaks the GPU's work may be that a peer's memory is gone."""
        try:
            return self.protocol.gpu.idle(on)
        except DeviceError as broken:
            until, error = time.monotonic() + GRACE_S, cast(BlinkError, broken)
            while time.monotonic() < until and not self._host.witness.ended():
                time.sleep(0.01)
            if gone := self._host.witness.ended():
                error = PeerLost(f"GPU call {text}: {self._host.witness.states(gone, seq)}; {broken}")
            self._owner.die(error)
            raise error from broken

    def _fail(self, text: str) -> None:
        """Raise what a kernel that gave up has left, or what the rank said that made it give up."""
        self._owner.alive()
        error = self.protocol.failed(text)
        until = time.monotonic() + GRACE_S
        try:
            while isinstance(error, PeerLost) and time.monotonic() < until:  # the first to give up knows why
                self._host.heed(self._owner.seq)
                time.sleep(0.01)
        except BlinkError as heard:
            error = heard
        self._owner.die(error)
        raise error


def open_gpus(
    comm: MPI.Intracomm,
    node: MPI.Intracomm,
    place: tuple[int, int],
    told: Topology | None,
    net: Callable[[Topology], Topology],
    plan: Callable[[Topology, Gpu, bool], Plan],
    settings: Settings,
    say: Callable[[str, str], None],
) -> tuple[CudaContext | None, str]:
    """Take a GPU per rank, if every rank has one: find their machine, plan, map their memory; collective.

    Args:
        node: the ranks of this node; kept, where there are several.
        place: this rank's number on its machine, and how many there are.
        told: the machine that the user named, to be emulated unless it is made of these very GPUs.
        net: puts into a machine what was measured between nodes.
        plan: makes the plan of all ranks, from machine, GPU and whether it is emulated.

    Returns:
        The GPUs, or why there are none.
    """
    gpu: Gpu | None = None
    facts: GpuFacts | Exception | str = "BLINKMPI_GPU_DISABLE is set" if settings.gpu_disable else why_none()
    if not facts:
        try:
            gpu = Gpu(choose_device(*place))
            facts = probe(gpu.bus_id)
        except BlinkError as error:
            gpu, facts = None, str(error)
    try:
        found, reason = gather_gpus(comm, node, facts)
    except TopologyError as error:  # the same on all ranks: two of them on one GPU, say
        found, reason = None, str(error)
    if gpu is None or found is None:
        if comm.rank == 0:
            log(settings, "INFO", f"no GPUs: {reason}")
        return None, reason
    found = net(applied(comm, found, facts, cache_dir()))
    machine = told or found
    emulated = [d.uuid for d in machine.devices] != [d.uuid for d in found.devices]
    several = node.size < comm.size
    aware, crossing = agree(comm, settings.cuda_aware, lambda: ladder(MPI, library_path())) if several else (False, "")
    here = tuple(node.allgather(comm.rank)) if several else ()
    plans = plan(machine, gpu, emulated)
    protocol = CudaContext(
        node if several else comm, gpu, machine, plans, emulated=emulated, say=say, here=here, aware=aware,
        crossing=crossing,
    )  # fmt: skip
    if comm.rank == 0:
        what = f"{comm.size} GPUs, {machine.name}{' (emulated)' if emulated else ''}"
        across = f"; between nodes chunks are {crossing}" if crossing else ""
        log(settings, "INFO", f"{what}, {gpu.name}, {gpu.versions}{across}")
    return protocol, ""


def gpu_key(prepare: Callable[..., Prepared], args: tuple[Any, ...], stream: Any) -> tuple[Any, ...] | None:
    """What makes two calls on CuPy arrays the same launch; None where an argument is something else."""
    cupy = sys.modules["cupy"]

    array = cupy.ndarray
    if type(prepare) is not FunctionType:  # a communicator's: it may talk to the peers, and all must do so together
        return None
    key: list[Any] = [prepare]
    for arg in args:
        kind = type(arg)
        if kind is array:
            if not arg._c_contiguous:  # which arg.flags.c_contiguous is, in a sixth of the time
                return None
            key += arg.data.ptr, arg.size, arg.dtype.num
        elif arg is None or kind is int or kind is str:
            key.append(arg)
        elif kind is MPI.Op:
            key.append(arg.handle)
        elif arg is MPI.IN_PLACE:
            key.append("in place")
        else:
            return None
    if stream is None:
        return (*key, cupy.cuda.get_current_stream().ptr, True)
    return (*key, stream_address(stream), False)


def stream_address(stream: Any) -> int | None:
    """The address of a CUDA stream: CuPy's, torch's, or a number; None for none.

    Raises:
        ArgumentError: for anything else.
    """
    if stream is None or type(stream) is int:
        return stream
    for name in ("ptr", "cuda_stream"):
        found = getattr(stream, name, None)
        if type(found) is int:
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
