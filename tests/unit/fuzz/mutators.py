"""Spoilt inputs: bytes and texts made of real ones by mutation, and the promise that every reader keeps for them.

The promise: a reader returns a valid value, or raises a typed error of one line that names its source; it calls fewer
than six million functions, which take a second, and needs less than 500 MB. ``FUZZ_EXAMPLES=20000`` tries more
examples than a run of all tests does.
"""

import json
import os
import resource
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from blinkmpi.errors import BlinkError
from tests.effort import Effort
from tests.harness import PATIENCE_S

T = TypeVar("T")
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
CALLS = 6_000_000  # most functions of Python and C that a reader may call: three million for the longest file
MEGABYTES, LETTERS = 500, 2000  # most that a reader may take; of its message
many = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))

NUMBERS: tuple[str, ...] = (
    "0", "-1", "1", "2", "255", "65536", "1000000000", "-9223372036854775809", "9223372036854775807",
    "9223372036854775808", "18446744073709551616", "9" * 400, "9" * 5000, "1e400", "1e-999999999", "1e999999999", "NaN",
    "Infinity", "-Infinity", "nan", "inf", "-0.0", "0.5", "1/0", "1/3", "0x10", "1_000", "٣", "²", "+1", "01",
)  # fmt: skip
TOKENS: tuple[str, ...] = (
    *NUMBERS, "", "null", "true", "[]", "{}", '""', "[", "]", "{", "}", "(", ")", '"', "'", "<", ">", "&", "&a;", "/",
    "\\", ",", ":", ";", "=", "+", "-", "*", "#", "%", "\n", "\r", "\t", " ", "\0", "\x1b[4m", "\x85", "\u2028",
    "\ufeff", "[" * 3000, "<pci>" * 300, '{"a":' * 2000, "a.b." * 200, "x" * 3000, "../", "/dev/null", "\\ud800",
    "<!DOCTYPE a [<!ENTITY a 'aaaa'>]>", "<cpu numaid='0'/>", "[[part]]", "[1-65536]", "(x65536)", "slots=1", "GPU0",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 1 << 31, 1 << 62, 1 << 63, 1 << 64, -(1 << 63) - 1, 10**400, 0.5, -1.5, 1e308,
    "", "x", "x" * 3000, "\n", "\0", "1/0", "-1/3", "1/3", "9" * 400, "1/" + "9" * 400, "1e999999999", "nan", [], {},
    [0], [-1], [[]], [1 << 62], {"a": 1}, [0, 0], [0, 1, 2],
)  # fmt: skip


def promised(
    read: Callable[[], T], *errors: type[BlinkError], source: str = "", calls: int = CALLS, line: bool = True
) -> T | BlinkError:
    """What ``read`` returns or raises; an AssertionError where it breaks the promise, other errors as they are.

    ``line=False`` is for what is checked after reading: a name that was read may be long there.
    """
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    found: T | BlinkError
    effort = Effort(most=calls)
    try:
        with effort:
            found = read()
    except errors as error:
        found = error
        text = str(error)
        assert source in text, text
        assert not line or text.isprintable(), repr(text)
        assert not line or len(text) < LETTERS, text
    assert not effort.too_much
    assert time.thread_time() - start < PATIENCE_S, "one of these functions does not end"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10 < MEGABYTES
    return found


@st.composite
def spoilt(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """Random bytes, or one of ``seeds`` with some places cut out, repeated, exchanged or filled with others."""
    text = draw(st.sampled_from((*seeds, *seeds, b"")))
    junk = st.sampled_from(TOKENS).map(str.encode) | st.binary(max_size=12) | st.text(max_size=6).map(_bytes)
    for _ in range(draw(st.integers(0 if not text else 1, 4))):
        start = draw(st.integers(0, len(text)))
        stop = draw(st.integers(start, min(len(text), start + draw(st.sampled_from((0, 1, 4, 40, 400, 1 << 30))))))
        match draw(st.sampled_from(("cut", "end", "repeat", "insert", "number", "word", "swap"))):
            case "cut":
                text = text[:start] + text[stop:]
            case "end":
                text = text[:start]
            case "repeat":
                text = text[:stop] + text[start:stop] * draw(st.sampled_from((1, 2, 30))) + text[stop:]
            case "insert":
                text = text[:start] + draw(junk) + text[stop:]
            case "number":
                text = _replaced(text, start, b"0123456789", draw(st.sampled_from(NUMBERS)).encode())
            case "word":
                text = _replaced(text, start, b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_", draw(junk))
            case _:
                other = draw(st.integers(0, len(text)))
                text = text[:start] + text[other : other + stop - start] + text[stop:]
    return text[: 1 << 20]


@st.composite
def spoilt_json(draw: st.DrawFn, seeds: tuple[Any, ...]) -> bytes:
    """A JSON document whose form is good and whose values are not: some are replaced, left out, added or exchanged."""
    document = deepcopy(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at, key = document, None
        for _ in range(draw(st.integers(1, 7))):
            inside = at if key is None else at[key]
            if not isinstance(inside, dict | list) or not inside:
                break
            at = inside
            key = draw(st.sampled_from(list(at) if isinstance(at, dict) else range(len(at))))
        if key is None:
            break
        value = st.sampled_from(VALUES) | st.integers(-3, 20)
        match draw(st.sampled_from(("value", "value", "value", "drop", "add", "copy"))):
            case "value":
                at[key] = deepcopy(draw(value))
            case "drop":
                del at[key]
            case "add" if isinstance(at, dict):
                at[draw(st.sampled_from(("x", "", "\n", "x" * 3000)))] = deepcopy(draw(value))
            case "add":
                at.insert(key, deepcopy(draw(value)))
            case _:
                others = list(at.values()) if isinstance(at, dict) else at
                at[key] = deepcopy(draw(st.sampled_from(others)))
    return json.dumps(document).encode()


@st.composite
def spoilt_text(draw: st.DrawFn, seeds: tuple[str, ...]) -> str:
    """As :func:`spoilt`, for what comes as text: a word of the command line or a variable of the environment."""
    return draw(spoilt(tuple(seed.encode() for seed in seeds))).decode(errors="surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _replaced(text: bytes, start: int, letters: bytes, new: bytes) -> bytes:
    """The first run of ``letters`` after ``start`` replaced."""
    while start < len(text) and text[start] not in letters:
        start += 1
    stop = start
    while stop < len(text) and text[stop] in letters:
        stop += 1
    return text[:start] + new + text[stop:]
