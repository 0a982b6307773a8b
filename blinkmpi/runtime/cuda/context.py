"""The GPUs of a communicator: their plan, the kernels of its calls, and the buffers that all ranks have mapped."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np

from ...errors import BufferTypeError, DeviceError
from ...planning.chunk_search import ChunkSearch
from ...planning.gpus.kernel_times import H200, KernelCosts
from ...planning.on_demand import PlanOnDemand
from ...planning.plan import Plan, Rule
from ...planning.selection import choose, program_for
from ...program.call import Call
from ...program.in_place import without_own_blocks
from ...program.ir import Program
from ...program.memory import DeviceArray, address
from ...program.partition import part_of
from ...program.reduction import NAMES, dtype_of
from ...program.routes import cheapest_routes
from ...program.template import Template
from ...topology.model import Topology
from ...transport.announcement import Called
from ...transport.cuda.device import Gpu
from ...transport.cuda.direct_segments import in_blocks
from ...transport.cuda.loaded_kernel import LoadedKernel, copied
from ...transport.cuda.memory.pool import MemoryPool
from ...transport.cuda.packets import PROTOCOLS, fits
from ...transport.cuda.regions import Region
from ...transport.cuda.transport import CudaTransport
from ...util.lru import LRU
from ...util.together import Comm, together
from ..arguments import InBlocks, Prepared, sending_copy
from .templates import Templates

KERNELS = 256  # loaded kernels of one count that are kept
TUNED_FROM = 4 << 20  # vectors of so many bytes search for their chunk while the job runs
LARGEST_CHUNK = 1 << 20
MEASURED = "measured by blinkmpi tune"
TRIAL_TIMEOUT_S = 30.0
NVLINKS = ("nvlink", "xgmi")
GRANULE = 2 << 20  # bytes in which the driver allocates
NS_PER_MIB = 2**20 * 1000  # at 1 MB/s


class CudaContext:
    """The GPUs of a communicator's ranks, one each.

    Args:
        comm: a communicator of our own; for setting up, registering and closing.
        machine, plans: what the calls run on.
        emulated: whether ``machine`` is only told: its links are then paced.
        say: logs what a function gives, once; called only if it is wanted.
        here: the ranks of this node, which are those of ``comm``, if there are several nodes.
        aware: whether MPI takes chunks for other nodes from GPU memory.
        crossing: how they go there, and why, for those who ask.
        mixes: whether calls in graphs keep the order of all calls, whatever streams the graphs are launched on.
        max_ctas: of a kernel, 0 for the default.
        gate_from: bytes from which on a call has a gate; None: no call has one. Between nodes none has.
        costs: what calls cost on these GPUs.
    """

    def __init__(
        self,
        comm: Comm,
        gpu: Gpu,
        machine: Topology,
        plans: PlanOnDemand,
        *,
        emulated: bool,
        say: Callable[[Callable[[], str], str], None],
        here: tuple[int, ...] = (),
        aware: bool = False,
        crossing: str = "",
        mixes: bool = True,
        max_ctas: int = 0,
        gate_from: int | None = None,
        costs: KernelCosts = H200,
    ) -> None:
        self.gpu, self.machine, self.planned, self.emulated, self.here = gpu, machine, plans, emulated, here
        self.crossing, self.costs = crossing, costs
        self.transport = CudaTransport(
            comm, gpu, names=here, aware=aware, mixes=mixes, max_ctas=max_ctas, gate_from=None if here else gate_from
        )
        self.rank = here[comm.rank] if here else comm.rank
        self.comm, self._say = comm, say
        self._kernels: LRU[tuple[Call, Rule], LoadedKernel] = LRU(KERNELS)  # kernels for one count each
        self.searches = True  # whether a search for chunks may wait for calls, to time them
        self._searches: dict[
            tuple[str, int, int, bool], ChunkSearch
        ] = {}  # by collective, root, octave of bytes, registered
        # Registered buffers by (begin, end), each as often as it is registered: its owner, and what to free, or 0.
        self._buffers: dict[tuple[int, int], list[tuple[Any, int]]] = {}
        self.pool: MemoryPool | None = None
        self.unmapped = False  # whether it has given up the other ranks' memory
        self.why_no_blocks = self._why_no_blocks()  # calls of blocks follow programs; empty if they need none
        self._templates = self._new_templates()

    # ---- the choice

    @property
    def plans(self) -> Plan:
        """The plan, as far as calls have needed it."""
        return self.planned.plan

    def rule(self, call: Call, *, registered: bool = True, plan: Plan | None = None) -> Rule:
        """The row of the table that a call takes."""
        return choose(plan or self.plans, call, registered=registered, fits=fits)

    def program(self, call: Call, rule: Rule, plan: Plan | None = None) -> Program:
        """The checked program of a call; ``direct`` and packets carry the same trees without slots."""
        return program_for(plan or self.plans, call, rule)

    def template(self, call: Call, rule: Rule) -> Template | None:
        """What makes the programs of all calls that differ from this one in their counts alone, if there is any."""
        return self._templates.of(call, rule) if self._templates else None

    def chunk_search(self, call: Call, *, registered: bool, rule: Rule | None = None) -> ChunkSearch | None:
        """What looks for the chunk of a call; None where it is measured, or does not matter, or nobody may wait.

        Args:
            rule: the row of the table that it takes, if that is known.
        """
        nbytes = call.nbytes
        if nbytes < TUNED_FROM or self.here or not self.searches:
            return None
        rule = rule or self.rule(call, registered=registered)
        if rule.protocol != "slots" or rule.reason == MEASURED:
            return None
        key = (call.collective, call.root, nbytes.bit_length(), registered)
        if key not in self._searches:
            lowest = highest = rule.chunk_bytes
            while highest < LARGEST_CHUNK and self._fits(call, rule, 2 * highest):
                highest *= 2
            self._searches[key] = ChunkSearch(lowest, highest, lowest)
        return self._searches[key]

    def _fits(self, call: Call, rule: Rule, chunk: int) -> bool:
        rule = msgspec.structs.replace(rule, chunk_bytes=chunk)
        if self._templates and self.template(call, rule):
            return self._templates.load(call, rule, Called("")) is not None
        program = self.program(call, rule)
        return self.transport.fits(program, rule.ctas, self._in_host_memory(program, rule))

    def taken(self, call: Call, *, registered: bool, captured: bool = False) -> Rule:
        """The row of the table that a call takes, with the chunk that was found for it, or that is tried next."""
        rule = self.rule(call, registered=registered)
        search = self.chunk_search(call, registered=registered, rule=rule)
        if search is None:
            return rule
        return msgspec.structs.replace(rule, chunk_bytes=search.best if captured else search.chunk)

    def kernel(self, call: Call, called: Called, registered: bool, *, captured: bool = False) -> LoadedKernel:
        """The kernel of a call, compiled and loaded at its first use; its arguments are the caller's to change.

        Args:
            captured: into a CUDA graph, which nobody can time: the best chunk so far must do.
        """
        rule = self.taken(call, registered=registered, captured=captured)
        loaded = self._sized(call, rule, called)
        if loaded is None:
            key = (call, rule)
            kept = self._kernels.find(key)
            if kept is None:
                kept = self._load(call, rule, called)
                self._kernels.put(key, kept)
            loaded = copied(kept)
        self._say(partial(self._choice, call, called, rule, loaded), "INFO")
        return loaded

    def _choice(self, call: Call, called: Called, rule: Rule, loaded: LoadedKernel) -> str:
        """How a call will run, and why."""
        where = f"{loaded.grid} groups of {loaded.block} threads, {loaded.kernel.registers} registers"
        gate = ", behind a gate" if self.transport.gate_of(loaded, call.nbytes) else ""
        chunk = f", chunks of {rule.chunk_bytes} B at most" if rule.protocol == "slots" else ""
        return f"{called.words}: {rule.scheme}, {rule.protocol}{chunk}, {where}{gate}; {rule.reason}"

    def _sized(self, call: Call, rule: Rule, called: Called) -> LoadedKernel | None:
        """The kernel of a call that is made of what calls of other counts have loaded; None if there is nothing."""
        if rule.protocol in PROTOCOLS:
            return self.transport.load_packets(call, rule.protocol, called, rule.ctas)
        if rule.protocol == "slots" and self._templates:
            return self._templates.load(call, rule, called)
        return None

    def _load(self, call: Call, rule: Rule, called: Called) -> LoadedKernel:
        """The kernel of a call, for itself if need be."""
        if rule.protocol == "rs_ag":
            blocks = in_blocks(call)
            # ranks with another protocol announce another text, so they differ
            by = msgspec.structs.replace(called, text=f"{called.text} by rs_ag")
            first = msgspec.structs.replace(rule, collective="reduce_scatter", protocol="slots")
            return self.transport.rs_ag(self._load(blocks, first, by), blocks, by)
        if (sized := self._sized(call, rule, called)) is not None:
            return sized
        program = self.program(call, rule) if rule.protocol == "slots" else None
        if program is not None and call.in_place:
            program = without_own_blocks(program)
        emulated = self._emulated(program, rule) if program is not None and self.emulated else None
        by_host = self._in_host_memory(program, rule) if program is not None else ()
        part = part_of(program, self.here, range(len(self.here))) if program is not None and self.here else None
        return self.transport.load(
            call, rule.protocol, called, program, ctas=rule.ctas, in_host_memory=by_host, emulated=emulated, part=part
        )

    def _new_templates(self) -> Templates | None:
        """Templates for the present plan; None between nodes and on emulated links, whose tables are of one count."""
        if self.here or self.emulated:
            return None

        def on_host(program: Program, rule: Rule) -> bool:
            return bool(self._in_host_memory(program, rule))

        return Templates(self.transport, self.planned, on_host, self._say)

    def _paths(self, program: Program, rule: Rule) -> list[tuple[int, ...]]:
        """The vertices that every channel passes; its rank alone, if it writes and reads one."""
        call = program.call
        if self.plans.algorithm(call.collective, call.root, rule.scheme) is not None:
            routes = cheapest_routes(program.channels, self.machine)
            return [routes.paths[c.writer, c.readers[0]] for c in program.channels]
        trees = self.plans.packing(call.collective, call.root, rule.scheme).trees
        found = []
        for c in program.channels:
            near = itertools.chain((trees[c.tree % len(trees)],), trees)
            found.append(next(p for tree in near for p in tree.paths(c.writer, c.readers[0], up=c.partial)))
        return found

    def _in_host_memory(self, program: Program, rule: Rule) -> tuple[int, ...]:
        """The channels whose way leads over PCIe or the host, not over NVLink alone."""
        kinds = {(link.src, link.dst): link.kind for link in self.machine.links if link.kind not in NVLINKS}
        paths = self._paths(program, rule)
        return tuple(c for c, path in enumerate(paths) if any(hop in kinds for hop in itertools.pairwise(path)))

    def trial(self, call: Call, rule: Rule, send: Any, recv: Any, stream: int) -> Callable[[], None]:
        """A call by a rule of one's own, to be enqueued any number of times; for measurements.

        Args:
            send, recv: CuPy arrays of bytes.
        """
        loaded = self._load(call, rule, Called(f"trial of {rule}"))
        refs = [self.transport.regions.ref(a.data.ptr, a.nbytes) for a in (send, recv)]
        self.transport.fill(loaded, send.data.ptr, recv.data.ptr, refs[0], refs[1], TRIAL_TIMEOUT_S)
        return self.transport.starter(loaded, stream, None, call.nbytes)

    def _emulated(self, program: Program, rule: Rule) -> Callable[[int], tuple[int, int]]:
        """For channels of an emulated machine: the clock of the link, and ns per MiB of its narrowest part."""
        paths = self._paths(program, rule)
        rates = {(link.src, link.dst): link.mbps for link in self.machine.links}
        order = {ends: i for i, ends in enumerate(sorted(rates))}

        def emulated(channel: int) -> tuple[int, int]:
            hops = list(itertools.pairwise(paths[channel]))
            if not hops:
                return 0, 0
            return self.transport.link_clock(order[hops[0]]), NS_PER_MIB // min(rates[hop] for hop in hops)

        return emulated

    def _why_no_blocks(self) -> str:
        """The same on all ranks."""
        n, machine = self.transport.n, self.machine
        if n == 1 or self.here or self.emulated:
            return "one GPU" if n == 1 else "several nodes" if self.here else "links are emulated"
        kinds = {(link.src, link.dst): link.kind for link in machine.links}
        onward: dict[int, set[int]] = {v: set() for pair in kinds for v in pair}
        for (src, dst), kind in kinds.items():
            if kind in NVLINKS:
                onward[src].add(dst)
        for src, dst in itertools.permutations(range(n), 2):
            over = onward.get(src, set())
            if dst not in over and not any(v >= n and dst in onward[v] for v in over):
                return f"no NVLink joins GPUs {src} and {dst}, nor a switch of it"
        if not self.transport.block_lanes:
            return f"{self.transport.max_ctas} groups of threads are too few for {n} ranks"
        return ""

    @property
    def forecasts(self) -> bool:
        """Whether times of calls follow from what kernels cost: on the real links of one node."""
        return not self.emulated and not self.here

    def take(self, machine: Topology, plans: PlanOnDemand) -> None:
        """Go on with another plan; what was loaded for the old one is of no more use."""
        self.machine, self.planned = machine, plans
        self.why_no_blocks = self._why_no_blocks()
        self._templates = self._new_templates()
        self._kernels.clear()
        self._searches = {}

    # ---- a call

    def fill(
        self, ready: Prepared, called: Called, stream: int, timeout_s: float
    ) -> tuple[Prepared, LoadedKernel, ChunkSearch | None]:
        """The kernel of a call with its buffers among its arguments, and what still looks for its chunk.

        The call is as it was given, or sends a copy, where it is in place and its kernel cannot be.
        """
        if ready.blocks:
            return ready, self._fill_blocks(ready.blocks, called, timeout_s), None
        loaded, registered, send, recv, send_ref, recv_ref = self._ends(ready, called, self.gpu.capturing(stream))
        if loaded.aside:
            ready = sending_copy(ready)
            send = address(cast(DeviceArray, ready.send))
        if ready.segments and (own := self.transport.kernels.of_group(loaded, ready.call, ready.segments)):
            # this kernel reads and writes the tensors of the group itself
            loaded, ready = own, msgspec.structs.replace(ready, segments=None)
        final = ready.final
        final_at, final_bytes = (address(final), final.nbytes) if final is not None else (0, 0)
        if final_at and loaded.protocol in PROTOCOLS:  # its threads read the input before their results overwrite it
            recv, final_at, final_bytes = final_at, 0, 0
        self.transport.fill(loaded, send, recv, send_ref, recv_ref, timeout_s, final=final_at, final_bytes=final_bytes)
        search = self.chunk_search(ready.call, registered=registered) if loaded.protocol == "slots" else None
        return ready, loaded, search if search and not search.done else None

    def _fill_blocks(self, blocks: InBlocks, called: Called, timeout_s: float) -> LoadedKernel:
        """The kernel of a call of blocks with its buffers among its arguments."""
        send, recv = (b.ptr if isinstance(b, DeviceArray) else 0 for b in (blocks.send, blocks.recv))
        if blocks.counts is None:
            loaded = self.transport.load_blocks(blocks.moves, called)
        else:
            ends, at = [cast(DeviceArray, b) for b in (blocks.send, blocks.recv)], blocks.counts
            places = 0 if at.places is None else at.places.ptr
            sizes = ends[0].itemsize, ends[0].size, ends[1].size
            loaded = self.transport.load_blocks(blocks.moves, called, (*sizes, at.counts.ptr, at.told.ptr, places))
        self.transport.fill(loaded, send, recv, 0, 0, timeout_s)
        self._say(lambda: f"{called.words}: from GPU to GPU in {self.transport.block_lanes} lanes", "INFO")
        return loaded

    def check(self, name: str, ready: Prepared) -> None:
        """Raise BufferTypeError for memory that is not this GPU's, whatever the object says that shows it."""
        for buffer in (ready.send, ready.recv, *(_counts(ready.blocks) if ready.blocks else ())):
            if isinstance(buffer, DeviceArray) and buffer.size and (why := self.gpu.why_not_here(buffer.ptr)):
                raise BufferTypeError(
                    f"{name}: a buffer is not this GPU's memory: {why}. Make arrays when the Communicator is there, "
                    "whose GPU is then the current one, or choose the GPU before both; pass host memory as NumPy arrays"
                )

    def stream_of(self, ready: Prepared) -> int:
        """The stream that a call's buffers were made on."""
        counts = _counts(ready.blocks) if ready.blocks else ()
        first, *others = (b.stream for b in (ready.recv, ready.send, *counts) if isinstance(b, DeviceArray))
        for other in set(others) - {first}:
            self.gpu.after(first, other)
        return first

    def _ends(self, ready: Prepared, called: Called, captured: bool) -> tuple[LoadedKernel, bool, int, int, int, int]:
        """The kernel of a call, whether its buffers are registered, their addresses, and where they are registered."""
        send, recv = ready.send, ready.recv
        send_ref, recv_ref = self._ref(send), self._ref(recv)
        registered = send_ref is not None and recv_ref is not None and not ready.plain
        loaded = self.kernel(ready.call, called, registered, captured=captured)
        send_at = send.ptr if isinstance(send, DeviceArray) else 0
        recv_at = recv.ptr if isinstance(recv, DeviceArray) else 0
        return loaded, registered, send_at, recv_at, send_ref or 0, recv_ref or 0

    def _ref(self, buffer: object) -> int | None:
        """Where a buffer is registered; 0 if there is none, None if it is not."""
        if not isinstance(buffer, DeviceArray) or not buffer.size:
            return 0
        return self.transport.regions.ref(buffer.ptr, buffer.nbytes) or None

    # ---- registered buffers

    def empty(self, shape: Any, dtype: Any) -> Any:
        """A registered array, the same on all ranks; collective."""
        made: list[tuple[int, int, Any]] = []

        def own() -> tuple[int, int]:
            count = math.prod(shape) if isinstance(shape, list | tuple) else int(shape)
            name = dtype if isinstance(dtype, str) else NAMES.get(np.dtype(dtype)) or str(dtype)
            nbytes = max(count * dtype_of(name).itemsize, 1)
            at = self.gpu.allocate(-(-nbytes // GRANULE) * GRANULE)
            made.append((at, nbytes, self.gpu.array(at, count, dtype_of(name), None)))
            return at, nbytes

        try:
            self.transport.regions.register(self.comm, own)
        except Exception:
            for at, *_ in made:
                self.gpu.free(at)
            raise
        at, nbytes, array = made[0]
        self._buffers.setdefault((at, at + nbytes), []).append((array, at))
        return array.reshape(shape)

    def register(self, device: DeviceArray) -> None:
        """Register a buffer of the user's; collective."""

        def own() -> tuple[int, int]:
            if not device.size:
                raise BufferTypeError("register: this array has no elements; pass one that has")
            if why := self.gpu.why_not_here(device.ptr):
                raise BufferTypeError(f"register: {why}; pass an array of this rank's GPU")
            return device.ptr, device.nbytes

        self.transport.regions.register(self.comm, own)
        self._buffers.setdefault(_part(device), []).append((device.owner, 0))

    def deregister(self, device: DeviceArray) -> None:
        """Undo :meth:`register` or :meth:`empty`; collective, the work on the buffer must be done.

        Raises:
            BufferTypeError: if this very array, or one of the same place and length, is not registered.
        """
        part = _part(device)

        def known() -> Region:
            region = self.transport.regions.find(part)
            if part not in self._buffers or region is None:
                raise BufferTypeError("deregister: this array is not registered; pass what register() got")
            return region

        region = together(self.comm, known)
        _, allocated = self._buffers[part].pop()
        if not self._buffers[part]:
            del self._buffers[part]
        self.transport.regions.deregister(self.comm, region, part)
        if allocated:
            self.gpu.free(allocated)

    def close(self, *, collectively: bool) -> None:
        """Free what is on the GPU; what peers may still look at only together with them."""
        self.gpu.use()
        if collectively:
            self.gpu.runtime.deviceSynchronize()
        else:
            self.transport.abort()
        self.transport.close(self.comm if collectively else None)
        for _, at in itertools.chain(*self._buffers.values()) if collectively else ():
            if at:
                self.gpu.free(at)
        self._forget(mapped=not collectively)

    def give_up(self) -> None:
        """Have this rank's kernels end, and unmap what is the other ranks'; local, and a second time nothing.

        Raises:
            DeviceError: if work on this GPU has failed, as where it has touched memory that is gone.
        """
        self.transport.abort()
        try:
            self.transport.finish()
        except Exception as error:  # CuPy's CUDARuntimeError
            raise DeviceError(f"the work on GPU {self.gpu.device} has failed: {error}; end this process") from error
        self.transport.unmap()
        self.unmapped = True

    def free(self) -> None:
        """Free what is on the GPU, when all ranks that are left have given it up; the user keeps what he has of it."""
        self.gpu.use()
        self.transport.free()
        self._forget(mapped=False)

    def _forget(self, *, mapped: bool) -> None:
        """Forget the kernels and buffers; ``mapped``: by other ranks, perhaps."""
        if self.pool is not None:
            self.pool.leave(mapped=mapped)
        self._kernels.clear()
        self._buffers = {}


def _counts(blocks: InBlocks) -> tuple[DeviceArray, ...]:
    """The lengths of a call that lie in GPU memory."""
    return blocks.counts.arrays if blocks.counts else ()


def _part(device: DeviceArray) -> tuple[int, int]:
    """Where a buffer begins and ends; one of no elements, which ``empty`` gave, has a byte."""
    return device.ptr, device.ptr + max(device.nbytes, 1)
