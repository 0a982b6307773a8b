"""``RepeatedCalls``: the number of a communicator's last call, and the calls that C finds and makes again by itself.

Where the library was compiled without Python's headers there is the number alone; calls are looked up in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .native import Native

if TYPE_CHECKING:
    from .host_call import HostCall

Found = bool | tuple["HostCall", int, int]  # made; not known; or begun: the call, its number and the C status


class _Shared(ctypes.Structure):
    """The first fields of ``repeated_t`` in repeated_calls.h."""

    _fields_ = (("seq", ctypes.c_uint64), ("open", ctypes.c_int64))


class RepeatedCalls:
    """Calls to be made again, by their method and arguments.

    ``again(method, arguments)`` makes a call that is known: True; False if it is not, or if calls may not be made so
    (:meth:`shut`); otherwise what the caller has to go on with.
    """

    def __init__(self, native: Native | None) -> None:
        self.again: Callable[[object, tuple[Any, ...]], Found] = _unknown
        self._keep: Callable[..., None] | None = None
        self._forget: Callable[[], None] | None = None
        if native is None or native.repeated is None:
            self._shared = _Shared()
        else:
            at, self.again, self._keep, self._forget = native.repeated(np.ndarray)
            self._shared = _Shared.from_address(at)  # which lives as long as the functions do

    @property
    def seq(self) -> int:
        """The number of the last call."""
        return int(self._shared.seq)

    @seq.setter
    def seq(self, number: int) -> None:
        self._shared.seq = number

    def open(self) -> None:
        """Calls may be made in C."""
        self._shared.open = 1

    def shut(self) -> None:
        """Every call must come through Python: another one is under way, or nothing may be called any more."""
        self._shared.open = 0

    def keep(self, call: HostCall, method: object, arguments: tuple[Any, ...]) -> None:
        """Make a call known, if it is one that C makes alone."""
        if self._keep is not None and call.alone:
            self._keep(call, *call.addresses, method, arguments)

    def forget(self) -> None:
        """Know no call."""
        if self._forget is not None:
            self._forget()


def _unknown(_method: object, _arguments: tuple[Any, ...]) -> bool:
    return False
