"""How a call is announced, and how ranks and calls read in messages."""

from __future__ import annotations

import hashlib
from functools import lru_cache

SHOWN, LONGEST = 3, 160  # parts of a list, and characters of a call, in a message


def some(parts: list[str]) -> str:
    """The first few parts of a list that may be as long as the job is wide."""
    return "; ".join(parts[:SHOWN]) + (f"; and {len(parts) - SHOWN} more" if len(parts) > SHOWN else "")


def short(text: str) -> str:
    """A call, cut where it is very long."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


@lru_cache(maxsize=256)
def announcement(text: str) -> tuple[int, bytes]:
    """What a rank writes as it enters a call: 64 bits that differ if the calls do, and the text."""
    return fingerprint(text), text.encode()


def fingerprint(text: str) -> int:
    """64 bits that differ if the calls do."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
