"""What a rank tells the others of where its buffers lie, and whether they can be read."""

import ctypes
import mmap
import os
from types import SimpleNamespace
from typing import Any

import numpy as np

from blinkmpi.transport.control_pages import CONTROL, SEND_WORD, ControlPages
from blinkmpi.transport.host import native
from blinkmpi.transport.host.host_program import place
from tests.unit.transport.test_blocks import library

PAGE = mmap.PAGESIZE
CLOSED = 2**64 - 1
LIBC = ctypes.CDLL(None)


class Rank:
    """A rank that tells where its buffers are."""

    def __init__(self) -> None:
        self.code, self.memory = library(), np.zeros(CONTROL, np.uint8)
        self.pages = ControlPages(self.memory, 1, 0, (0,), None)
        self.pages.pids[0] = os.getpid()
        self.struct = native.CallStruct()
        window: Any = SimpleNamespace(
            pages=self.pages, bytes=self.memory, arena_bytes=0, one_shot_bytes=0, arena=int, one_shot=int
        )
        place(self.struct, window)

    def told(self, send: int, nbytes: int) -> int:
        """What it tells of a send buffer, in a call that had another one before."""
        self.struct.send, self.struct.send_bytes, self.struct.readable = send, nbytes, 0
        self.code.blink_export(native.address(self.struct))
        return int(self.pages.words[SEND_WORD])


def test_a_buffer_is_tried_when_a_call_first_has_it() -> None:
    rank, mapped = Rank(), mmap.mmap(-1, 3 * PAGE)
    at = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    def allow(page: int, rights: int) -> None:
        assert not LIBC.mprotect(ctypes.c_void_p(at + page * PAGE), ctypes.c_size_t(PAGE), rights)

    allow(1, 0)  # the page in the middle can be read by nobody
    assert rank.told(at, PAGE) == at
    assert rank.told(at, PAGE + 1) == CLOSED, "its last byte lies in that page"
    assert rank.told(at + PAGE, 8) == CLOSED
    assert rank.told(at + 2 * PAGE, PAGE) == at + 2 * PAGE
    allow(1, mmap.PROT_READ | mmap.PROT_WRITE)
    assert rank.told(at, PAGE + 1) == at, "what could not be read is tried anew"
    assert rank.told(at + PAGE, 8) == at + PAGE


def test_buffers_in_turn_are_tried_once_each() -> None:
    """As those of a pipeline of calls. It shows by what can no longer be read."""
    rank, mapped = Rank(), mmap.mmap(-1, 4 * PAGE)
    at = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    for i in range(4):
        assert rank.told(at + i * PAGE, PAGE) == at + i * PAGE
    assert not LIBC.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(4 * PAGE), 0)
    assert [rank.told(at + i * PAGE, PAGE) for i in range(4)] == [at + i * PAGE for i in range(4)]
    assert rank.told(at, PAGE - 1) == CLOSED, "this one is another"
    assert not LIBC.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(4 * PAGE), mmap.PROT_READ | mmap.PROT_WRITE)


def test_a_call_without_buffers_needs_none() -> None:
    rank = Rank()
    rank.pages.pids[0] = 2**22 + 1  # there is no such process, whose memory could be read
    assert rank.told(0, 0) == 0
    assert rank.told(8, 1) == CLOSED
