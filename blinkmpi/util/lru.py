"""A cache of bounded size that forgets what was used least recently."""

from collections import OrderedDict
from contextlib import suppress
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRU(OrderedDict[K, V]):
    """Look up with ``get`` and ``move_to_end``, which are C; add with :meth:`put`.

    Args:
        size: entries to keep.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def put(self, key: K, value: V) -> V | None:
        """Add an entry; returns the one that is forgotten for it, if there is one."""
        self[key] = value
        self.move_to_end(key)
        return self.popitem(last=False)[1] if len(self) > self.size else None

    def find(self, key: K) -> V | None:
        """The entry, which becomes the most recent; None if there is none."""
        value = self.get(key)
        if value is not None:
            with suppress(KeyError):  # another thread has just forgotten it
                self.move_to_end(key)
        return value
