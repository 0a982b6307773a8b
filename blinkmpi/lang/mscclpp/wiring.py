"""The operations of an execution plan, resolved: which places of whose memory each moves, which channels it counts on.

What the file names by number within a thread block becomes a GPU, a buffer and a range of chunks. Ranges are cut in
``pieces`` a chunk, so that what several thread blocks share of an operation, and what a round of a pipeline does, are
whole numbers of pieces. What cannot be resolved is a fault, and so is what the executor refuses to load.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from ..xml.wiring import Fault
from .file import FOLDS, NAMES, PUTS, SYNCS, UNREAD, MscclppPlan, PlanBuffer, PlanOperation
from .steps import PACKETS, Await, Count, PlanMove, PlanStep, Range, Signal

ROUNDS = 2  # of a pipeline that are looked at
MOST_PIECES = 1 << 20  # of all buffers
MOST_GPUS = 1024
MOST_OPERATIONS = 64  # of a thread block, that the executor takes
MOST_CHANNELS = 8  # of an operation
BUFFERS = {"i": "input_chunks", "o": "output_chunks", "s": "scratch_chunks"}


class PlanWiring(NamedTuple):
    """All operations of each thread block; ``blocks`` are (GPU, thread block) in order.

    Args:
        pieces: of a chunk.
        initial: what is on a count at the start.
        warnings: what is no fault of the plan, and worth to know.
    """

    blocks: tuple[tuple[PlanStep, ...], ...]
    pieces: int
    initial: dict[Count, int]
    barriers: dict[tuple[int, int], int]  # (GPU, barrier): thread blocks that meet
    warnings: tuple[str, ...]


class _Wrong(Exception):
    """What is wrong with one operation."""


def wire(plan: MscclppPlan) -> tuple[PlanWiring | None, list[Fault]]:
    """Resolve a plan; None, and what is wrong, if that cannot be done."""
    reader = _Reader(plan)
    reader.read()
    if reader.faults:
        return None, reader.faults
    ranges = [r for steps in reader.blocks for step in steps for move in step.moves for r in (*move[0], *move[1])]
    pieces = math.lcm(1, *(x.denominator for r in ranges for x in (r.start, r.length)))
    total = sum(g.input_chunks + g.output_chunks + g.scratch_chunks for g in plan.gpus) * pieces
    if total > MOST_PIECES:
        text = f"{total} pieces of chunks; at most {MOST_PIECES} can be followed: make the plan with fewer chunks"
        return None, [Fault("structure", text)]
    blocks = tuple(tuple(_in_pieces(step, pieces) for step in steps) for steps in reader.blocks)
    return PlanWiring(blocks, pieces, reader.initial, reader.barriers, tuple(dict.fromkeys(reader.warnings))), []


def _in_pieces(step: PlanStep, pieces: int) -> PlanStep:
    def of(ranges: Sequence[Range]) -> tuple[Range, ...]:
        return tuple(r._replace(start=r.start * pieces, length=r.length * pieces) for r in ranges)

    return step._replace(moves=tuple(m._replace(operands=of(m.operands), targets=of(m.targets)) for m in step.moves))


class _Reader:
    """Goes through a plan once."""

    def __init__(self, plan: MscclppPlan) -> None:
        self.plan, self.n = plan, len(plan.gpus)
        self.faults: list[Fault] = []
        self.warnings: list[str] = []
        self.blocks: list[list[PlanStep]] = []
        self.initial: dict[Count, int] = {}
        self.barriers: dict[tuple[int, int], int] = {}
        self._channels: list[dict[str, list[Count]]] = []  # of each GPU, by type: what a signal counts on
        self._groups: list[list[tuple[str, tuple[int, ...]]]] = []
        self._gpu = self._block = 0
        self._refs: dict[str, list[int]] = {}
        self._own: dict[str, list[int]] = {}

    def read(self) -> None:
        if not 1 <= self.n <= MOST_GPUS:
            self.faults.append(Fault("structure", f"{self.n} GPUs; expected 1 to {MOST_GPUS}"))
            return
        for g, gpu in enumerate(self.plan.gpus):
            if gpu.id != g or min(gpu.input_chunks, gpu.output_chunks, gpu.scratch_chunks) < 0:
                self._fault(f"gpu {g}: id {gpu.id}, {gpu.input_chunks}, {gpu.output_chunks} and {gpu.scratch_chunks} "
                            "chunks; expected GPUs in order, and no number below 0")  # fmt: skip
            self._read_channels(g)
        if self.faults:
            return
        meets: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)  # with how many, by whom
        for g, gpu in enumerate(self.plan.gpus):
            for sem, semaphore in enumerate(gpu.semaphores):
                self.initial["sem", g, sem, 0] = semaphore.init_value
            for b, block in enumerate(gpu.threadblocks):
                self._gpu, self._block = g, b
                if block.id != b:
                    self._fault(f"gpu {g}: thread block {b} has id {block.id}; expected them in order")
                    continue
                self._own, self._refs = defaultdict(list), defaultdict(list)
                for channels in block.channels:
                    self._own[channels.channel_type] += channels.channel_ids
                for refs in block.remote_buffer_refs:
                    self._refs[refs.access_channel_type] += refs.remote_buffer_ids
                self.blocks.append(list(self._steps(block.ops)))
                for op in (one for outer in block.ops for one in (outer, *outer.ops)):
                    if op.name == "barrier":
                        meets[g, op.barrier_id].add((op.num_threadblocks, b))
                count = sum(1 + len(op.ops) for op in block.ops)
                if count > MOST_OPERATIONS:
                    self._fault(f"gpu {g} tb {b}: {count} operations; the executor takes {MOST_OPERATIONS}")
        for (g, barrier), users in meets.items():
            counts, blocks = {k for k, _ in users}, {b for _, b in users}
            if counts != {len(blocks)}:
                self._fault(f"gpu {g}: barrier {barrier} is for {', '.join(map(str, sorted(counts)))} thread blocks, "
                            f"and {len(blocks)} come to it: {sorted(blocks)}")  # fmt: skip
            self.barriers[g, barrier] = len(blocks)

    def _fault(self, text: str, *places: str) -> None:
        self.faults.append(Fault("structure", text, places))

    def _read_channels(self, g: int) -> None:
        """What the signals of each channel count on: the k-th of a type to a peer is the k-th from there."""
        own: dict[str, list[Count]] = {"memory": [], "port": []}
        groups: list[tuple[str, tuple[int, ...]]] = []
        numbers: Counter[tuple[str, int]] = Counter()
        for channels in self.plan.gpus[g].channels:
            kind = channels.channel_type
            if kind == "switch":
                for group in channels.rank_groups:
                    if any(not 0 <= r < self.n for r in group.ranks) or g not in group.ranks:
                        self._fault(f"gpu {g}: a multicast group of {list(group.ranks)}; expected GPUs, this one too")
                    groups.append((channels.buffer_type or channels.buff, group.ranks))
            elif kind not in own:
                self._fault(f"gpu {g}: channels of type {kind!r}; expected memory, port or switch")
            else:
                for peer in channels.connected_to:
                    if not 0 <= peer < self.n or peer == g:
                        self._fault(f"gpu {g}: a {kind} channel to gpu {peer}; expected another one of {self.n}")
                    own[kind].append((kind, g, peer, numbers[kind, peer]))
                    numbers[kind, peer] += 1
        self._channels.append(own)
        self._groups.append(groups)

    def _steps(self, ops: Sequence[PlanOperation]) -> Iterator[PlanStep]:
        """The steps of a thread block; of a pipeline, as many rounds as are looked at."""
        for k, op in enumerate(ops):
            place = f"gpu {self._gpu} tb {self._block} op {k}"
            try:
                if op.name != "pipeline":
                    yield self._step(op, place)
                    continue
                rounds = op.iter_context
                if rounds is None or min(rounds.unit_size, rounds.num_chunks) < 1:
                    raise _Wrong("a pipeline without pieces; expected iter_context with numbers from 1 on")
                part = Fraction(rounds.num_chunks, ROUNDS)
                for turn in range(ROUNDS):
                    for j, inner in enumerate(op.ops):
                        where = f"{place}.{j}{f' of round {turn + 1}' if turn else ''}"
                        yield self._step(inner, where, (turn, part))
            except _Wrong as wrong:
                self._fault(f"{place} ({op.name}): {wrong}", place)

    def _step(self, op: PlanOperation, place: str, piece: tuple[int, Fraction] | None = None) -> PlanStep:
        if op.name in UNREAD:
            raise _Wrong("MSCCL++'s language writes this operation, and its executor does not read it")
        if op.name not in NAMES or op.name == "pipeline":
            raise _Wrong(f"expected one of {', '.join(sorted(NAMES))}, and no pipeline in another one")
        if max(len(op.src_buff), len(op.dst_buff)) > MOST_CHANNELS + 2 or len(op.channel_ids) > MOST_CHANNELS:
            raise _Wrong(f"the executor takes {MOST_CHANNELS} channels in an operation, and two local buffers")
        step = PlanStep(self._gpu, self._block, place, op.name)
        if op.name == "nop":
            return step
        if op.name == "barrier":
            if op.barrier_id < 0 or op.num_threadblocks < 1:
                raise _Wrong(f"barrier {op.barrier_id} of {op.num_threadblocks} thread blocks; expected numbers")
            return step._replace(barrier=op.barrier_id)
        if op.name in SYNCS:
            return self._sync(op, step)
        moves = [m._replace(operands=self._cut(m.operands, op, piece), targets=self._cut(m.targets, op, piece))
                 for m in self._moves(op)]  # fmt: skip
        for move in moves:
            lengths = {r.length for r in (*move.operands, *move.targets)}
            if len(lengths) > 1:
                raise _Wrong(f"source and target have {' and '.join(str(x) for x in sorted(lengths))} chunks; "
                             "expected as many")  # fmt: skip
        signals: tuple[Signal, ...] = ()
        if op.name in ("pws", "pwsf"):
            signals = tuple(Signal(self._count(op, i), i, port=m.port) for i, m in enumerate(moves))
        flushes = tuple((i, m.port) for i, m in enumerate(moves)) if op.name == "pwsf" else ()
        return step._replace(moves=tuple(moves), signals=signals, flushes=flushes)

    def _sync(self, op: PlanOperation, step: PlanStep) -> PlanStep:
        if op.name.startswith("sem_"):
            known = len(self.plan.gpus[self._gpu].semaphores)
            for sem in op.semaphore_ids:
                if not 0 <= sem < known:
                    raise _Wrong(f"semaphore {sem}; the GPU has {known}")
            counts: list[Count] = [("sem", self._gpu, sem, 0) for sem in op.semaphore_ids]
            if op.name == "sem_release":
                return step._replace(signals=tuple(Signal(c, i) for i, c in enumerate(counts)))
            return step._replace(waits=tuple(Await(c, i) for i, c in enumerate(counts)))
        relaxed, port = op.name.startswith("rlx"), op.channel_type == "port"
        counts = [self._count(op, i) for i in range(len(op.channel_ids))]
        if op.name == "flush":
            if not port:
                raise _Wrong(f"of {op.channel_type or 'no'} channels; expected port channels, which have a proxy")
            return step._replace(flushes=tuple((i, self._port(op, i)) for i in range(len(op.channel_ids))))
        if op.name.endswith("signal"):
            ports = [self._port(op, i) if port else -1 for i in range(len(counts))]
            return step._replace(
                signals=tuple(Signal(c, i, relaxed and not port, ports[i]) for i, c in enumerate(counts))
            )
        back: list[Count] = [(kind, dst, src, k) for kind, src, dst, k in counts]
        return step._replace(waits=tuple(Await(c, i, relaxed and not port) for i, c in enumerate(back)))

    def _number(self, op: PlanOperation, i: int) -> int:
        """The number of an operation's channel among those of the GPU."""
        own = self._own.get(op.channel_type, [])
        if i >= len(op.channel_ids) or not 0 <= op.channel_ids[i] < len(own):
            named = op.channel_ids[i] if i < len(op.channel_ids) else "that is not named"
            raise _Wrong(f"{op.channel_type or 'no'} channel {named}; the thread block has {len(own)} of that type")
        number = own[op.channel_ids[i]]
        known = self._channels[self._gpu].get(op.channel_type, [])
        if not 0 <= number < len(known):
            raise _Wrong(f"{op.channel_type} channel {number} of the GPU; it has {len(known)}")
        return number

    def _count(self, op: PlanOperation, i: int) -> Count:
        number = self._number(op, i)
        return self._channels[self._gpu][op.channel_type][number]

    def _port(self, op: PlanOperation, i: int) -> int:
        return self._number(op, i)

    # ---- what is moved

    def _moves(self, op: PlanOperation) -> Iterator[PlanMove]:
        """What an operation moves, in chunks."""
        packets = op.name.endswith("pkt")
        src, dst = list(op.src_buff), list(op.dst_buff)
        if not src or not dst:
            raise _Wrong("no source or no target; expected both")
        if op.name in PUTS or op.name == "ppkt":
            yield from self._puts(op, src, dst)
        elif op.name == "rppkt":
            port = op.channel_type == "port"
            source = self._range(op, src[0], packets=True)
            for i, buffer in enumerate(dst):
                number = self._peer_channel(op, i, buffer) if port else -1
                yield PlanMove(
                    (source,), (self._range(op, buffer, packets=True),), port=number, thread=i if port else -1
                )
        elif op.name == "glres":
            reads, writes = self._group(src[0]), self._group(dst[0])
            yield PlanMove(tuple(reads), tuple(writes))
        elif op.name == "gstore":
            yield PlanMove((self._range(op, src[0]),), tuple(self._group(dst[0])))
        elif op.name in FOLDS:
            from_peers = [False] + [op.name in ("rre", "rres")] * (len(src) - 1)
            local = 2 if op.name in ("recpkt", "recspkt") else 1
            if len(dst) > local and op.name in ("re", "rre", "repkt", "recpkt"):
                raise _Wrong(f"{len(dst)} targets; expected {local}")
            for buffer, far in zip((*src, *dst), (*from_peers, *(i >= local for i in range(len(dst)))), strict=True):
                if (buffer.buffer_id >= 0) != far:
                    raise _Wrong(f"{'a local' if far else 'a remote'} buffer; expected the other kind")
            yield PlanMove(
                tuple(self._range(op, b, packets=packets and i > 0) for i, b in enumerate(src)),
                tuple(self._range(op, b, packets=packets and i > 0) for i, b in enumerate(dst)),
            )
        else:  # copy, cpkt, upkt
            if len(src) != 1 or len(dst) != 1 or max(src[0].buffer_id, dst[0].buffer_id) >= 0:
                raise _Wrong("expected one local source and one local target")
            source = self._range(op, src[0], packets=op.name == "upkt")
            yield PlanMove((source,), (self._range(op, dst[0], packets=op.name == "cpkt"),))

    def _puts(self, op: PlanOperation, src: Sequence[PlanBuffer], dst: Sequence[PlanBuffer]) -> Iterator[PlanMove]:
        port, get, packets = op.channel_type == "port", op.name == "get", op.name == "ppkt"
        if len(src) != len(dst):
            raise _Wrong(f"{len(src)} sources and {len(dst)} targets; expected pairs")
        near = src if not get else dst
        if not port and len({b.type for b in near}) > 1:
            kinds = " and ".join(sorted({b.type for b in near}))
            raise _Wrong(f"local buffers {kinds}; the executor takes that of the first pair for all")
        if get and port:
            raise _Wrong("by a port channel; expected a memory channel")
        if op.name in ("pws", "pwsf") and not port:
            raise _Wrong(f"by a {op.channel_type or 'no'} channel; expected a port channel, which has a proxy")
        for i, (a, b) in enumerate(zip(src, dst, strict=True)):
            near_one, far = (b, a) if get else (a, b)
            if near_one.buffer_id >= 0 or far.buffer_id < 0:
                raise _Wrong("expected a local buffer and a peer's")
            if get and a.index != b.index:
                what = f"gpu {self._gpu} tb {self._block}: a get from chunk {a.index} to chunk {b.index}"
                self.warnings.append(f"{what}: MSCCL++'s executor (1f5f065) takes each index for the other side")
            number = self._peer_channel(op, i, far) if port else -1
            yield PlanMove(
                (self._range(op, a, packets=packets and port),), (self._range(op, b, packets=packets),),
                waits=not (packets and port), port=number, thread=i if port else -1,
            )  # fmt: skip

    def _peer_channel(self, op: PlanOperation, i: int, far: PlanBuffer) -> int:
        """The port channel of a pair, which must lead to the GPU that has the buffer."""
        number, peer = self._port(op, i), self._count(op, i)[2]
        owner = self._remote(op, far)[0]
        if peer != owner:
            raise _Wrong(f"a channel to gpu {peer}, and a buffer of gpu {owner}")
        return number

    def _remote(self, op: PlanOperation, buffer: PlanBuffer) -> tuple[int, str]:
        refs = self._refs.get(op.channel_type, [])
        if not 0 <= buffer.buffer_id < len(refs):
            raise _Wrong(f"remote buffer {buffer.buffer_id}; the thread block has {len(refs)} by "
                         f"{op.channel_type or 'no'} channels")  # fmt: skip
        known = self.plan.gpus[self._gpu].remote_buffers
        if not 0 <= refs[buffer.buffer_id] < len(known):
            raise _Wrong(f"remote buffer {refs[buffer.buffer_id]} of the GPU; it has {len(known)}")
        found = known[refs[buffer.buffer_id]]
        if not 0 <= found.rank < self.n or op.channel_type not in found.access_channel_types:
            raise _Wrong(f"a buffer of gpu {found.rank}, for {' and '.join(found.access_channel_types)} channels; "
                         f"expected one of {self.n} GPUs, and {op.channel_type}")  # fmt: skip
        return found.rank, found.type

    def _range(self, op: PlanOperation, buffer: PlanBuffer, *, packets: bool = False) -> Range:
        gpu, kind = (self._gpu, buffer.type) if buffer.buffer_id < 0 else self._remote(op, buffer)
        if packets and kind != "s":
            raise _Wrong(f"packets in buffer {kind!r}; expected s, the scratch")
        return self._checked(gpu, kind, buffer, packets=packets)

    def _group(self, buffer: PlanBuffer) -> list[Range]:
        own = self._own.get("switch", [])
        if not 0 <= buffer.switch_channel_id < len(own):
            raise _Wrong(f"multicast group {buffer.switch_channel_id}; the thread block has {len(own)}")
        known = self._groups[self._gpu]
        if not 0 <= own[buffer.switch_channel_id] < len(known):
            raise _Wrong(f"multicast group {own[buffer.switch_channel_id]} of the GPU; it has {len(known)}")
        kind, ranks = known[own[buffer.switch_channel_id]]
        return [self._checked(r, kind, buffer, packets=False) for r in ranks]

    def _checked(self, gpu: int, kind: str, buffer: PlanBuffer, *, packets: bool) -> Range:
        if kind not in BUFFERS:
            raise _Wrong(f"buffer {kind!r}; expected one of {', '.join(BUFFERS)}")
        room = getattr(self.plan.gpus[gpu], BUFFERS[kind])
        if buffer.index < 0 or buffer.size < 1 or buffer.index + buffer.size > room:
            raise _Wrong(f"{kind}[{buffer.index}:{buffer.index + buffer.size}] of gpu {gpu}; it has {room} chunks")
        return Range(gpu, PACKETS if packets else kind, Fraction(buffer.index), Fraction(buffer.size))

    def _cut(self, ranges: Sequence[Range], op: PlanOperation, piece: tuple[int, Fraction] | None) -> tuple[Range, ...]:
        """The part of ranges that this thread block, or this round of a pipeline, has; in fractions of chunks."""
        found = []
        for r in ranges:
            start, length = r.start, r.length
            if op.tbg_info is not None:
                k, size = op.tbg_info.tb_id, op.tbg_info.tbg_size
                if not 0 <= k < size:
                    raise _Wrong(f"part {k} of {size}; expected one of 0 to {size - 1}")
                start, length = start + length * k / size, length / size
            if piece is not None:
                turn, part = piece
                if r.length != part * ROUNDS:
                    raise _Wrong(f"{r.length} chunks in a pipeline over {part * ROUNDS}; expected as many")
                part = length / ROUNDS
                start, length = start + turn * part, part
            found.append(r._replace(start=start, length=length))
        return tuple(found)
