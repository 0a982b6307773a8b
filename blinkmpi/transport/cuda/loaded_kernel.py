"""Compiled kernels, and a kernel with its launch shape and its arguments."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ...program.call import Call
from ...program.ir import Program
from ..network.endpoints import Endpoints
from .codegen import arithmetic, direct_source, kinds_of, packets_source, row_words, stages_source
from .device import Gpu, Kernel
from .kernel_layout import fingerprint_at
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
    text: str
    table: Table | None = None  # on the device, which its arguments name
    endpoints: Endpoints | None = None  # of channels to other nodes
    begin: int = 0  # of the result, in bytes of the receive buffer
    then: LoadedKernel | None = None  # what is started behind it, on the receive buffer alone


class KernelCache:
    """Compiled kernels by what their source depends on: to build a source takes longer than to make a call.

    Args:
        n: ranks of the node.
    """

    def __init__(self, gpu: Gpu, n: int) -> None:
        self._gpu, self._n = gpu, n
        self._known: dict[tuple[object, ...], Kernel] = {}

    def stages(self, program: Program, rank: int, spans: int = 0) -> Kernel:
        """``stages`` for a rank's part of a program, with so many spans among the arguments."""
        call, kinds, words = program.call, kinds_of(program, rank), row_words(program, rank)
        source = partial(stages_source, call, kinds, words, self._n, spans)
        return self._compiled("stages", (*arithmetic(call), *kinds, words, spans), source)

    def packets(self, call: Call, protocol: str) -> Kernel:
        """``packets`` for a protocol."""
        source = partial(packets_source, call, self._n, PROTOCOLS[protocol])
        return self._compiled("packets", (*arithmetic(call), protocol), source)

    def direct(self, call: Call) -> Kernel:
        """``direct``."""
        return self._compiled("direct", arithmetic(call), partial(direct_source, call, self._n))

    def _compiled(self, name: str, key: tuple[object, ...], source: Callable[[], str]) -> Kernel:
        found = self._known.get((name, *key))
        if found is None:
            found = self._known[name, *key] = self._gpu.compile(source(), name)
        return found


def fingerprint(text: str) -> int:
    """32 bits of what a rank calls; never 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") or 1


def load_kernel(
    kernel: Kernel,
    grid: int,
    block: int,
    args: Sequence[int],
    protocol: str,
    text: str,
    table: Table | None = None,
    room: int = 0,
) -> LoadedKernel:
    """A kernel whose arguments are packed as the driver wants them; it takes ``room`` words, if they are more."""
    packed = (ctypes.c_uint64 * max(room, len(args)))(*args)
    return LoadedKernel(kernel, grid, block, packed, _pointers(packed), protocol, text, table)


def copied(loaded: LoadedKernel) -> LoadedKernel:
    """The same kernel with arguments of its own."""
    packed = type(loaded.args).from_buffer_copy(loaded.args)
    return LoadedKernel(
        loaded.kernel, loaded.grid, loaded.block, packed, _pointers(packed), loaded.protocol, loaded.text,
        loaded.table, loaded.endpoints, loaded.begin, loaded.then,
    )  # fmt: skip


def numbering(parts: Sequence[LoadedKernel], n: int) -> Callable[[int], None]:
    """What adds a number to the fingerprints that the kernels of a call compare.

    So two calls alike are not taken for each other where a rank has left one out, or replays graphs in another order.
    """
    at = fingerprint_at(n)
    said = [(part.args, part.args[at]) for part in parts]

    def add(number: int) -> None:
        for args, call in said:
            args[at] = (call + number) & MASK

    return add


def _pointers(packed: ctypes.Array[ctypes.c_uint64]) -> ctypes.Array[ctypes.c_void_p]:
    return ONE(ctypes.addressof(packed))
