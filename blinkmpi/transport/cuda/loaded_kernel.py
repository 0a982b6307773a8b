"""Compiled kernels, and a kernel with its launch shape and its arguments: of one call, or what many calls share."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Self

from ...program.call import Call
from ...program.ir import Program
from ...program.memory import Segments
from ...program.template import Template
from ..announcement import Called, with_count
from ..network.endpoints import Endpoints
from .codegen import (
    arithmetic,
    blocks_source,
    direct_source,
    gate_source,
    item_bytes,
    kinds_of,
    messages_source,
    packets_source,
    row_words,
    scale,
    stages_source,
)
from .device import Gpu, Kernel
from .kernel_layout import PARAMETER_BYTES, buffers_at, fingerprint_at, room_for, segment_words
from .packets import PROTOCOLS
from .stage_tables import Table

ONE = ctypes.c_void_p * 1
MASK = (1 << 32) - 1  # of a fingerprint


@dataclass
class LoadedKernel:
    """A kernel with its arguments; only buffers, fingerprint and deadline change from call to call."""

    kernel: Kernel
    grid: int
    block: int
    args: ctypes.Array[ctypes.c_uint64]
    params: ctypes.Array[ctypes.c_void_p]
    protocol: str
    called: Called
    table: Table | None = None  # on the device, which its arguments name
    endpoints: Endpoints | None = None  # of channels to other nodes
    aside: bool = False  # in place, but what it sends must lie elsewhere
    begin: int = 0  # of the result, in bytes of the receive buffer
    then: LoadedKernel | None = None  # what is started behind it, on the receive buffer alone
    fit: Callable[[LoadedKernel, Call], None] | None = None  # gives it the arguments for another count, if it may have


class KernelCache:
    """Compiled kernels by what their source depends on: to build a source takes longer than to make a call.

    Args:
        n: ranks of the node.
    """

    def __init__(self, gpu: Gpu, n: int) -> None:
        self._gpu, self._n = gpu, n
        self._known: dict[tuple[object, ...], Kernel] = {}

    def stages(self, program: Program, rank: int, spans: int = 0, rows: int = 1) -> Kernel:
        """``stages`` for a rank's part of a program, with so many spans among the arguments and rows of a CTA."""
        call, kinds, words = program.call, kinds_of(program, rank), row_words(program, rank)
        source = partial(stages_source, call, kinds, words, self._n, spans, rows)
        return self._compiled("stages", (*arithmetic(call), *kinds, words, spans, rows), source)

    def packets(self, call: Call, protocol: str, segments: int = 0) -> Kernel:
        """``packets`` for a protocol; for a group, with so many segments each way among the arguments."""
        source = partial(packets_source, call, self._n, PROTOCOLS[protocol], segments)
        return self._compiled("packets", (*arithmetic(call), protocol, segments), source)

    def of_group(self, loaded: LoadedKernel, call: Call, ways: tuple[Segments, Segments]) -> LoadedKernel | None:
        """A call on buckets as one that reads and writes the segments of its group itself; None if it cannot.

        Args:
            loaded: the call on the buckets.
            ways: the segments that are sent, and those that are received.
        """
        room = room_for(ways) if loaded.protocol in PROTOCOLS else 0
        words = [*loaded.args, *segment_words(ways, room)] if room else []
        if not words or 8 * len(words) > PARAMETER_BYTES:
            return None
        own = copied(loaded)
        own.kernel = self.packets(call, loaded.protocol, room)
        own.args = packed = (ctypes.c_uint64 * len(words))(*words)
        own.fit = None  # the segments are of these counts
        own.params = _pointers(packed)
        return own

    def direct(self, call: Call) -> Kernel:
        """``direct``."""
        return self._compiled("direct", arithmetic(call), partial(direct_source, call, self._n))

    def messages(self) -> Kernel:
        """``messages``."""
        return self._compiled("messages", (), partial(messages_source, self._n))

    def gate(self) -> Kernel:
        """``gate``, which takes the arguments of the kernel that it stands before."""
        return self._compiled("gate", (), partial(gate_source, self._n))

    def blocks(self, *, counted: bool = False) -> Kernel:
        """``blocks``; ``counted``: whose lengths are in GPU memory."""
        return self._compiled("blocks", (counted,), partial(blocks_source, self._n, counted=counted))

    def _compiled(self, name: str, key: tuple[object, ...], source: Callable[[], str]) -> Kernel:
        found = self._known.get((name, *key))
        if found is None:
            found = self._known[name, *key] = self._gpu.compile(source(), name)
        return found


@lru_cache(maxsize=256)
def form_of(protocol: str, text: str) -> int:
    """64 bits of what a rank calls, but for its count."""
    return int.from_bytes(hashlib.blake2b(f"{protocol} {text}".encode(), digest_size=8).digest(), "little")


def fingerprint(protocol: str, called: Called) -> int:
    """32 bits of what a rank calls; never 0."""
    form = form_of(protocol, called.text)
    return (form if called.count is None else with_count(form, called.count)) & MASK or 1


def load_kernel(
    kernel: Kernel,
    grid: int,
    block: int,
    args: Sequence[int],
    protocol: str,
    called: Called,
    table: Table | None = None,
    room: int = 0,
) -> LoadedKernel:
    """A kernel whose arguments are packed as the driver wants them; it takes ``room`` words, if they are more."""
    packed = (ctypes.c_uint64 * max(room, len(args)))(*args)
    return LoadedKernel(kernel, grid, block, packed, _pointers(packed), protocol, called, table)


def copied(loaded: LoadedKernel) -> LoadedKernel:
    """The same kernel with arguments of its own."""
    own: LoadedKernel = object.__new__(LoadedKernel)
    own.__dict__.update(loaded.__dict__)
    own.args = packed = type(loaded.args).from_buffer_copy(loaded.args)
    own.params = _pointers(packed)
    if loaded.then:
        own.then = copied(loaded.then)
    return own


def for_call(
    loaded: LoadedKernel, call: Call, called: Called, fit: Callable[[LoadedKernel, Call], None]
) -> LoadedKernel:
    """The same kernel for another call.

    Args:
        called: what it says that it is.
        fit: gives it the arguments that depend on the call's count.
    """
    own = copied(loaded)
    own.called = called
    own.args[fingerprint_at(call.n)] = fingerprint(own.protocol, called)
    fit(own, call)
    own.fit = fit
    return own


def moving(loaded: LoadedKernel, n: int, registered: Sequence[bool], part: int = 0) -> list[tuple[int, int, int]]:
    """What differs in the arguments of a call among ``n`` ranks if a buffer lies elsewhere: each word by as much as it.

    Args:
        registered: whether the send buffer is, and the receive buffer; they stay in their regions then.

    Returns:
        For each word: the kernel, 0 or the one behind it, 1; the word's index; and whether it moves with the send
        buffer, 0, or the receive buffer, 1.
    """
    words, end = [], len(loaded.args)
    for which in (0, 1):
        moved = [buffers_at(n) + which]
        if loaded.protocol == "direct" and registered[which]:  # its name, and where each rank's is mapped
            first = end - (2 - which) * n
            moved += [buffers_at(n) + 2 + which, *range(first, first + n)]
        words += [(part, word, which) for word in moved]
    if loaded.then:
        words += [(1, word, 1) for _, word, _ in moving(loaded.then, n, (registered[1], registered[1]), 1)]
    return words


def _pointers(packed: ctypes.Array[ctypes.c_uint64]) -> ctypes.Array[ctypes.c_void_p]:
    return ONE(ctypes.addressof(packed))


@dataclass(frozen=True)
class LoadedTemplate:
    """What calls share that differ in their counts: kernel and table, ready on this GPU.

    ``kernel`` has their arguments but for what :meth:`words` gives, which begin at word ``begin``; it is None at a rank
    without stages. ``stages`` has the tree of each stage, and what its offsets are: 2 is the tree's offset in its
    block, 3 that in the vector of all blocks, 4 none.
    """

    template: Template
    kernel: LoadedKernel | None
    begin: int
    stages: tuple[tuple[int, int, int], ...]
    scale: int  # the kernels' elements in one of the call's
    item_bytes: int

    @classmethod
    def of(cls, template: Template, rank: int, kernel: LoadedKernel | None = None, begin: int = 0) -> Self:
        """For a rank's stages."""
        kinds = {0: 2, 1: 3, None: 4}
        stages = tuple((s.tree, kinds[s.local], kinds[s.store]) for s in template.program.of(rank))
        return cls(template, kernel, begin, stages, times := scale(template.call), item_bytes(template.call)[0] * times)

    def fit(self, loaded: LoadedKernel, call: Call) -> None:
        """Give the kernel the arguments for a call."""
        words = self.words(call)
        loaded.args[self.begin : self.begin + len(words)] = [*words]

    def words(self, call: Call) -> list[int]:
        """What the kernel's arguments say of a call's count: COUNT, CHUNK, OWN and STORE of each stage."""
        times, item = self.scale, self.item_bytes
        cut, chunks = self.template.cut(call)
        found = {
            tree: (length * times, chunks[length] * times, first * item, (start + first) * item, -1)
            for tree, start, first, length in cut
        }
        words: list[int] = []
        for tree, own, store in self.stages:
            span = found[tree]
            words += span[0], span[1], span[own], span[store]
        return words
