"""How ranks, counts, bytes, seconds and a user's own words are written in messages, and how numbers are read."""

import re
from collections.abc import Iterable, Sequence

from ..errors import ArgumentError

CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
LONGEST = 300  # letters of a foreign text in a message
DIGITS = 300  # of a number that is read from a text; more is no number of anything, and takes long to compute with


def brief(text: str, most: int = LONGEST) -> str:
    """A text as one line of at most ``most`` letters: control characters escaped, its middle left out."""
    if len(text) > most:
        text = f"{text[: most * 2 // 3]} ... {text[len(text) - most // 4 :]}"
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def controls(text: str) -> bool:
    """Whether a text has control characters, by which it could move a terminal's cursor or change what was shown."""
    return CONTROLS.search(text) is not None


def quoted(value: object) -> str:
    """A value in a message, as Python writes it, and not longer than a line."""
    return repr(brief(value, 80)) if isinstance(value, str) and len(value) > 80 else brief(repr(value), 100)


def error_text(error: BaseException) -> str:
    """An error with the name of its class: ``ValueError: no device``, ``KeyboardInterrupt``."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def whole_number(text: str) -> int | None:
    """Read a number of ASCII digits; None for anything else, and for one of more digits than anything has."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def plural(number: int, noun: str) -> str:
    """``1 rank``, ``8 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks, given in ascending order: ``rank 3``, ``ranks 0-2, 5``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(spans(ranks))}"


def spans(numbers: Iterable[int]) -> list[str]:
    """Ascending numbers, runs of them as one: ``0-2``, ``5``."""
    parts: list[str] = []
    for number in numbers:
        first = number
        while parts and int(parts[-1].rpartition("-")[2]) == first - 1:
            first = int(parts.pop().partition("-")[0])
        parts.append(f"{first}-{number}" if first < number else f"{number}")
    return parts


def size_text(nbytes: int) -> str:
    """``64 MiB``, ``1000 bytes``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes * 100 % unit == 0:
            return f"{nbytes / unit:.4g} {name}"
    if nbytes >= 1 << 20:
        return f"{nbytes / (1 << 20):.2f} MiB"
    return f"{nbytes} bytes"


def amount_text(nbytes: int) -> str:
    """About how much it is: ``1.64 GiB``, ``512 bytes``."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}" if nbytes < 1000 * unit else f"{nbytes / unit:.0f} {name}"
    return f"{nbytes} bytes"


def parse_size(text: str) -> int:
    """Read a number of bytes: ``64K``, ``1.5M``, ``4G`` (2^10, 2^20, 2^30) or a plain number.

    Raises:
        ArgumentError: for anything else.
    """
    digits, factor = text.strip(), 1
    if digits[-1:].upper() in ("K", "M", "G"):
        factor = 1 << (10 * ("KMG".index(digits[-1].upper()) + 1))
        digits = digits[:-1]
    try:
        value = float(digits) * factor
    except ValueError:
        value = -1.0
    if not 0 <= value < 1 << 62:
        raise ArgumentError(f"size {quoted(text)}: expected a number of bytes such as 65536, 64K, 1.5M or 4G")
    return int(value)


def time_text(seconds: float) -> str:
    """``12.3 ms``, ``850 us``."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"
