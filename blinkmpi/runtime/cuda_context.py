"""Calls on GPU memory: the plan for the GPUs, and what stands between a call and the CUDA transport.

A call is enqueued on a stream and the ranks meet in its kernel. Only a call
that waits (no ``stream=``) looks after the peers from the host; one on a stream
has the kernel's deadline, and what went wrong is raised by the next call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ..errors import BlinkError, BufferTypeError
from ..planning.plan import Plan, Rule
from ..planning.selection import program_for
from ..program.call import Call
from ..program.ir import Program
from ..program.memory import DeviceArray, address
from ..program.partition import part_of
from ..program.reduction import dtype_of
from ..topology import Topology
from ..transport.cuda.device import Gpu
from ..transport.cuda.direct_segments import in_blocks
from ..transport.cuda.executor import CudaTransport, Loaded
from ..transport.cuda.packets import PROTOCOLS as PACKETS
from ..transport.cuda.packets import fits
from ..util.together import Comm
from .arguments import Prepared
from .chunk_search import Miad

CACHE_SIZE = 256
TUNED_FROM = 4 << 20  # bytes of a vector whose chunk is looked for while the job runs
TUNED_FROM_CHUNK, LARGEST_CHUNK = 32 << 10, 1 << 20
MEASURED = "measured by blinkmpi tune"
TRIAL_TIMEOUT_S = 30.0
NVLINKS = ("nvlink", "xgmi")
NS_PER_MIB = 2**20 * 1000  # at 1 MB/s


@dataclass(frozen=True, slots=True)
class Bound:
    """A call that only waits to be started: a kernel with all its arguments, and its stream."""

    start: Callable[[], None]
    loaded: Loaded
    stream: int
    gpu: Gpu
    text: str
    keep: tuple[Any, ...]  # what must live as long; with more than the stream, until the GPU has read it
    tuner: Miad | None = None  # if its chunk is still looked for
    note: str = ""  # as ranks compare it on the host
    timeout_s: float = 0.0

    def idle(self) -> bool:
        """Whether its stream is through."""
        return self.gpu.idle(self.stream)


class CudaContext:
    """The GPUs of a communicator's ranks.

    Args:
        comm: a communicator of our own; for setting up, registering and closing.
        machine, plans: what the calls run on.
        emulated: whether ``machine`` is only told: its links are then paced.
        say: logs a text once.
        here: the ranks of this node, which are those of ``comm``, if there are several nodes.
        aware: whether MPI takes chunks for other nodes from GPU memory.
        crossing: how they go there, and why, for those who ask.
    """

    def __init__(
        self,
        comm: Comm,
        gpu: Gpu,
        machine: Topology,
        plans: Plan,
        *,
        emulated: bool,
        say: Callable[[str, str], None],
        here: tuple[int, ...] = (),
        aware: bool = False,
        crossing: str = "",
    ) -> None:
        self.gpu, self.machine, self.plans, self.emulated, self.here = gpu, machine, plans, emulated, here
        self.crossing = crossing
        self.transport = CudaTransport(comm, gpu, names=here, aware=aware)
        self.rank = here[comm.rank] if here else comm.rank
        self._comm, self._say = comm, say
        self._ways: dict[tuple[Call, bool, int], Loaded] = {}
        self._tuners: dict[tuple[str, int, int, bool], Miad] = {}  # by collective, root, octave of bytes, registered
        self._buffers: dict[int, tuple[Any, int]] = {}  # by address: the array, and its region
        self._retired: list[Loaded] = []

    # ---- the choice

    def rule(self, call: Call, *, registered: bool = True) -> Rule:
        """The row of the table that a call takes."""
        rule = self.plans.rule(call.collective, call.nbytes, registered=registered)
        if rule.protocol in PACKETS and not fits(call, rule.protocol):
            rows = [r for r in self.plans.rules if r.collective == call.collective and r.protocol not in PACKETS]
            rows = [r for r in rows if r.registered == registered] or [r for r in rows if not r.registered]
            forced = msgspec.structs.replace(rule, protocol="slots")  # by an algo= that leaves no other
            rule = min(rows or [forced], key=lambda r: r.min_bytes)
        return rule

    def program(self, call: Call, rule: Rule) -> Program:
        """The checked program of a call; ``direct`` and packets carry the same trees without slots."""
        return program_for(self.plans, call, rule)

    def tuner(self, call: Call, *, registered: bool) -> Miad | None:
        """What looks for the chunk of a call; None where the chunk is measured already, or does not matter."""
        nbytes = call.nbytes
        rule = self.rule(call, registered=registered)
        if rule.protocol != "slots" or rule.reason == MEASURED or nbytes < TUNED_FROM or self.here:
            return None
        key = (call.collective, call.root, nbytes.bit_length(), registered)
        if key not in self._tuners:
            highest = TUNED_FROM_CHUNK
            while highest < LARGEST_CHUNK and self._fits(call, rule, 2 * highest):
                highest *= 2
            self._tuners[key] = Miad(TUNED_FROM_CHUNK, highest, TUNED_FROM_CHUNK)
        return self._tuners[key]

    def _fits(self, call: Call, rule: Rule, chunk: int) -> bool:
        rule = msgspec.structs.replace(rule, chunk_bytes=chunk)
        program = self.program(call, rule)
        return self.transport.fits(program, rule.ctas, self._hosted(program, rule))

    def way(self, call: Call, text: str, registered: bool, *, captured: bool = False) -> Loaded:
        """The kernel of a call, compiled and filled in at its first use.

        Args:
            captured: into a CUDA graph, where nothing can be loaded: a chunk that has been tried before must do.
        """
        tuner = self.tuner(call, registered=registered)
        key = (call, registered, tuner.chunk if tuner else 0)
        if captured and tuner and not tuner.done:
            known = [k for k in self._ways if k[:2] == key[:2]]
            key = (call, registered, tuner.best) if (call, registered, tuner.best) in known else next(iter(known), key)
        loaded = self._ways.get(key)
        if loaded is None:
            rule = self.rule(call, registered=registered)
            if tuner is not None:
                rule = msgspec.structs.replace(rule, chunk_bytes=tuner.chunk)
            loaded = self._load(call, rule, text)
            if len(self._ways) >= CACHE_SIZE:
                self._retired.append(self._ways.pop(next(iter(self._ways))))
            self._ways[key] = loaded
            where = f"{loaded.grid} groups of {loaded.block} threads, {loaded.kernel.registers} registers"
            chunk = f", chunks of {rule.chunk_bytes} B at most" if rule.protocol == "slots" else ""
            self._say(f"{text}: {rule.scheme}, {rule.protocol}{chunk}, {where}; {rule.reason}", "INFO")
        return loaded

    def _load(self, call: Call, rule: Rule, text: str) -> Loaded:
        if rule.protocol == "rs_ag":
            blocks, said = in_blocks(call), f"{text} in halves"  # which a rank that takes another protocol does not say
            first = msgspec.structs.replace(rule, collective="reduce_scatter", protocol="slots")
            return self.transport.in_halves(self._load(blocks, first, said), blocks, said)
        program = self.program(call, rule) if rule.protocol == "slots" else None
        pace = self._pace(program, rule) if program is not None and self.emulated else None
        hosted = self._hosted(program, rule) if program is not None else ()
        part = part_of(program, self.here, range(len(self.here))) if program is not None and self.here else None
        return self.transport.load(
            call, rule.protocol, text, program, ctas=rule.ctas, hosted=hosted, pace=pace, part=part
        )

    def _paths(self, program: Program, rule: Rule) -> list[tuple[int, ...]]:
        """The vertices that every channel passes."""
        packing = self.plans.packing(program.call.collective, program.call.root, rule.scheme)
        paths = [{(e.src, e.dst): e.path for e in tree.edges} for tree in packing.trees]
        found = []
        for channel in program.channels:
            ends = (channel.writer, channel.readers[0])
            path = next(p for tree in (paths[channel.tree % len(paths)], *paths) for p in (_way(tree, ends),) if p)
            found.append(path)
        return found

    def _hosted(self, program: Program, rule: Rule) -> tuple[int, ...]:
        """The channels whose way leads over PCIe or the host, not over NVLink alone."""
        kinds = {(link.src, link.dst): link.kind for link in self.machine.links if link.kind not in NVLINKS}
        paths = self._paths(program, rule)
        return tuple(c for c, path in enumerate(paths) if any(hop in kinds for hop in itertools.pairwise(path)))

    def trial(self, call: Call, rule: Rule, send: Any, recv: Any, stream: int) -> Callable[[], None]:
        """A call by a rule of one's own, to be enqueued any number of times; for measurements.

        Args:
            send, recv: CuPy arrays of bytes.
        """
        loaded = self._load(call, rule, f"trial of {rule}")
        self._retired.append(loaded)
        refs = [self.transport.regions.ref(a.data.ptr, a.nbytes) for a in (send, recv)]
        own = self.transport.fill(loaded, send.data.ptr, recv.data.ptr, refs[0], refs[1], TRIAL_TIMEOUT_S)
        return self.transport.starter(own, stream, None)

    def _pace(self, program: Program, rule: Rule) -> Callable[[int], tuple[int, int]]:
        """For channels of an emulated machine: the clock of the link, and ns per MiB of its narrowest part."""
        paths = self._paths(program, rule)
        rates = {(link.src, link.dst): link.mbps for link in self.machine.links}
        order = {ends: i for i, ends in enumerate(sorted(rates))}

        def pace(channel: int) -> tuple[int, int]:
            hops = list(itertools.pairwise(paths[channel]))
            return self.transport.clock(order[hops[0]]), NS_PER_MIB // min(rates[hop] for hop in hops)

        return pace

    def take(self, machine: Topology, plans: Plan) -> None:
        """Go on with another plan; what was loaded for the old one is of no more use."""
        self.machine, self.plans = machine, plans
        self._retired += self._ways.values()
        self._ways, self._tuners = {}, {}

    # ---- a call

    def bind(self, ready: Prepared, text: str, stream: int | None, holder: object, timeout_s: float) -> Bound:
        """A call with everything settled but the moment.

        Args:
            stream: an address, or None for the stream that the buffers were made on.
            holder: keeps the stream alive.
        """
        on = self._stream(ready) if stream is None else stream
        loaded, registered, send, recv, send_ref, recv_ref = self._ends(ready, text, self.gpu.capturing(on))
        home = ready.home
        home_at, home_bytes = (address(home), home.nbytes) if home is not None else (0, 0)
        if (
            home_at and loaded.protocol in PACKETS
        ):  # whose threads have read all of the vector that their results overwrite
            recv, home_at, home_bytes = home_at, 0, 0
        own = self.transport.fill(
            loaded, send, recv, send_ref, recv_ref, timeout_s, home=home_at, home_bytes=home_bytes
        )
        tuner = self.tuner(ready.call, registered=registered) if loaded.protocol == "slots" else None
        looking = tuner if tuner and not tuner.done else None
        start, copied = self.transport.starter(own, on, holder), ready.send
        if not isinstance(copied, DeviceArray) or not copied.copy_of:
            return Bound(start, own, on, self.gpu, text, (holder,), looking, on_gpu(text), timeout_s)

        def copy_and_start() -> None:
            self.gpu.copy(copied.ptr, copied.copy_of, copied.nbytes, on)
            start()

        keep = (holder, copied.owner)
        return Bound(copy_and_start, own, on, self.gpu, text, keep, looking, on_gpu(text), timeout_s)

    def check(self, name: str, ready: Prepared) -> None:
        """Raise BufferTypeError for memory of another GPU of this process."""
        for buffer in (ready.send, ready.recv):
            if isinstance(buffer, DeviceArray) and buffer.device not in (-1, self.gpu.device):
                raise BufferTypeError(
                    f"{name}: a buffer lies on GPU {buffer.device}, this rank's is GPU {self.gpu.device}; make arrays "
                    "when the Communicator is there, whose GPU is then the current one, or choose the GPU before both"
                )

    def _stream(self, ready: Prepared) -> int:
        """The stream that a call's buffers were made on."""
        first, *others = (b.stream for b in (ready.recv, ready.send) if isinstance(b, DeviceArray))
        for other in set(others) - {first}:
            self.gpu.after(first, other)
        return first

    def _ends(self, ready: Prepared, text: str, captured: bool) -> tuple[Loaded, bool, int, int, int, int]:
        """The kernel of a call, whether its buffers are registered, their addresses, and where they are registered."""
        send, recv = ready.send, ready.recv
        send_ref, recv_ref = self._ref(send), self._ref(recv)
        registered = send_ref is not None and recv_ref is not None
        loaded = self.way(ready.call, text, registered, captured=captured)
        send_at = send.ptr if isinstance(send, DeviceArray) else 0
        recv_at = recv.ptr if isinstance(recv, DeviceArray) else 0
        return loaded, registered, send_at, recv_at, send_ref or 0, recv_ref or 0

    def _ref(self, buffer: object) -> int | None:
        """Where a buffer is registered; 0 if there is none, None if it is not."""
        if not isinstance(buffer, DeviceArray) or not buffer.size:
            return 0
        return self.transport.regions.ref(buffer.ptr, buffer.nbytes) or None

    def failed(self, text: str) -> BlinkError:
        """What the kernel that gave up has left, in words."""
        return self.transport.error(text)

    # ---- registered buffers

    def empty(self, count: int, dtype: str) -> Any:
        """A registered array of ``count`` elements, the same on all ranks; collective."""
        nbytes = max(count * dtype_of(dtype).itemsize, 1)
        at = self.gpu.allocate(-(-nbytes // (2 << 20)) * (2 << 20))
        array = self.gpu.array(at, count, dtype_of(dtype), None)
        self._buffers[at] = (array, at)
        self.transport.register(self._comm, at, nbytes)
        return array

    def register(self, device: DeviceArray) -> None:
        """Register a buffer of the user's; collective."""
        self.transport.register(self._comm, device.ptr, device.nbytes)
        self._buffers[device.ptr] = (device.owner, 0)

    def deregister(self, device: DeviceArray) -> None:
        """Undo :meth:`register` or :meth:`empty`; collective, the work on the buffer must be done.

        Raises:
            BufferTypeError: if it is not registered.
        """
        held = self._buffers.pop(device.ptr, None)
        ref = self.transport.regions.ref(device.ptr, device.nbytes)
        if held is None or not ref:
            raise BufferTypeError("deregister: this array is not registered; pass what register() got")
        region = self.transport.regions.known[(ref >> 48) - 1]
        self.transport.deregister(self._comm, region, (device.ptr, device.ptr + max(device.nbytes, 1)))
        if held[1]:
            self.gpu.free(held[1])

    def close(self, *, collectively: bool) -> None:
        """Free what is on the GPU; what peers may still look at only together with them."""
        self.gpu.use()
        if collectively:
            self.gpu.runtime.deviceSynchronize()
            for loaded in [*self._ways.values(), *self._retired]:
                self.transport.unload(loaded)
        else:
            self.transport.abort()
        self.transport.close(self._comm if collectively else None)
        if collectively:
            for _, at in self._buffers.values():
                if at:
                    self.gpu.free(at)
        self._ways, self._retired, self._buffers = {}, [], {}


def on_gpu(text: str) -> str:
    """A call on GPU memory, as ranks compare it on the host."""
    return f"{text} in GPU memory"


def _way(tree: dict[tuple[int, int], tuple[int, ...]], ends: tuple[int, int]) -> tuple[int, ...] | None:
    """The path of an edge of a tree, or of the one that leads back along it."""
    if ends in tree:
        return tree[ends]
    back = tree.get((ends[1], ends[0]))
    return tuple(reversed(back)) if back else None
