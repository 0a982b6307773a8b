"""Calls in one shot whose counts differ: the count is an argument of one program, which C fills in (``count_kinds.h``).

In one shot every rank walks whole blocks, so each word of a call of ``c`` elements, of its rows and of what it counts,
is ``A + B * c + S * slot``, and a slot is the ``c`` elements in whole lines. Three programs give A, B and S, and two
more are compared with what follows from them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...program.ir import Program
from ..announcement import Called, encode
from ..control_pages import BODY, LINE
from .host_call import HostBuffers, HostCall
from .native import FIELDS, CallStruct

if TYPE_CHECKING:
    from .host_program import HostProgram
    from .transport import HostTransport

Words = NDArray[np.int64]
LARGEST = 1 << 62  # a count that msgspec writes in eight bytes, as C does
ADDRESSES = ("tally", "timing", "times", "sends")  # fields that hold the address of each program's own memory
HELD = [name for name in FIELDS if name not in ADDRESSES]


class CountStruct(ctypes.Structure):
    """``count_kind_t`` of count_kinds.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("item", "width", "buffers", "least", "most", "words", "word")),
        ("form", ctypes.c_uint64), ("count", ctypes.c_int64), ("each", ctypes.c_int64 * 2),
    ]  # fmt: skip


def affine(samples: Mapping[int, Words], width: int) -> Words | None:
    """A row of (index, A, B, S) for each word that depends on the count; None if the samples are not so.

    Args:
        samples: five vectors of words by their counts, the first two of which need slots of as many lines.
        width: bytes of an element in a slot.
    """
    (a, one), (b, two), (c, three), *others = samples.items()
    if len({len(words) for words in samples.values()}) > 1:
        return None

    def slot(count: int) -> int:
        return -(-count * width // LINE) * LINE

    by_count = (two - one) // (b - a)
    left, lines = three - one - by_count * (c - a), slot(c) - slot(a)
    if slot(a) != slot(b) or lines == 0:
        return None
    by_slot = left // lines
    constant = one - by_count * a - by_slot * slot(a)
    for count, words in ((b, two), (c, three), *others):
        if not (words == constant + by_count * count + by_slot * slot(count)).all():
            return None
    changes = np.flatnonzero(by_count | by_slot)
    return np.stack([changes, constant[changes], by_count[changes], by_slot[changes]], axis=1)


def five_counts(least: int, most: int, one: int, width: int) -> list[int]:
    """Counts for :func:`affine`, ``one`` among them; none if there are too few."""
    first = next((c for c in range(least, most) if c * width % LINE), most)  # it and the next fill as many lines
    found = [*dict.fromkeys((first, first + 1, most, one, (least + most) // 2, most - 1, most - 2))]
    return [count for count in found if least <= count <= most][:5] if first + 1 < most - 4 else []


def words_of(program: HostProgram) -> Words:
    """All words of a program that may depend on the count."""
    held = [getattr(program.struct, name) for name in HELD]
    return np.concatenate([program.rows, np.array(held, np.uint64).view(np.int64), program.tally.words])


def places_of(call: CountKind) -> Words:
    """Where they lie in a call."""
    rows, tally = call.program.rows, call.program.tally.words
    fields = [ctypes.addressof(call.struct) + getattr(CallStruct, name).offset for name in HELD]
    spans = (array.ctypes.data + 8 * np.arange(len(array)) for array in (rows, tally))
    first, last = spans
    return np.concatenate([first, np.array(fields, np.int64), last])


class CountKind(HostCall):
    """Calls that differ in their counts alone.

    Args:
        make: what makes the program of a count whenever it is asked for.
        called: the call that ``program`` and ``buffers`` are of.
        table: :func:`affine` of the programs' words.
        counts: the least and the greatest.
        item, width: bytes of an element of a buffer, and of one in a slot.
        arguments: how many buffers a call has.
    """

    def __init__(
        self, transport: HostTransport, program: HostProgram, make: Callable[[int], Callable[[], Program]],
        called: Called, buffers: HostBuffers, timeout_s: float, *, table: Words, counts: tuple[int, int], item: int,
        width: int, arguments: int,
    ) -> None:  # fmt: skip
        super().__init__(transport, program, called, buffers, timeout_s, owns=False)
        assert called.count is not None
        self._make, self._form = make, called.text
        form, _ = encode(Called(called.text), BODY)
        _, body = encode(Called(called.text, LARGEST), BODY)
        self._body = np.frombuffer(body, np.uint8).copy()  # its last eight bytes are the count
        self._body[-8:] = np.frombuffer(called.count.to_bytes(8, "big"), np.uint8)
        self.struct.body, self.struct.body_bytes = self._body.ctypes.data, len(body)
        self._table = table.copy()
        self._table[:, 0] = places_of(self)[table[:, 0]]
        self.kind = CountStruct(
            item, width, arguments, *counts, len(table), self._table.ctypes.data, form, called.count
        )

    @property
    def address(self) -> int:
        """Where its structure lies, for C."""
        return ctypes.addressof(self.kind)

    def go_on(self, seq: int, status: int, timeout_s: float | None = None) -> None:
        """Complete a call that C has begun."""
        if self.called.count != self.kind.count:
            self.called = Called(self._form, int(self.kind.count))
            self.fingerprint, self.record = self.transport.records.encode(self.called)
            self.program.make = self._make(int(self.kind.count))
        super().go_on(seq, status, timeout_s)


def kind_of(
    transport: HostTransport, make: Callable[[int], Callable[[], Program]], protocol: str, called: Called,
    buffers: HostBuffers, timeout_s: float, *, counts: tuple[int, int], item: int, arguments: int,
) -> CountKind | None:  # fmt: skip
    """What C makes all calls by that differ from ``called`` in their counts alone; None if they differ in more.

    Raises:
        NoRoom: if the window has no room for the longest.
    """
    assert called.count is not None
    slots = [channel.wide for channel in make(called.count)().channels]
    loaded = transport.load(make(called.count), protocol)
    width = int(loaded.struct.acc if any(slots) else item)
    wanted = five_counts(*counts, called.count, width)
    alone = loaded.executor == "c" and loaded.struct.one_shot and not (loaded.cma or loaded.aside or len(loaded.sends))
    if not (wanted and alone and len(set(slots)) < 2 and transport.by_c_alone(loaded)):
        return None
    samples = {c: words_of(loaded if c == called.count else transport.load(make(c), protocol)) for c in wanted}
    table = affine(samples, width)
    if table is None:
        return None
    return CountKind(
        transport, loaded, make, called, buffers, timeout_s, table=table, counts=counts, item=item, width=width,
        arguments=arguments,
    )  # fmt: skip
