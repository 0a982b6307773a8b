"""``CudaTransport`` runs calls on GPUs: compile the kernel of a protocol, put it on a stream, report what went wrong.

Nothing here waits for a peer on the host, talks over MPI or allocates in the path of a call: ranks wait for one another
in the kernels, by flags in each other's memory. The number of a call lies in device memory, so a call may be captured
in a CUDA graph and replayed.

Protocols: ``slots`` runs any program. Over one hop, ``ll16_one_shot``, ``ll16_two_shot``, ``ll128_one_shot`` and
``ll128_two_shot`` send packets that carry their flags, and ``direct`` works between registered buffers. ``rs_ag`` is
two kernels: a reduce-scatter by ``slots``, whose results go to all ranks by ``direct``.
"""

import ctypes
from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np

from ...errors import ArgumentError, BlinkError, DeviceError
from ...program.blocks import BlockMoves
from ...program.call import Call
from ...program.ir import Program
from ...program.partition import NodePart
from ...program.reduction import dtype_of
from ...program.template import Sizes, Template
from ...util.together import Comm, gathered
from ..announcement import Called
from .blocks import block_words, usable_lanes
from .codegen import (
    MESSAGE_THREADS,
    PACKET_THREADS,
    STAGE_THREADS,
    WORKERS,
    check_rows,
    packet_threads,
    rows_of,
    table,
    widths,
)
from .device import Gpu, Kernel
from .direct_segments import Segment, longest_segment, segment, spread
from .failure_report import AbortReport
from .host_slots import HostSlots
from .kernel_layout import SPAN_WORDS, SPANS, common_arguments, common_words, fill_call, fingerprint_at, spans_for
from .loaded_kernel import MASK, KernelCache, LoadedKernel, LoadedTemplate, fingerprint, for_call, load_kernel
from .memory_layout import (
    ANNOUNCED_AT,
    HOST_BYTES,
    LINE,
    MAX_CTAS,
    MAX_RANKS,
    SYMMETRIC_BYTES,
    block_bytes,
    default_max_ctas,
    groups,
    laid_out,
    message_bytes,
    most_stages,
    place,
    sent_first,
)
from .messages import Messages
from .network_channels import NetworkBuffers, endpoints_of
from .order import ORDER
from .packets import LL16, PROTOCOLS, Codec, PacketProtocol, PacketStreams, fits, ll_buffers, longest_slice, streams
from .regions import Regions
from .stage_tables import Table, TableMemory
from .symmetric_memory import MAX_CLOCKS, REPORT_WORDS, SymmetricMemory

DIRECT_CTAS, PACKET_CTAS = 128, 48
GATED, GATE_THREADS = ("slots", "direct"), 32  # protocols whose calls may have a gate; its threads, of one CTA
UNNAMED = Called("")  # what many calls share


class CudaTransport:
    """Executes programs among the GPUs of ``comm``, one rank per GPU, all in reach by CUDA IPC.

    Args:
        comm: a communicator of our own, used only to set up, to register and to close.
        gpu: this rank's device.
        names: what the ranks of ``comm`` are called in messages.
        aware: whether MPI takes what goes to other nodes from GPU memory.
        mixes: whether calls in graphs keep the order of all calls, whatever streams the graphs are launched on.
        max_ctas: CTAs of a kernel at most, 0 for the default, which leaves room for other kernels: two that wait for
            peers, ours and NCCL's, must have room on a GPU at once, and the user's own should go on.
        gate_from: bytes from which on a call has a gate (``gate.cu``), alike on all ranks; None: no call has one.

    Raises:
        DeviceError: on every rank, if some rank cannot map some other's memory.
    """

    def __init__(
        self,
        comm: Comm,
        gpu: Gpu,
        *,
        symmetric_bytes: int = SYMMETRIC_BYTES,
        names: Sequence[int] = (),
        aware: bool = False,
        mixes: bool = True,
        max_ctas: int = 0,
        gate_from: int | None = None,
    ) -> None:
        self.n, self.rank, self.gpu, self.symmetric_bytes = comm.size, comm.rank, gpu, symmetric_bytes
        self._comm = comm
        self._names = names or range(comm.size)
        self.aware, self.mixes = aware, mixes
        self._network: NetworkBuffers | None = None  # for channels to other nodes, made when a program first wants it
        self.kernels_started = ctypes.c_int64()  # of calls, here
        self._messages: Messages | None = None
        self._host_slots: HostSlots | None = None
        if self.n > MAX_RANKS:
            raise DeviceError(f"{self.n} GPUs on one node: this version maps at most {MAX_RANKS}")
        self.memory = SymmetricMemory(comm, gpu, symmetric_bytes + message_bytes(self.n) + block_bytes(self.n))
        self.symmetric, self.report = self.memory.addresses, self.memory.report
        self.sms = min(gathered(comm, lambda: gpu.sms, int, error=DeviceError))
        self.max_ctas = min(self.sms, max_ctas or default_max_ctas(self.sms))
        self.block_lanes = usable_lanes(self.n, min(gathered(comm, lambda: self.max_ctas, int, error=DeviceError)))
        self.regions = Regions(gpu, self.n, self.rank, self.memory.table)
        self.tables = TableMemory(gpu, self._last_stream)
        self._captured: set[Table] = set()  # which graphs may name: nobody knows how long they live
        self.kernels = KernelCache(gpu, self.n)
        self.gate_from = gate_from or 0
        # CUDA loads it while the GPU is idle: a first call may come while it waits.
        self._gate = None if gate_from is None or self.n == 1 else self.kernels.gate()
        self._by_packets: dict[tuple[str, str, str], LoadedKernel] = {}  # by protocol, type and operation

    # ---- before a call

    def load(
        self,
        call: Call,
        protocol: str,
        called: Called,
        program: Program | None = None,
        *,
        ctas: int = 0,
        in_host_memory: Collection[int] = (),
        emulated: Callable[[int], tuple[int, int]] | None = None,
        part: NodePart | None = None,
    ) -> LoadedKernel:
        """Compile (or find) the kernel of a call over a protocol and fill in its arguments. Local.

        Args:
            called: what the ranks compare.
            program: for ``slots``.
            ctas: groups of threads to use, 0 for the default.
            in_host_memory: the program's channels that take the host path; all ranks come here together then.
            part: of the program, that of this node, if there are several.

        Raises:
            DeviceError: if it does not fit the GPU.
        """
        self.gpu.use()
        if protocol == "slots":
            if program is None:
                raise ArgumentError("protocol 'slots' runs a program; pass one")
            return self._load_stages(program, called, ctas, in_host_memory, emulated, part)
        if protocol == "direct":
            loaded = self._load_direct(call, called, ctas)
            loaded.fit = partial(self._fit_direct, ctas)
            return loaded
        return self.load_packets(call, protocol, called, ctas)

    def fits(self, program: Program, ctas: int = 0, in_host_memory: Collection[int] = ()) -> bool:
        """Whether symmetric memory has room for a program's slots."""
        try:
            ctas_of = groups(program, self._ctas(ctas, program), in_host_memory)
            place(program, ctas_of, *widths(program.call), self.symmetric_bytes, in_host_memory)
        except DeviceError:
            return False
        return True

    def _ctas(self, wanted: int, program: Program) -> int:
        """CTAs for a program: at most ``max_ctas``, unless it has more stages than that."""
        return max(min(wanted or self.max_ctas, self.max_ctas), min(most_stages(program), self.sms))

    def load_template(self, template: Template, sizes: Sizes, ctas: int) -> LoadedTemplate | str:
        """Put the table of all calls on the device whose counts are of one size, and compile their kernel. Local.

        Returns why there is no room for their slots or arguments, if there is none, the same on every rank: each of
        the calls has to be loaded for itself then.
        """
        self.gpu.use()
        program = template.at(sizes.largest(template.call))
        many, ctas = most_stages(program), self._ctas(ctas, program)
        if many and not spans_for(many):
            return f"a rank has {many} stages, the arguments of a kernel room for {SPANS[-1]}"
        if many > ctas:
            return f"a rank has {many} stages, and {ctas} groups of threads"
        try:
            groups_of = groups(program, ctas)
            room = template.slots(sizes)
            places = place(program, groups_of, *widths(program.call), self.symmetric_bytes, room=room)
        except DeviceError as error:
            return str(error)
        rows = table(program, self.rank, groups_of, places, self.symmetric)
        if not len(rows):
            return LoadedTemplate.of(template, self.rank)
        spans = spans_for(len(program.of(self.rank)))
        kernel, on_device = self.kernels.stages(program, self.rank, spans), self.tables.put(rows.tobytes())
        args = [*self._common(UNNAMED, "slots", program.call), on_device.at]
        length = len(args) + SPAN_WORDS * spans
        loaded = load_kernel(kernel, len(rows), STAGE_THREADS, args, "slots", UNNAMED, on_device, length)
        return LoadedTemplate.of(template, self.rank, loaded, len(args))

    def load_sized(self, loaded: LoadedTemplate, call: Call, called: Called) -> LoadedKernel:
        """The kernel of a call of a template; nothing is compiled, allocated or copied."""
        if loaded.kernel is not None:
            return for_call(loaded.kernel, call, called, loaded.fit)
        idle = self._idle(call, called)
        idle.fit = lambda _loaded, _call: None
        return idle

    def _load_stages(
        self, program: Program, called: Called, ctas: int, in_host_memory: Collection[int],
        emulated: Callable[[int], tuple[int, int]] | None, part: NodePart | None,
    ) -> LoadedKernel:  # fmt: skip
        call, far, size = program.call, part.far if part else {}, (*widths(program.call), self.symmetric_bytes)
        ctas = self._ctas(ctas, program)
        if part:
            groups_of = groups(program, ctas, in_host_memory)  # of the whole: alike on all nodes
            check_rows(program, groups_of, ctas)
            in_host_memory = [i for i, c in enumerate(part.numbers) if c in in_host_memory and i not in far]
            program = part.program
            places = place(program, groups_of, *size, in_host_memory, far, self.n)
        else:
            groups_of, places = laid_out(program, ctas, *size, in_host_memory)
            check_rows(program, groups_of, ctas)
        host = self._host().address if in_host_memory else 0
        buffers = self._network_buffers() if far else None
        ends = (buffers.flags, buffers.slots) if buffers else (0, 0)
        rows = table(program, self.rank, groups_of, places, self.symmetric, host, emulated, far, ends, ctas)
        if not len(rows):  # this rank has nothing to do, but it counts the call
            return self._idle(call, called)
        each = rows_of(program, self.rank, groups_of, ctas)
        kernel, on_device = self.kernels.stages(program, self.rank, rows=each), self.tables.put(rows.tobytes())
        args = [*self._common(called, "slots", call), on_device.at]
        loaded = load_kernel(kernel, len(rows), STAGE_THREADS, args, "slots", called, on_device)
        alone = part is None and each == 1
        loaded.aside = call.in_place and not (alone and sent_first(program, self.rank, groups_of))
        if part and buffers:
            loaded.endpoints = endpoints_of(part, self.rank, groups_of, places, buffers)
        return loaded

    def _network_buffers(self) -> NetworkBuffers:
        """This rank's memory for channels to other nodes."""
        if self._network is None:
            self._network = NetworkBuffers.of(self.gpu, on_gpu=self.aware)
        return self._network

    def _host(self) -> HostSlots:
        """The slots in host memory, made when the first program wants them; collective then."""
        if self._host_slots is None:
            self._host_slots = HostSlots(self.gpu, HOST_BYTES, self._comm)
        return self._host_slots

    def rs_ag(self, first: LoadedKernel, blocks: Call, called: Called) -> LoadedKernel:
        """An allreduce of two kernels.

        Args:
            first: the reduce-scatter ``blocks``, whose result stands in this rank's block of the receive buffer.
        """
        moved = Call("allgather", self.n, (max(blocks.counts),), blocks.dtype)
        first.begin = blocks.block(self.rank)[0] * dtype_of(blocks.dtype).itemsize
        first.then = self._load_direct(moved, called, 0, spread(blocks, self.rank))
        first.fit = None  # which is of the reduce-scatter alone
        return first

    def _load_direct(self, call: Call, called: Called, ctas: int, mine: Segment | None = None) -> LoadedKernel:
        kernel, mine = self.kernels.direct(call), mine or segment(call, self.rank)
        even = int(len(set(call.counts)) == 1)
        args = [*self._common(called, "direct", call), *mine, even, self.memory.table, *[0] * (2 * self.n)]
        return load_kernel(kernel, self._direct_ctas(call, ctas), WORKERS, args, "direct", called)

    def _direct_ctas(self, call: Call, ctas: int) -> int:
        """As many as its longest segment wants: the same on all ranks."""
        return max(1, min(ctas or DIRECT_CTAS, self.max_ctas, MAX_CTAS, -(-longest_segment(call) // (16 * WORKERS))))

    def _fit_direct(self, ctas: int, loaded: LoadedKernel, call: Call) -> None:
        """Give ``direct`` the arguments for a call of equal blocks, as it was loaded for."""
        mine, begin = segment(call, self.rank), common_words(self.n)
        loaded.grid = self._direct_ctas(call, ctas)
        loaded.args[begin : begin + len(mine)] = [*mine]

    def load_packets(self, call: Call, protocol: str, called: Called, ctas: int) -> LoadedKernel:
        """The kernel of a call over packets: one of another count with this one's arguments, if there was one."""
        packets = PROTOCOLS[protocol]
        if not fits(call, protocol):
            raise DeviceError(
                f"{protocol} cannot carry {called.words}: too long, or blocks of several lengths; use slots"
            )
        codec, key = packets.codec, (protocol, call.dtype, call.op)
        known = self._by_packets.get(key)
        if known is None:
            self.gpu.use()
            args = [*self._common(UNNAMED, protocol, call), *self._packets(PacketStreams(0, 0, 0, 0, 0), 0, codec)]
            kernel, threads = self.kernels.packets(call, protocol), packet_threads(self.n, codec)
            known = self._by_packets[key] = load_kernel(kernel, 1, threads, args, protocol, UNNAMED)
        return for_call(known, call, called, partial(self._fit_packets, packets, self.packet_ctas(codec, ctas)))

    def packet_ctas(self, codec: Codec, ctas: int) -> int:
        """The most CTAs of a call over packets; ``ctas``: wanted, 0 for the default."""
        return min(ctas or (PACKET_CTAS if codec is LL16 else self.max_ctas), self.max_ctas)

    def _fit_packets(self, packets: PacketProtocol, most: int, loaded: LoadedKernel, call: Call) -> None:
        """Give ``packets`` the arguments for a call, and at ``most`` so many CTAs."""
        two_shot = packets.two_shot
        mine, units = streams(call, self.rank, two_shot=two_shot), longest_slice(call, two_shot=two_shot)
        loaded.grid = max(1, min(most, -(-packets.codec.positions(units) // loaded.block)))
        begin = common_words(self.n)
        loaded.args[begin : begin + len(mine) + 1] = [*mine, units]

    def load_blocks(self, moves: BlockMoves, called: Called, counted: Sequence[int] = ()) -> LoadedKernel:
        """The kernel of a call of blocks; all ranks have the same :attr:`block_lanes`, which are some.

        Args:
            counted: for lengths in GPU memory, what ``BlockArguments`` of ``blocks.cu`` ends with then.
        """
        self.gpu.use()
        words, ctas = block_words(moves, self.rank, self.symmetric_bytes + message_bytes(self.n), self.block_lanes)
        common = common_arguments(self.symmetric, self.memory.report_at, fingerprint("blocks", called), self.rank, 0)
        if counted:
            words, ctas = [*words, *counted], ctas * self.block_lanes  # as many as the longest block may want
        kernel = self.kernels.blocks(counted=bool(counted))
        return load_kernel(kernel, ctas, MESSAGE_THREADS, [*common, *words], "blocks", called)

    def _packets(self, mine: PacketStreams, units: int, codec: Codec) -> list[int]:
        """The arguments of ``packets`` behind the common ones."""
        at, box = ll_buffers(codec, self.n)
        return [*mine, units, box, *(symmetric + at for symmetric in self.symmetric)]

    def _idle(self, call: Call, called: Called) -> LoadedKernel:
        """A call in which this rank neither sends nor receives."""
        args = [*self._common(called, "slots", call), *self._packets(PacketStreams(0, 0, 0, 0, 0), 0, LL16)]
        kernel = self.kernels.packets(call, "ll16_one_shot")
        return load_kernel(kernel, 1, PACKET_THREADS, args, "slots", called)

    def _common(self, called: Called, protocol: str, call: Call) -> list[int]:
        divisor, said = call.n if call.op == "avg" else 0, fingerprint(protocol, called)
        return common_arguments(self.symmetric, self.memory.report_at, said, self.rank, divisor)

    # ---- a call

    def fill(
        self, loaded: LoadedKernel, send: int, recv: int, send_ref: int, recv_ref: int, timeout_s: float, *,
        final: int = 0, final_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Put this rank's buffers among the arguments of a kernel.

        Args:
            send, recv: addresses of the buffers, 0 where the call has none.
            send_ref, recv_ref: where they are registered (see :meth:`Regions.ref`); only ``direct`` looks at them.
            final: where the result is to be moved when no rank reads this rank's vector any more; 0: nowhere. Packets
                know nothing of it.
            final_bytes: the result's.
        """
        args, n, direct = loaded.args, self.n, loaded.protocol == "direct"
        refs = (send_ref, recv_ref) if direct else (0, 0)  # telling the peers costs a fence
        fill_call(args, n, int(timeout_s * 1e9), (send, recv + loaded.begin, *refs, final, final_bytes))
        if direct:
            args[len(args) - 2 * n : len(args)] = [*self.regions.seen_at(send_ref), *self.regions.seen_at(recv_ref)]
        if loaded.then:
            self.fill(loaded.then, recv, recv, recv_ref, recv_ref, timeout_s)

    @property
    def gated(self) -> bool:
        """Whether there are calls with a gate."""
        return self._gate is not None

    def gate_of(self, loaded: LoadedKernel, nbytes: int) -> Kernel | None:
        """The gate of a call of so many bytes, if it has one: the same on all ranks, whatever each does in the call."""
        return self._gate if nbytes >= self.gate_from and loaded.protocol in GATED else None

    def starter(self, loaded: LoadedKernel, stream: int, holder: object, nbytes: int) -> Callable[..., None]:
        """What puts a filled call on a stream and returns at once; valid while the transport is.

        It is given a number, alike on all ranks, which is added to the fingerprints that the kernels compare: so two
        calls alike are not taken for each other where a rank has left one out, or replays graphs in another order.

        Args:
            holder: keeps the stream alive: the next call, on another one, asks for it.
            nbytes: of the call, by which it may have a gate.
        """
        parts = [loaded, loaded.then] if loaded.then else [loaded]
        at = fingerprint_at(self.n)
        text = loaded.called.words
        launches = [(p.args, p.args[at], p.kernel.launcher(p.grid, p.block, stream, p.params, text)) for p in parts]
        if self._gate and (gate := self.gate_of(loaded, nbytes)):
            launch = gate.launcher(1, GATE_THREADS, stream, loaded.params, f"the gate of {text}")
            launches.insert(0, (*launches[0][:2], launch))
        tables = [p.table for p in parts if p.table]

        def start(number: int = 0, _keep: LoadedKernel = loaded) -> None:  # it has the arguments
            with ORDER.lock:
                self.begin(stream, holder)
                if tables and self.gpu.capturing(stream):
                    self._captured.update(tables)
                self.kernels_started.value += len(parts)  # which count their calls
                for args, said, launch in launches:
                    args[at] = (said + number) & MASK
                    launch()
                    args[at] = said  # for who copies them
                ORDER.end(self.gpu, stream, mixes=self.mixes)

        return start

    @property
    def messages(self) -> Messages:
        """Messages between ranks."""
        self.load_messages()
        assert self._messages is not None
        return self._messages

    def load_messages(self) -> None:
        """Load the kernel of messages. CUDA does so when the GPU is idle; a first message may come while it waits."""
        if self._messages is None:
            common = common_arguments(self.symmetric, self.memory.report_at, 0, self.rank, 0)
            self._messages = Messages(self.gpu, self.kernels.messages(), self.n, common, self.symmetric_bytes)

    @property
    def has_messages(self) -> bool:
        """Whether there may be messages."""
        return self._messages is not None

    def begin(self, stream: int, holder: object) -> None:
        """Let what comes on a stream follow all calls so far; who calls this holds the lock of :data:`ORDER`."""
        ORDER.begin(self.gpu, stream, holder, mixes=self.mixes)

    def follow(self, stream: int, holder: object) -> None:
        """Let what comes on a stream follow all calls so far, as the next call will."""
        with ORDER.lock:
            self.begin(stream, holder)

    def followed(self, stream: int) -> None:
        """Let the next calls follow what is on a stream by now."""
        with ORDER.lock:
            ORDER.end(self.gpu, stream, mixes=self.mixes)

    def _last_stream(self) -> int | None:
        """The stream of the last call; None if there is none, or if it is being captured."""
        last = ORDER.last
        return None if last is None or self.gpu.capturing(last) else last

    def _announced(self) -> list[int]:
        """The last call that each rank has entered here, of whose number 32 bits are known."""
        words = np.frombuffer(self.gpu.download(self.memory.own + ANNOUNCED_AT, LINE * self.n), np.uint64)[:: LINE // 8]
        return [int(word) >> 32 for word in words]

    @property
    def aborted(self) -> bool:
        """Whether some kernel of ours gave up; then the communicator is of no more use."""
        return self.report[1] != 0

    def link_clock(self, link: int) -> int:
        """Where an emulated link of this rank keeps its time.

        Raises:
            DeviceError: for more links than there are clocks.
        """
        if link >= MAX_CLOCKS:
            raise DeviceError(f"link {link}: this version emulates {MAX_CLOCKS} links a rank")
        return self.memory.clocks + 8 * link

    def abort(self) -> None:
        """Make every kernel of ours that waits give up."""
        self.report[0] = 1

    def error(self, text: str) -> BlinkError:
        """What a kernel that gave up has left, in words; ``text`` is the call."""
        return AbortReport(*self.report[1:REPORT_WORDS]).error(text, self._names, self.rank, self._announced)

    # ---- the end

    def close(self, comm: Comm | None) -> None:
        """Unmap and free; with ``comm`` collectively, without it only what is local."""
        self.finish()
        if comm is not None:
            comm.Barrier()
        self.unmap()
        if comm is not None:
            comm.Barrier()
            self.free()

    def finish(self) -> None:
        """Wait until this GPU's work is done."""
        self.gpu.use()
        self.gpu.runtime.deviceSynchronize()

    def unmap(self) -> None:
        """Unmap what is the other ranks', when this GPU's work is done; a second time does nothing."""
        if self._messages is not None:
            self._messages.close()
        for region in list(self.regions.known.values()):
            self.regions.drop(region)
        self.memory.unmap()
        if self._host_slots is not None:
            self._host_slots.close()
            self._host_slots = None

    def free(self) -> None:
        """Free what is this rank's, when no other rank has it mapped any more."""
        self.tables.close()
        self.memory.free()
        if self._network:
            self._network.close(self.gpu)
