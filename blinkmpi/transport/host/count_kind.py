"""Calls that differ in their counts: the count is an argument of one program, which C fills in (``count_kinds.h``).

:mod:`...program.by_count` says how the stages depend on the count, and so how each word of a call does: of its rows,
and of what it counts. C keeps these words as sums of a few values that it works out for each count.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...program.by_count import COUNT, SLOT, Border, ByCount, by_count, read, symbol
from ...program.spans import Cut, align_of, border
from ..announcement import Called, encode_counted
from ..control_pages import BODY, LINE
from .c_structs import fields
from .host_call import HostBuffers, HostCall
from .host_program import resolve
from .native import CallStruct
from .native_rows import rows_of
from .single_copy import exported_channels
from .traffic import traffic_of

if TYPE_CHECKING:
    from .channel_layout import ChannelLayout
    from .host_program import HostProgram
    from .transport import HostTransport


class CountStruct(ctypes.Structure):
    """``count_kind_t`` of count_kinds.h."""

    _fields_ = fields("count_kinds.h", "count_kind_t")


class CountKind(HostCall):
    """Calls that differ in their counts alone.

    Args:
        load: gives the program of a count.
        called: the call that ``program`` and ``buffers`` are of.
        form: that program as a function of the count.
        rows, moved: its rows and what it counts, in bytes, with symbols as ``form`` has them.
        counts: the least and the greatest.
        width: bytes of an element in a slot.
        arguments: how many buffers a call has.
    """

    def __init__(
        self, transport: HostTransport, program: HostProgram, load: Callable[[int], HostProgram],
        called: Called, buffers: HostBuffers, timeout_s: float, *, form: ByCount, rows: Sequence[int],
        moved: Sequence[int], counts: tuple[int, int], width: int, arguments: int,
    ) -> None:  # fmt: skip
        super().__init__(transport, program, called, buffers, timeout_s, owns=False)
        assert called.count is not None
        self._load, self._text = load, called.text
        form_fingerprint, body = encode_counted(called, BODY)
        self._body = np.frombuffer(body, np.uint8).copy()
        self.struct.body, self.struct.body_bytes = self._body.ctypes.data, len(body)
        borders = [(b.part.numerator, b.part.denominator, b.trees) for b in form.borders]
        self._borders = np.array(borders, np.int64).reshape(-1, 3)
        self._lengths = np.array(form.lengths, np.int64).reshape(-1, 2)
        self._value = np.zeros(SLOT + 1 + len(borders) + len(form.lengths), np.int64)
        words = [word for at, value in self._sums(form, rows, moved, called.count) for word in _sum(at, *read(value))]
        self._words = np.array(words, np.int64)
        addresses = (array.ctypes.data for array in (self._borders, self._lengths, self._words, self._value))
        border_at, length_at, word_at, value_at = addresses
        item, align = form.call.itemsize, align_of(form.call)
        self.kind = CountStruct(
            item, width, arguments, *counts, align, int(program.struct.chunk), len(borders), border_at,
            len(form.lengths), length_at, len(words), word_at, value_at, form_fingerprint, called.count,
        )  # fmt: skip

    def _sums(
        self, form: ByCount, rows: Sequence[int], moved: Sequence[int], count: int
    ) -> Iterator[tuple[int, int]]:  # fmt: skip
        """Where each word lies that depends on the count, and its value with symbols."""
        tally, struct = self.program.tally.words.ctypes.data, ctypes.addressof(self.struct)
        places = [(self._rows + 8 * i, word) for i, word in enumerate(rows)]
        places += [(tally + 8 * (3 * i + 1), nbytes) for i, nbytes in enumerate(moved)]  # behind its counter's address
        amounts = {name: getattr(self.struct, name) // count for name in ("send_bytes", "recv_bytes")}
        for name, each in {**amounts, "chunk": int(form.whole)}.items():
            places.append((struct + getattr(CallStruct, name).offset, each * symbol(COUNT)))
        return (place for place in places if read(place[1])[1])

    @property
    def address(self) -> int:
        """Where its structure lies, for C."""
        return ctypes.addressof(self.kind)

    def go_on(self, seq: int, status: int, timeout_s: float | None = None) -> None:
        """Complete a call that C has begun."""
        count = int(self.kind.count)
        if self.called.count != count:
            self.called = Called(self._text, count)
            self.fingerprint, self.record = self.transport.records.encode(self.called)
            same, self.program.through_slots = self._load(count), None
            self.program.make, self.program.make_through_slots = same.make, same.make_through_slots
        super().go_on(seq, status, timeout_s)


def _sum(at: int, rest: int, times: Mapping[int, int]) -> list[int]:
    """A sum as C reads it: where it goes, what is no symbol, how many symbols, and each with how often it is there."""
    return [at, rest, len(times), *itertools.chain.from_iterable(times.items())]


def kind_of(
    transport: HostTransport, load: Callable[[int], HostProgram], called: Called, buffers: HostBuffers,
    timeout_s: float, *, cuts: Mapping[int, Cut], counts: tuple[int, int], arguments: int,
) -> CountKind | None:  # fmt: skip
    """What C makes all calls by that differ from ``called`` in their counts alone; None if they differ in more.

    Args:
        load: gives the program of a count.
        cuts: each tree's part of its block.

    Raises:
        NoRoom: if the window has no room for the longest.
    """
    assert called.count is not None
    count, window, loaded = called.count, transport.window, load(called.count)
    if loaded.executor != "c" or loaded.aside or len(loaded.sends) or not transport.by_c_alone(loaded):
        return None
    if loaded.struct.one_shot and counts[1] > count:
        load(counts[1])  # reserves the memory of the largest count
    resolved = resolve(loaded.make(), window, transport.native, cma=loaded.cma)
    call = resolved.program.call

    def value(of: Border) -> int:
        return border(of.part, of.trees, count, align_of(call))

    form = by_count(resolved.program, cuts, value)
    wide = {channel.wide for channel in resolved.program.channels}
    width = int(loaded.struct.acc if True in wide else loaded.struct.item)
    slot = -(-count * width // LINE) * LINE
    if form is None or resolved.after or (form.one_shot and len(wide) > 1):
        return None
    layout = _in_slots(resolved.layout, form, window.one_shot, slot) if form.one_shot else resolved.layout
    exported = exported_channels(form) if resolved.exported else {}
    rows = rows_of(form, layout, window, exported, call.itemsize, {})
    done_by = [*zip(rows.stages, rows.waits, strict=True)]
    traffic = traffic_of(resolved.part, form, transport.rank, exported, done_by)
    return CountKind(
        transport, loaded, load, called, buffers, timeout_s, form=form, rows=rows.words,
        moved=[nbytes for nbytes, _ in traffic.moved.values()], counts=counts, width=width, arguments=arguments,
    )  # fmt: skip


def _in_slots(layout: ChannelLayout, form: ByCount, begins: Callable[[int], int], slot: int) -> ChannelLayout:
    """A layout in one shot, in which slots lie behind others of a symbol's bytes."""
    found = copy.copy(layout)
    starts = [begins(channel.writer) for channel in form.channels]
    found.slots = [start + (at - start) // slot * symbol(SLOT) for start, at in zip(starts, layout.slots, strict=True)]
    return found
