"""XML as a tree of elements with their lines, read within a budget: what is larger is refused before it is built."""

import re
from collections.abc import Iterator
from typing import NamedTuple
from xml.parsers import expat

from ..errors import FormatError
from .text import brief

LONG_TAG = re.compile("<[^<]{65536}")  # more than any element of ours and its text


class Budget(NamedTuple):
    """What files of a kind can have at most, and of what they tell: ``a machine of 256 GPUs``."""

    nbytes: int
    elements: int
    largest: str


class Element:
    """One element; ``str`` is what a message calls it."""

    __slots__ = ("attributes", "children", "line", "tag")

    def __init__(self, tag: str, attributes: dict[str, str], line: int) -> None:
        self.tag, self.attributes, self.line = tag, attributes, line
        self.children: list[Element] = []

    def __str__(self) -> str:
        facts = "".join(f' {brief(k, 30)}="{brief(v, 40)}"' for k, v in list(self.attributes.items())[:2])
        return f"<{brief(self.tag, 30)}{facts}>"

    def all(self, tag: str) -> Iterator["Element"]:
        """The children of a name."""
        return (child for child in self.children if child.tag == tag)

    def has(self, tag: str) -> bool:
        """Whether it has a child of a name."""
        return any(child.tag == tag for child in self.children)


def read_elements(text: str | bytes, source: str, budget: Budget) -> Element:
    """The outermost element.

    Raises:
        FormatError: for what is no XML, declares a document type, or has more than the budget.
    """
    if len(text) > budget.nbytes:
        raise FormatError(f"{source}: {len(text) >> 10} KiB of XML; {budget.largest} takes less than "
                          f"{budget.nbytes >> 20} MiB, give another file")  # fmt: skip
    try:
        plain = text if isinstance(text, str) else text.decode()
    except UnicodeError as error:
        raise FormatError(f"{source}: not XML: {brief(str(error))}; correct that line") from error
    if plain.count("<") - plain.count("</") > budget.elements:
        raise FormatError(
            f"{source}: more than {budget.elements} elements; {budget.largest} has fewer, give another file"
        )
    if LONG_TAG.search(plain):
        raise FormatError(f"{source}: more than 65536 letters from one tag to the next; give another file")
    if "<!DOCTYPE" in plain:  # whose entities can grow without end
        raise FormatError(f"{source}: it declares a document type, which is not read; take <!DOCTYPE ...> out")
    parser = expat.ParserCreate()
    outside = Element("", {}, 0)
    open_now = [outside]

    def start(tag: str, attributes: dict[str, str]) -> None:
        element = Element(tag, attributes, parser.CurrentLineNumber)
        open_now[-1].children.append(element)
        open_now.append(element)

    def end(_: str) -> None:
        open_now.pop()

    parser.StartElementHandler, parser.EndElementHandler = start, end
    try:
        parser.Parse(plain, True)
    except expat.ExpatError as error:
        raise FormatError(f"{source}: not XML: {brief(str(error))}; correct that line") from error
    return outside.children[0]
