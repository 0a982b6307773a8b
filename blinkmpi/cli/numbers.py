"""Numbers as users write them in flags."""

import contextlib
import re
from collections.abc import Callable
from fractions import Fraction
from typing import TypeVar

from ..errors import ArgumentError
from ..util.text import DIGITS, quoted

Number = TypeVar("Number")
# Python takes more, such as 1e-999999999, and is long at it.
NUMBER = re.compile(rf"[+-]?[0-9.]{{1,{DIGITS}}}(e[+-]?[0-9]{{1,3}}|/[0-9]{{1,{DIGITS}}})?", re.IGNORECASE | re.ASCII)


def number(text: str, kind: Callable[[str], Number], what: str) -> Number:
    """Read a number of a kind, or raise an ArgumentError that says what was expected."""
    with contextlib.suppress(ValueError, ZeroDivisionError):
        if NUMBER.fullmatch(text.strip()):
            return kind(text)
    raise ArgumentError(f"{quoted(text)} is no {what}, for example")


def fraction(text: str) -> Fraction:
    """Read ``1/20`` or ``0.05``."""
    return number(text, Fraction, "number; write 1/20 or 0.05")


def whole(text: str) -> int:
    """Read a whole number."""
    return number(text, int, "whole number; write 4")


def of_flag(flag: str, reader: Callable[[str], Number], text: str) -> Number:
    """Read the value of a flag, which an error names."""
    try:
        return reader(text)
    except ArgumentError as error:
        raise ArgumentError(f"{flag}: {error}") from error
