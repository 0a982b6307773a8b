"""MSCCL++'s execution plan as it stands in its JSON file, and what its operations do. :mod:`.wiring` resolves it.

The format is what MSCCL++'s language writes and its executor reads (microsoft/mscclpp at 1f5f065: src/core/executor,
python/mscclpp/language). A plan has, for each GPU, an input, an output and a scratch buffer in chunks, and thread
blocks that run at once. What several threads of a block do is in step only after a ``nop``, a ``__syncthreads``.

======== ================================================= ======== ===================================================
copy     local to local                                    ppkt     packets to a peer's scratch
put      local to a peer's memory                          rppkt    packets from own scratch on to peers'
pws pwsf put, signal (and flush), by a proxy               cpkt     local to packets in own scratch
get      a peer's memory to local                          upkt     packets in own scratch to local
re       local + local                                     repkt    local + packets
res      the same, and to peers                            respkt   the same, and packets to peers
rre      local + peers'                                    recpkt   repkt, and as packets in own scratch
rres     the same, and to peers                            recspkt  the same, and packets to peers
glres    multicast: folds all GPUs', stores to all         gstore   multicast: stores to all
======== ================================================= ======== ===================================================

A packet is data with a flag: who reads it waits for it. ``signal`` and ``wait`` count on a channel between two GPUs,
``rlxsignal`` and ``rlxwait`` as well, but say nothing of memory. ``barrier`` and semaphores are among the thread blocks
of a GPU. ``pipeline`` does its operations for one piece of their buffers after the other.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...errors import FormatError
from ...util.files import read_file
from ...util.text import brief, quoted

MOST_JSON_BYTES = 64 << 20
SYNCS: frozenset[str] = frozenset({"signal", "wait", "rlxsignal", "rlxwait", "flush", "sem_acquire", "sem_release"})
PUTS: frozenset[str] = frozenset({"put", "pws", "pwsf", "get"})  # of several pairs of source and target
FOLDS: frozenset[str] = frozenset({"re", "res", "rre", "rres", "repkt", "respkt", "recpkt", "recspkt"})
MOVES: frozenset[str] = PUTS | FOLDS | {"copy", "cpkt", "upkt", "ppkt", "rppkt", "gstore", "glres"}
NAMES: frozenset[str] = SYNCS | MOVES | {"nop", "barrier", "pipeline"}  # that the executor reads
UNREAD: frozenset[str] = frozenset({"glre", "gstorepkt"})  # that the language writes, and the executor does not read


class PlanPart(msgspec.Struct, frozen=True):
    """Base of the parts of a plan; fields that say nothing about what it does are passed over."""


class PlanBuffer(PlanPart, frozen=True):
    """Some chunks of a local buffer (``type``), of a peer's (``buffer_id``), or of a multicast group's."""

    index: int
    size: int
    type: str = ""
    buffer_id: int = -1
    switch_channel_id: int = -1


class PlanGroup(PlanPart, frozen=True):
    """Which of the thread blocks that share an operation this one is."""

    tb_id: int
    tbg_size: int


class PlanRounds(PlanPart, frozen=True):
    """A pipeline's pieces: of ``unit_size`` bytes, over ``num_chunks`` chunks."""

    unit_size: int
    num_chunks: int


class PlanOperation(PlanPart, frozen=True):
    """One operation as it stands in the file."""

    name: str
    src_buff: tuple[PlanBuffer, ...] = ()
    dst_buff: tuple[PlanBuffer, ...] = ()
    channel_ids: tuple[int, ...] = ()
    channel_type: str = ""
    tbg_info: PlanGroup | None = None
    barrier_id: int = -1
    num_threadblocks: int = 0
    semaphore_ids: tuple[int, ...] = ()
    iter_context: PlanRounds | None = None
    ops: tuple[PlanOperation, ...] = ()
    reduce_op: str = "sum"


class PlanChannelRef(PlanPart, frozen=True):
    """The channels of a type that a thread block uses."""

    channel_type: str
    channel_ids: tuple[int, ...] = ()


class PlanBufferRef(PlanPart, frozen=True):
    """The peers' buffers that a thread block reaches by channels of a type."""

    access_channel_type: str
    remote_buffer_ids: tuple[int, ...] = ()


class PlanBlock(PlanPart, frozen=True):
    """A thread block."""

    id: int
    ops: tuple[PlanOperation, ...] = ()
    channels: tuple[PlanChannelRef, ...] = ()
    remote_buffer_refs: tuple[PlanBufferRef, ...] = ()


class PlanRankGroup(PlanPart, frozen=True):
    """GPUs of a multicast group."""

    size: int
    ranks: tuple[int, ...]


class PlanChannels(PlanPart, frozen=True):
    """The channels of a type that a GPU has: one to each of ``connected_to``, or one for each group."""

    channel_type: str
    connected_to: tuple[int, ...] = ()
    buffer_type: str = ""
    buff: str = ""
    rank_groups: tuple[PlanRankGroup, ...] = ()


class PlanRemoteBuffer(PlanPart, frozen=True):
    """A peer's buffer that a GPU reaches."""

    rank: int
    type: str
    access_channel_types: tuple[str, ...] = ()


class PlanSemaphore(PlanPart, frozen=True):
    """A semaphore of a GPU's thread blocks."""

    init_value: int


class PlanGpu(PlanPart, frozen=True):
    """A GPU: the sizes of its buffers in chunks, and what it runs."""

    id: int
    input_chunks: int
    output_chunks: int
    scratch_chunks: int = 0
    threadblocks: tuple[PlanBlock, ...] = ()
    channels: tuple[PlanChannels, ...] = ()
    remote_buffers: tuple[PlanRemoteBuffer, ...] = ()
    semaphores: tuple[PlanSemaphore, ...] = ()


class MscclppPlan(PlanPart, frozen=True):
    """An execution plan."""

    name: str
    collective: str
    protocol: str
    inplace: bool
    gpus: tuple[PlanGpu, ...]
    reuse_resources: bool = False


def is_mscclpp(text: bytes) -> bool:
    """Whether a JSON text looks like an execution plan, and not like a file of ours."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(found, dict) and "gpus" in found and "format" not in found


def load_mscclpp(path: str | Path) -> MscclppPlan:
    """Read an execution plan.

    Raises:
        FormatError: if it cannot be read, or is no such file.
    """
    try:
        text = read_file(path, most=MOST_JSON_BYTES)
    except OSError as error:
        raise FormatError(f"cannot read {quoted(str(path))}: {error.strerror}; correct the path") from error
    return read_mscclpp(text, source=brief(str(path)))


def read_mscclpp(text: bytes | str, *, source: str) -> MscclppPlan:
    """Read the text of an execution plan; FormatError if it is none."""
    try:
        return msgspec.json.decode(text, type=MscclppPlan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{source}: no execution plan of MSCCL++: {error}; give the file that its language "
                          "writes") from error  # fmt: skip
