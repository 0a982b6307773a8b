"""The structures that C and Python share, read from the headers that define them. No other list has their fields.

Each of their words has eight bytes: a number, an address, or one item of an array of such.
"""

import ctypes
import itertools
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


class Word(NamedTuple):
    """A word of a structure: ``records[1]`` is an item of an array."""

    name: str
    unsigned: bool


def fields(header: str, name: str) -> list[tuple[str, type[ctypes.c_int64] | type[ctypes.c_uint64]]]:
    """The fields of the structure of that name, for ctypes; without an array of no length at its end."""
    return [(word.name, ctypes.c_uint64 if word.unsigned else ctypes.c_int64) for word in words_of(header, name)]


def names(header: str, name: str) -> tuple[str, ...]:
    """Their names."""
    return tuple(word.name for word in words_of(header, name))


@cache
def words_of(header: str, name: str) -> tuple[Word, ...]:
    """Its words, in order."""
    text = COMMENT.sub("", (FOLDER / header).read_text(encoding="utf-8"))
    found = re.search(rf"typedef struct(?: \w+)? \{{([^}}]*)\}} {name};", text)
    if found is None:
        raise LookupError(f"{header} defines no structure {name}")
    declared = (field.strip() for field in found[1].split(";"))
    return tuple(itertools.chain.from_iterable(_words(field, text) for field in declared if field))


def _words(field: str, text: str) -> list[Word]:
    """The words that a declaration makes: ``int64_t in[2], *told``, or a pointer to a function."""
    if function := re.match(r"\w+ \(\*(\w+)\)\(", field):
        return [Word(function[1], False)]
    kind, declarations = re.match(r"((?:const )?(?:struct )?\w+) (.*)", field, re.DOTALL).groups()  # type: ignore[union-attr]
    found = []
    for declared in declarations.split(","):
        name, *lengths = re.findall(r"\w*(?=\])|\w+", declared.strip())
        items = itertools.product(*(range(_number(length, text)) for length in lengths if length or lengths == [""]))
        unsigned = kind == "uint64_t" and "*" not in declared
        found += [Word(name + "".join(f"[{i}]" for i in item), unsigned) for item in items]
    return found


def _number(length: str, text: str) -> int:
    """The length of an array: in digits, or a constant of the header's; none of one that has no length."""
    if not length or length.isdigit():
        return int(length or 0)
    found = re.search(rf"\b{length} = (\d+)", text)
    if found is None:
        raise LookupError(f"the constant {length} is not in the header of its structure")
    return int(found[1])
