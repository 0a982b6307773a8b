"""XML as a tree of elements with their lines, read within a budget: what is larger is refused before it is built."""

from collections.abc import Iterator
from xml.parsers import expat

from ..errors import FormatError
from ..util.text import brief

MOST_XML_BYTES = 4 << 20  # an element has some 150 bytes
MOST_ELEMENTS = 1 << 15  # 256 GPUs with 64 links and bridges each are half of it; NCCL itself reads 256 elements


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


def read_elements(text: str | bytes, source: str) -> Element:
    """The outermost element.

    Raises:
        FormatError: for what is no XML, declares entities or is larger than a description of a machine can be.
    """
    if len(text) > MOST_XML_BYTES:
        raise FormatError(f"{source}: {len(text) >> 10} KiB of XML; a machine of 256 GPUs takes less than "
                          f"{MOST_XML_BYTES >> 20} MiB, give another file")  # fmt: skip
    parser = expat.ParserCreate()
    outside = Element("", {}, 0)
    open_now = [outside]
    count = 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        line = parser.CurrentLineNumber
        if count > MOST_ELEMENTS:
            much = f"more than {MOST_ELEMENTS} elements"
            raise FormatError(f"{source}: line {line}: {much}; a machine of 256 GPUs has fewer, give another file")
        element = Element(tag, attributes, line)
        open_now[-1].children.append(element)
        open_now.append(element)

    def end(_: str) -> None:
        open_now.pop()

    parser.StartElementHandler, parser.EndElementHandler = start, end
    try:
        plain = text if isinstance(text, str) else text.decode()
        if "<!DOCTYPE" in plain:  # entities can grow without end, and NCCL declares none
            raise FormatError(f"{source}: it declares a document type, as NCCL never does; take <!DOCTYPE ...> out")
        parser.Parse(plain, True)
    except (expat.ExpatError, UnicodeError) as error:
        raise FormatError(f"{source}: not XML: {brief(str(error))}; correct that line") from error
    return outside.children[0]
