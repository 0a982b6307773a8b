"""What a rank announces as it enters a call, and how ranks and calls read in messages.

Ranks compare announcements by their fingerprints; the announcement itself is read after a mismatch was seen, for the
error, or where it carries a number.
"""

import hashlib
from functools import lru_cache

import msgspec

from ..errors import lost_ranks
from ..util.together import Failure

MASK = (1 << 64) - 1  # of a fingerprint
SHOWN, LONGEST = 3, 160  # parts of a list, and characters of a call, in a message
ON_GPU = " in GPU memory"  # ends the text of a call whose ranks wait for one another in kernels
COUNT = "#"  # stands in a call's text where its count is
MOST_LOST = 64  # ranks that an error names to the others, of up to 5 bytes each
NUMBERS = 96  # that fit into a record, whatever they are: 9 bytes each


class Called(msgspec.Struct, frozen=True, tag="call", omit_defaults=True):
    """A collective of ours, in words that differ if the calls do; a ``count`` of its stands apart from them."""

    text: str  # with COUNT for it
    count: int | None = None

    @property
    def words(self) -> str:
        """All in words."""
        return self.text if self.count is None else self.text.replace(COUNT, str(self.count), 1)

    def __str__(self) -> str:
        return short(self.words)


class Delegated(msgspec.Struct, frozen=True, tag="mpi"):
    """A collective that MPI must do, because of some rank's arguments.

    ``told`` is what MPI must find equal on all ranks, in words.
    """

    collective: str
    told: str = ""

    def __str__(self) -> str:
        return short(f"MPI's {self.told or self.collective}")


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """This rank cannot take part."""

    failure: Failure

    def __str__(self) -> str:
        return f"failed: {short(str(self.failure))}"


class Numbers(msgspec.Struct, frozen=True, tag="numbers"):
    """What the ranks tell each other before a call (``collective``, if it is that): how long their blocks are."""

    values: tuple[int, ...]
    collective: str = ""

    def __str__(self) -> str:
        blocks = ", ".join(map(str, self.values))
        return short(f"{self.collective} with blocks of {blocks}" if self.collective else f"a block of {blocks}")


Announcement = Called | Delegated | Failed | Numbers
_decoder: msgspec.msgpack.Decoder[Announcement] = msgspec.msgpack.Decoder(Announcement)


@lru_cache(maxsize=1024)
def encode(announcement: Announcement, room: int) -> tuple[int, bytes]:
    """64 bits that differ if the announcements do, and what fits into ``room`` bytes of it."""
    body = msgspec.msgpack.encode(announcement)
    if isinstance(announcement, Called) and announcement.count is not None:
        form, _ = encode(Called(announcement.text), room)
        fingerprint = with_count(form, announcement.count)
    else:
        fingerprint = int.from_bytes(hashlib.blake2b(body, digest_size=8).digest(), "little")
    if len(body) > room:
        body = msgspec.msgpack.encode(_cut(announcement, room - 64))
    return fingerprint, body


def encode_counted(called: Called, room: int) -> tuple[int, bytes]:
    """The fingerprint of a call but for its count, and its body, whose last eight bytes are the count."""
    assert called.count is not None
    form, _ = encode(Called(called.text), room)
    _, body = encode(Called(called.text, 1 << 62), room)  # so that msgspec takes eight bytes
    return form, body[:-8] + called.count.to_bytes(8, "big")


def with_count(form: int, count: int) -> int:
    """The fingerprint of a call with this count, by that of what it announces else, as fingerprints.h has it."""
    mixed = form + (count + 1) * 0x9E3779B97F4A7C15 & MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
    return mixed ^ mixed >> 31


def decode(body: bytes) -> Announcement | None:
    """What :func:`encode` wrote; None where it cannot be read, as while its rank writes another."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
        return None


def encode_failure(error: BaseException, room: int) -> bytes:
    """An error for a record of ``room`` bytes."""
    lost = lost_ranks(error)[:MOST_LOST]
    room -= 96 + len(msgspec.msgpack.encode(lost))
    return msgspec.msgpack.encode(Failure(type(error).__name__, _head(str(error), room), lost))


def decode_failure(body: bytes) -> Failure:
    """What :func:`encode_failure` wrote."""
    try:
        return msgspec.msgpack.decode(body, type=Failure)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
        return Failure("BlinkError", "its error cannot be read")


def _cut(announcement: Announcement, room: int) -> Announcement:
    if isinstance(announcement, Called):
        return Called(_head(announcement.words, room))
    if isinstance(announcement, Failed):
        failure = announcement.failure
        return Failed(Failure(failure.name, _head(failure.message, room - len(failure.name))))
    if isinstance(announcement, Delegated):
        return Delegated(announcement.collective, _head(announcement.told, room - len(announcement.collective)))
    return announcement


def _head(text: str, room: int) -> str:
    """As many characters as fit into ``room`` bytes."""
    return text.encode()[: max(0, room)].decode(errors="ignore")


def some(parts: list[str]) -> str:
    """The first few parts of a list that may be as long as the job is wide."""
    return "; ".join(parts[:SHOWN]) + (f"; and {len(parts) - SHOWN} more" if len(parts) > SHOWN else "")


def short(text: str) -> str:
    """A call, cut where it is very long."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
