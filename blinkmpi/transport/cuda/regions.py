"""Registered buffers: users' GPU memory that every rank has mapped, named alike on all ranks."""

import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial

from ...errors import DeviceError
from ...util.together import Comm, gathered, together
from .device import Gpu
from .memory.parts import Parts, map_parts, to_all
from .memory_layout import MAX_RANKS

MAX_REGIONS = 1024
OFFSET_BITS = 48
Handle = bytes | list[int]  # of IPC, or the bytes of each part


@dataclass
class Region:
    """An allocation with registered buffers, and where this rank has mapped every rank's counterpart.

    ``parts`` has the (begin, end) of each registration, also of repeated ones.
    """

    index: int
    begin: int
    nbytes: int
    peers: tuple[int, ...]  # addresses of all ranks' allocations as mapped here
    unmap: Callable[[], None]  # the peers'
    parts: list[tuple[int, int]]


@dataclass
class Regions:
    """The registered buffers, with indices that are the same on all ranks."""

    gpu: Gpu
    n: int
    rank: int
    table: int  # device memory: [region][MAX_RANKS] addresses
    known: dict[int, Region] = field(default_factory=dict)
    _free: list[int] = field(default_factory=lambda: list(range(MAX_REGIONS - 1, -1, -1)))

    def register(self, comm: Comm, own: Callable[[], tuple[int, int]]) -> Region:
        """Map every rank's buffer; collective, no call of ours may be under way. Either all ranks do, or none.

        Args:
            own: gives (address, bytes) of this rank's buffer; what it raises, all ranks raise.

        Raises:
            DeviceError: on every rank, if some rank's memory cannot be shared (managed memory, ``cudaMallocAsync``).
        """
        self.gpu.use()
        shared: list[Parts] = []  # this rank's, if its memory is of that kind
        try:
            return self._register(comm, own, shared)
        finally:
            for parts in shared:
                parts.close()

    def _register(self, comm: Comm, own: Callable[[], tuple[int, int]], shared: list[Parts]) -> Region:
        def allocation() -> tuple[tuple[int, int], int, int, Handle]:
            at, nbytes = own()
            begin, size = self.gpu.allocation(at)
            try:
                return (at, at + nbytes), begin, size, self.gpu.export(begin)
            except DeviceError as why:
                parts = Parts(self.gpu, at, nbytes, why)
                shared.append(parts)
                return (at, at + nbytes), parts.begin, sum(parts.sizes), parts.sizes

        found = gathered(comm, allocation, tuple[tuple[int, int], int, int, Handle])
        part, begin, size, _ = found[self.rank]
        here = [r for r in self.known.values() if (r.begin, r.nbytes) == (begin, size)]
        known = set(gathered(comm, lambda: here[0].index if here else -1, int))
        if len(known) == 1 and here:  # the same on all ranks
            here[0].parts.append(part)
            return here[0]
        added: list[Region] = []
        handles = [handle for *_, handle in found]
        apart = any(isinstance(handle, list) for handle in handles)
        try:
            with to_all(comm, shared[0] if shared else None) if apart else nullcontext(list) as descriptors:
                together(comm, lambda: added.append(self._add(begin, size, part, handles, descriptors())))
        except Exception:
            for region in added:  # a rank that could map all must not keep what others have not
                self.drop(region)
            raise
        return added[0]

    def find(self, part: tuple[int, int]) -> Region | None:
        """The region in which a buffer with exactly this (begin, end) is registered."""
        return next((region for region in self.known.values() if part in region.parts), None)

    def deregister(self, comm: Comm, region: Region, part: tuple[int, int]) -> None:
        """Unmap a buffer; collective. Only then may its memory be freed."""
        region.parts.remove(part)
        if not region.parts:
            self.drop(region)
        comm.Barrier()

    def _add(
        self, begin: int, nbytes: int, part: tuple[int, int], handles: Sequence[Handle], descriptors: list[list[int]]
    ) -> Region:
        """Map every rank's allocation; what is mapped when that fails is unmapped."""
        if not self._free:
            raise DeviceError(f"{MAX_REGIONS} buffers are registered, which is all there is room for; deregister some")
        with ExitStack() as undo:
            peers = []
            for r, handle in enumerate(handles):
                if r == self.rank:
                    at, shut = begin, None
                elif isinstance(handle, list):
                    at, shut = map_parts(self.gpu, descriptors[r], handle)
                else:
                    at = self.gpu.open(handle)
                    shut = partial(self.gpu.shut, at)
                if shut is not None:
                    undo.callback(shut)
                peers.append(at)
            index = self._free[-1]
            self.gpu.upload(self.table + 8 * MAX_RANKS * index, struct.pack(f"{self.n}Q", *peers))
            unmap = undo.pop_all().close
        self._free.pop()
        region = self.known[index] = Region(index, begin, nbytes, tuple(peers), unmap, [part])
        return region

    def ref(self, at: int, nbytes: int) -> int:
        """(region + 1) << 48 | offset of a buffer, or 0 if it is not registered."""
        for region in self.known.values():
            if any(first <= at and at + nbytes <= end for first, end in region.parts):
                return (region.index + 1) << OFFSET_BITS | (at - region.begin)
        return 0

    def parts(self) -> list[tuple[int, int, int]]:
        """(begin, end, region + 1) of all that is registered, in the order of :meth:`ref`."""
        return [(*part, region.index + 1) for region in self.known.values() for part in region.parts]

    def seen_at(self, ref: int) -> list[int]:
        """Where every rank's buffer is mapped here, if all have the same offset as ours."""
        if not ref:
            return [0] * self.n
        peers, offset = self.known[(ref >> OFFSET_BITS) - 1].peers, ref & (1 << OFFSET_BITS) - 1
        return [at + offset for at in peers]

    def drop(self, region: Region) -> None:
        """Unmap; the exporters free only after all ranks have done so."""
        region.unmap()
        del self.known[region.index]
        self._free.append(region.index)
