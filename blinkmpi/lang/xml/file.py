"""MSCCL's XML (MSCCL-IR) as values: what each thread block of each GPU does, step by step. :mod:`.check` judges it.

The format is what MSCCL's compiler writes and its executors read (the parser of Azure/msccl-executor-nccl). A file is a
collective on chunks: a GPU has an input, an output and a scratch buffer, and thread blocks that run at once. A thread
block receives from at most one GPU, sends to at most one, on one channel, and runs its steps in order:

====== =========================================== ====== ===========================================
``s``  sends ``src``                               rrc    ``dst`` = ``src`` + message
``r``  ``dst`` = message                           rrs    sends ``src`` + message, stores nothing
rcs    ``dst`` = message, and sends it on          rrcs   ``dst`` = ``src`` + message, and sends that
cpy    ``dst`` = ``src``                           re     ``dst`` = ``dst`` + ``src``
nop    waits for a further step                           (+ is the reduction; src and dst are local)
====== =========================================== ====== ===========================================

Two spellings are read: ``<step s= srcbuf= srcoff= dstbuf= dstoff= ...>``, and the compiler's shorter ``<op step= buf=
off= ...>``, in which only what differs from a default stands, and which cannot say ``cpy`` and ``re``.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import quoteattr

from ...errors import FormatError
from ...util.codec import Value
from ...util.files import read_file
from ...util.text import brief, quoted
from ...util.xml_elements import Budget, Element, read_elements

Place = tuple[str, int]  # buffer ``i``, ``o`` or ``s``, and the first chunk

READS: frozenset[str] = frozenset({"s", "rrc", "rrs", "rrcs", "cpy", "re"})  # what has a ``src``
WRITES: frozenset[str] = frozenset({"r", "rcs", "rrc", "rrcs", "cpy", "re"})  # what has a ``dst``
SENDS: frozenset[str] = frozenset({"s", "rcs", "rrs", "rrcs"})
RECEIVES: frozenset[str] = frozenset({"r", "rcs", "rrc", "rrs", "rrcs"})
TYPES: frozenset[str] = READS | WRITES | {"nop"}
SLOTS: dict[str, int] = {"Simple": 2, "LL": 8, "LL128": 8}  # messages that a connection holds, by protocol
BUFFERS = ("i", "o", "s")
COLLECTIVES_OF_XML: dict[str, str] = {name.replace("_", ""): name for name in (
    "allreduce", "allgather", "alltoall", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "custom",
)}  # fmt: skip

BUDGET = Budget(64 << 20, 1 << 17, "an algorithm of 128 ranks")
MOST_GPUS = 4096
MOST_CHUNKS = 1 << 17  # of a buffer
MOST_MOVES = 1 << 17  # chunks that all steps move together
MOST_WANTED = 1 << 26  # contributions in the outputs of all GPUs
_NUMBER = re.compile(r"-?[0-9]{1,9}")


class XmlStep(Value, frozen=True):
    """One step. ``src`` and ``dst`` are None where the type has none, whatever the file says there.

    Args:
        count: chunks, of consecutive places.
        depid, deps: a thread block of this GPU, and its step, for which this one waits; -1 for none.
        awaited: what the file says in ``hasdep``: another step waits for this one.
    """

    type: str
    src: Place | None = None
    dst: Place | None = None
    count: int = 1
    depid: int = -1
    deps: int = -1
    awaited: bool = False


class XmlBlock(Value, frozen=True):
    """A thread block: the GPUs that it sends to and receives from (-1 for none), and its channel."""

    send: int
    recv: int
    channel: int
    steps: tuple[XmlStep, ...]


class XmlGpu(Value, frozen=True):
    """A GPU's buffers in chunks, and its thread blocks; ``copies`` are (input chunk, output chunk) before all steps."""

    inputs: int
    outputs: int
    scratch: int
    blocks: tuple[XmlBlock, ...]
    copies: tuple[tuple[int, int], ...] = ()


class XmlAlgorithm(Value, frozen=True):
    """A whole file.

    Args:
        collective: ours, or ``custom``.
        chunks: ``nchunksperloop``, the chunks of the larger buffer of the call.
        root: -1 where the file does not say.
        in_place, out_of_place: for which calls it is.
        min_bytes, max_bytes: of that buffer; 0 for no upper limit.
        gpus: in the order of their ranks.
    """

    name: str
    collective: str
    protocol: str
    chunks: int
    channels: int
    root: int
    in_place: bool
    out_of_place: bool
    min_bytes: int
    max_bytes: int
    gpus: tuple[XmlGpu, ...]

    @property
    def steps(self) -> int:
        """How many steps all thread blocks have together."""
        return sum(len(block.steps) for gpu in self.gpus for block in gpu.blocks)

    @property
    def moves(self) -> int:
        """How many chunks they move together."""
        return sum(step.count for gpu in self.gpus for block in gpu.blocks for step in block.steps)


def load_xml(path: str | Path) -> XmlAlgorithm:
    """Read a file.

    Raises:
        FormatError: if it cannot be read, or is not MSCCL's XML; naming the file, gpu, thread block and step.
    """
    try:
        text = read_file(path, most=BUDGET.nbytes)
    except OSError as error:
        raise FormatError(f"cannot read {quoted(str(path))}: {error.strerror}; give MSCCL's XML") from error
    return parse_xml(text, str(path))


def parse_xml(text: str | bytes, source: str = "MSCCL's XML") -> XmlAlgorithm:
    """Read the text of a file.

    Args:
        source: where it came from, for messages.

    Raises:
        FormatError: for what is not MSCCL's XML; naming the source, gpu, thread block and step.
    """
    algo = read_elements(text, source, BUDGET)
    if algo.tag != "algo":
        raise FormatError(f"{source}: expected <algo> outside, got <{brief(algo.tag)}>; is it MSCCL's XML?")
    return _algorithm(algo, source)


def write_xml(algorithm: XmlAlgorithm) -> str:
    """The text that :func:`parse_xml` reads, and MSCCL's executors."""
    head = {
        "name": algorithm.name, "proto": algorithm.protocol, "nchannels": algorithm.channels,
        "nchunksperloop": algorithm.chunks, "ngpus": len(algorithm.gpus),
        "coll": algorithm.collective.replace("_", ""), "inplace": int(algorithm.in_place),
        "outofplace": int(algorithm.out_of_place), "minBytes": algorithm.min_bytes, "maxBytes": algorithm.max_bytes,
    } | ({"root": algorithm.root} if algorithm.root >= 0 else {})  # fmt: skip
    lines = [_tag("algo", head, ">")]
    for g, gpu in enumerate(algorithm.gpus):
        sizes = {"id": g, "i_chunks": gpu.inputs, "o_chunks": gpu.outputs, "s_chunks": gpu.scratch}
        lines.append("  " + _tag("gpu", sizes, ">"))
        lines += ["    " + _tag("copy", {"i_off": i, "o_off": o}) for i, o in gpu.copies]
        for b, block in enumerate(gpu.blocks):
            ends = {"id": b, "send": block.send, "recv": block.recv, "chan": block.channel}
            lines.append("    " + _tag("tb", ends, ">"))
            for s, step in enumerate(block.steps):
                (src, i), (dst, o) = step.src or ("i", -1), step.dst or ("o", -1)
                lines.append("      " + _tag("step", {
                    "s": s, "type": step.type, "srcbuf": src, "srcoff": i, "dstbuf": dst, "dstoff": o,
                    "cnt": step.count, "depid": step.depid, "deps": step.deps, "hasdep": int(step.awaited),
                }))  # fmt: skip
            lines.append("    </tb>")
        lines.append("  </gpu>")
    return "\n".join([*lines, "</algo>", ""])


def _tag(name: str, attributes: Mapping[str, object], end: str = "/>") -> str:
    words = [f"{key}={quoteattr(str(value))}" for key, value in attributes.items()]
    return f"<{' '.join([name, *words])}{end}"


def _algorithm(algo: Element, source: str) -> XmlAlgorithm:
    here = f"{source}: <algo>"
    named = _text(algo, "coll", here)
    collective = COLLECTIVES_OF_XML.get(named.replace("_", ""))
    if collective is None:
        raise FormatError(f"{here} coll={quoted(named)}: expected one of {', '.join(COLLECTIVES_OF_XML)}; correct it")
    protocol = _text(algo, "proto", here)
    if protocol not in SLOTS:
        raise FormatError(f"{here} proto={quoted(protocol)}: expected one of {', '.join(SLOTS)}; correct it")
    in_place = _flag(algo, "inplace", here)
    shorter = any(tb.has("op") for gpu in algo.all("gpu") for tb in gpu.all("tb"))
    gpus = _gpus(algo, source, shorter=shorter)
    count = _int(algo, "ngpus", here, 1, MOST_GPUS)
    if count != len(gpus):
        raise FormatError(f"{here} ngpus={count}, and there are {len(gpus)} <gpu>; correct one of them")
    moves = sum(step.count for gpu in gpus for block in gpu.blocks for step in block.steps)
    if moves > MOST_MOVES:
        raise FormatError(f"{source}: its steps move {moves} chunks; more than {MOST_MOVES} are not read")
    largest = max(max(gpu.inputs, gpu.outputs) for gpu in gpus)
    chunks = _int(algo, "nchunksperloop", here, 1, MOST_CHUNKS, default=largest)
    if chunks * count * count > MOST_WANTED:
        raise FormatError(f"{here} ngpus={count} nchunksperloop={chunks}: results of that size are not checked; "
                          f"expected ngpus^2 nchunksperloop up to {MOST_WANTED}")  # fmt: skip
    return XmlAlgorithm(
        name=algo.attributes.get("name", ""),
        collective=collective,
        protocol=protocol,
        chunks=chunks,
        channels=_int(algo, "nchannels", here, 0),
        root=_int(algo, "root", here, -1, count - 1, default=-1),
        in_place=in_place,
        out_of_place=_flag(algo, "outofplace", here, default=not in_place),
        min_bytes=_bytes(algo, "minBytes", here),
        max_bytes=_bytes(algo, "maxBytes", here),
        gpus=gpus,
    )


def _gpus(algo: Element, source: str, *, shorter: bool) -> tuple[XmlGpu, ...]:
    found: dict[int, XmlGpu] = {}
    for gpu in algo.all("gpu"):
        number = _int(gpu, "id", f"{source}: <gpu>", 0, MOST_GPUS)
        here = f"{source}: gpu {number}"
        if number in found:
            raise FormatError(f"{here} is there twice; take one <gpu id={number}> out")
        inputs, outputs, scratch = (_int(gpu, f"{name}_chunks", here, 0, MOST_CHUNKS) for name in BUFFERS)
        copies = [
            (_int(copy, "i_off", f"{here} <copy>", 0), _int(copy, "o_off", f"{here} <copy>", 0))
            for copy in gpu.all("copy")
        ]
        found[number] = XmlGpu(inputs, outputs, scratch, _blocks(gpu, here, shorter=shorter), tuple(copies))
    if sorted(found) != list(range(len(found))) or not found:
        raise FormatError(f"{source}: the ids of <gpu> are {_ids(found)}; expected 0..n-1, number them anew")
    return tuple(found[number] for number in range(len(found)))


def _blocks(gpu: Element, here: str, *, shorter: bool) -> tuple[XmlBlock, ...]:
    found: dict[int, XmlBlock] = {}
    for tb in gpu.all("tb"):
        number = _int(tb, "id", f"{here} <tb>", 0)
        where = f"{here} tb {number}"
        if number in found:
            raise FormatError(f"{where} is there twice; take one <tb id={number}> out")
        elements = tb.all("op" if shorter else "step")
        steps = tuple(_step(element, f"{where} step {i}", i, shorter=shorter) for i, element in enumerate(elements))
        send, recv = (_int(tb, name, where, -1) for name in ("send", "recv"))
        found[number] = XmlBlock(send, recv, _int(tb, "chan", where, 0), steps)
    if sorted(found) != list(range(len(found))):
        raise FormatError(f"{here}: the ids of <tb> are {_ids(found)}; expected 0.. without gaps, number them anew")
    return tuple(found[number] for number in range(len(found)))


def _step(element: Element, here: str, number: int, *, shorter: bool) -> XmlStep:
    """Read one step; in the shorter spelling, what has its default is left out."""
    kind = _text(element, "type", here)
    if kind not in TYPES:
        raise FormatError(f"{here} type={quoted(kind)}: expected one of {', '.join(sorted(TYPES))}; correct it")
    said = _int(element, "step" if shorter else "s", here, 0)
    if said != number:
        raise FormatError(f"{here} is numbered {said}; expected {number}, steps count from 0 without gaps")
    if shorter and kind in ("cpy", "re"):
        raise FormatError(f"{here}: {kind} has two places, and <op> only one; write it as <step>")
    none = -1 if shorter else None
    depid, deps = (_int(element, name, here, -1, default=none) for name in ("depid", "deps"))
    return XmlStep(
        type=kind,
        src=_place(element, "" if shorter else "src", here) if kind in READS else None,
        dst=_place(element, "" if shorter else "dst", here) if kind in WRITES else None,
        count=1 if kind == "nop" else _int(element, "cnt", here, 1, MOST_CHUNKS, default=1 if shorter else None),
        depid=depid,
        deps=deps,
        awaited=_flag(element, "hasdep", here, default=False if shorter else None),
    )


def _place(element: Element, side: str, here: str) -> Place:
    buffer = _text(element, f"{side}buf", here)
    if buffer not in BUFFERS:
        raise FormatError(f"{here} {side}buf={quoted(buffer)}: expected i, o or s; correct it")
    return buffer, _int(element, f"{side}off", here, 0, MOST_CHUNKS)


def _text(element: Element, name: str, here: str) -> str:
    text = element.attributes.get(name)
    if text is None:
        raise FormatError(f"{here} has no {name}; add it")
    return text


def _int(element: Element, name: str, here: str, least: int, most: int = 10**9, *, default: int | None = None) -> int:
    text = element.attributes.get(name)
    if text is None and default is not None:
        return default
    if text is None or not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
        said = "is not there" if text is None else f"is {quoted(text)}"
        raise FormatError(f"{here}: {name} {said}; expected a whole number of {least}..{most}")
    return int(text)


def _bytes(element: Element, name: str, here: str) -> int:
    text = element.attributes.get(name, "0")
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise FormatError(f"{here}: {name} is {quoted(text)}; expected a number of bytes")
    return int(text)


def _flag(element: Element, name: str, here: str, *, default: bool | None = None) -> bool:
    return _int(element, name, here, 0, 1, default=None if default is None else int(default)) == 1


def _ids(found: Sequence[int] | dict[int, XmlGpu] | dict[int, XmlBlock]) -> str:
    return brief(", ".join(map(str, sorted(found))), 80) or "none"
