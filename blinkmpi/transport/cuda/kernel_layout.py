"""The structs that host and kernels share, as the host fills them in; the compiler asserts that the kernels agree."""

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType

from ...program.memory import Segments
from . import failure_report as report
from . import memory_layout as memory
from .direct_segments import Segment
from .failure_report import AbortReport
from .packets import LL16, LL128, PacketStreams
from .regions import OFFSET_BITS

# Names of 64-bit words, in their order. These are the last ones of CommonArguments, behind an address for each rank.
COMMON = (
    "report", "fingerprint", "timeout_ns", "rank", "divisor",
    "send", "recv", "send_ref", "recv_ref", "destination", "destination_bytes",
)  # fmt: skip
TIMEOUT_AT, BUFFERS_AT = COMMON.index("timeout_ns"), COMMON.index("send")
REPORT = ("abort", *(field.name for field in fields(AbortReport)))
PACKETS = (*PacketStreams._fields, "slice", "buffer_bytes")
DIRECT = (*Segment._fields, "even", "regions")
STAGES = ("table",)
MESSAGE = ("memory_at", "peer", "sends", "nbytes", "tag")
BLOCKS = ("memory_at", "lanes", "ends", "own_from", "own_to", "own_bytes")  # then the ends, of which each has
BLOCK_END = ("peer", "sends", "at", "nbytes")
COUNTED = ("item", "send_count", "recv_count", "counts", "told", "places")  # behind them, of lengths in GPU memory
ROW = (
    "KIND", "COUNT", "CHUNK", "OWN", "STORE", "FIRST", "STRIDE", "DEPTH", "STAGE", "EMULATED", "IN_BYTES", "OUT_BYTES",
    "SPAN", "AFTER",
)  # fmt: skip
SPAN_WORDS = 4  # from COUNT to STORE: what depends on the count
PARAMETER_BYTES = 4096  # of a kernel, at most
SPANS = (0, 8, 32, 112)  # how many a kernel takes, so that plans of about as many stages have one kernel
BEFORE_CHANNELS = 16  # words of a row
SEGMENT_HEAD = ("bucket", "given_up", "stride", "blocks", "parts")  # words of SegmentArguments
SEGMENTS = 248  # behind them, of two words
SEGMENT_ROOMS = (16, 112)  # how many segments each way a kernel over packets takes, if it takes any
NO_PLACE = (1 << 32) - 1  # of what stands behind the last of them
SEGMENT_THREADS = 512
SEGMENT_BYTES = 64 * SEGMENT_THREADS  # that a CTA copies with one look at each of its loads
SEGMENT_CTAS = 2048  # about as many of a kernel at most, unless there are more segments
CHANNEL = ("slots", "head", "tail", "peer", "link_clock", "link_ns_per_mib")


def common_arguments(symmetric: Sequence[int], report: int, fingerprint: int, rank: int, divisor: int) -> list[int]:
    """``CommonArguments``, without what :func:`fill_call` sets for each call."""
    given = {"report": report, "fingerprint": fingerprint, "rank": rank, "divisor": divisor}
    return [*symmetric, *[given.get(name, 0) for name in COMMON]]


def common_words(n: int) -> int:
    """Words of the ``CommonArguments``."""
    return n + len(COMMON)


def fingerprint_at(n: int) -> int:
    """The word of a kernel's arguments that tells its call from others."""
    return n + COMMON.index("fingerprint")


def timeout_at(n: int) -> int:
    """The word of a kernel's arguments with the nanoseconds of one wait."""
    return n + TIMEOUT_AT


def buffers_at(n: int) -> int:
    """The word of a kernel's arguments with the address of the send buffer; behind it, what :func:`fill_call` lists."""
    return n + BUFFERS_AT


def fill_call(args: ctypes.Array[ctypes.c_uint64], n: int, timeout_ns: int, buffers: tuple[int, ...]) -> None:
    """Set what differs from call to call in the ``CommonArguments`` that a kernel's arguments begin with.

    Args:
        buffers: from ``send`` to ``destination_bytes``.
    """
    args[timeout_at(n)] = timeout_ns
    args[buffers_at(n) : n + len(COMMON)] = [*buffers]


def words_are(
    struct: str, names: Iterable[str], *, n: int = 0, before: str = "", behind: Mapping[str, int] = MappingProxyType({})
) -> str:
    """C++ that compiles only if a struct has words of these names in this order, and nothing else.

    Args:
        before: a member of ``n`` words before the first, or, if it is ``c``, the common arguments.
        behind: members behind the last, and their words.
    """
    sizes = {before: n + (len(COMMON) if before == "c" else 0)} if before else {}
    sizes |= {**dict.fromkeys(names, 1), **behind}
    at, equal = 0, {}
    for name, words in sizes.items():
        equal[f"OFFSET_OF({struct}, {name})"] = 8 * at
        at += words
    return equals({**equal, f"sizeof({struct})": 8 * at})


def equals(values: dict[str, int]) -> str:
    """C++ that compiles only if constant expressions have these values."""
    return "".join(f'static_assert({c} == {v}, "kernel_layout.py: {c} == {v}");\n' for c, v in values.items())


def macros(n: int) -> str:
    """What the kernels take from Python."""
    taken = {"N": n, "MAX_RANKS": memory.MAX_RANKS, "MAX_CTAS": memory.MAX_CTAS, "OFFSET_BITS": OFFSET_BITS,
             "ANNOUNCED": memory.ANNOUNCED}  # fmt: skip
    return "".join(f"#define {name} {value}\n" for name, value in taken.items())


def common_layout(n: int) -> str:
    """Assertions about ``layout.cuh``."""
    codes = (
        "ABORTED", "TIMEOUT", "MISMATCH", "OVERLAP", "COUNTS",
        "ANNOUNCEMENT", "FINISH", "PACKET", "SEND", "RECEIVE", "SEND_BLOCK", "RECEIVE_BLOCK",
    )  # fmt: skip
    return (
        words_are("CommonArguments", COMMON, n=n, before="symmetric")
        + words_are("Report", REPORT)
        + equals({code: getattr(report, code) for code in codes})
        + equals({
            "sizeof(Announcement)": memory.LINE,
            "OFFSET_OF(Announcement, last)": 0,
            "OFFSET_OF(SymmetricHeader, announced)": memory.ANNOUNCED_AT,
            "OFFSET_OF(SymmetricHeader, report_taken)": memory.GIVEN_UP_AT,
            f"(sizeof(SymmetricHeader) <= {memory.HEAD_BYTES})": 1,
        })
    )  # fmt: skip


def packets_layout(n: int, segments: int = 0) -> str:
    """Assertions about ``exchange.cuh`` and the codecs."""
    ways = {"sent": 2 * segments, "received": 2 * segments} if segments else {}
    codecs = {
        f"{codec.name}::{constant}": value
        for codec in (LL16, LL128)
        for constant, value in (("GROUP", codec.group), ("DATA", codec.data), ("BYTES", codec.position_bytes))
    }
    fits = f"(sizeof(PacketArguments) <= {PARAMETER_BYTES})"
    return (
        words_are("PacketArguments", PACKETS, n=n, before="c", behind={"buffers": n, **ways})
        + equals({**codecs, "SETS": memory.SETS, "SHOTS": memory.SHOTS, fits: 1})
        + (_segment_layout() if segments else "")
    )


def messages_layout(n: int) -> str:
    """Assertions about ``messages.cu``."""
    return words_are("MessageArguments", MESSAGE, n=n, before="c") + equals(
        {"sizeof(FifoMemory)": memory.message_bytes(n)}
    )


def blocks_layout(n: int, *, counted: bool) -> str:
    """Assertions about ``blocks.cu``."""
    behind = {"each": 2 * (n - 1) * len(BLOCK_END), **dict.fromkeys(COUNTED if counted else (), 1)}
    return (
        words_are("BlockArguments", BLOCKS, n=n, before="c", behind=behind)
        + words_are("BlockEnd", BLOCK_END)
        + equals({"sizeof(BlockMemory)": memory.block_bytes(n), "LANE_BYTES": memory.BLOCK_LANE})
    )


def room_for(ways: Sequence[Segments]) -> int:
    """How many segments each way a kernel over packets must take; 0 if there is none that takes so many."""
    most = max(len(way.pieces) for way in ways)
    return next((room for room in SEGMENT_ROOMS if room >= most), 0)


def segment_words(ways: Sequence[Segments], room: int) -> list[int]:
    """The last arguments of a kernel over packets that takes ``room`` segments each way."""
    words: list[int] = []
    for way in ways:
        for at, place, nbytes in way.pieces:
            words += at, _packed(place, nbytes)
        words += [0, NO_PLACE] * (room - len(way.pieces))
    return words


def direct_layout(n: int) -> str:
    """Assertions about ``direct.cu``."""
    return words_are("DirectArguments", DIRECT, n=n, before="c", behind={"src": n, "dst": n})


def segment_launches(segments: Segments, given_up: int) -> list[tuple[int, list[int]]]:
    """The CTAs and arguments of the kernels that copy segments: one, unless they are many.

    Args:
        given_up: address of the word that is not 0 when a kernel gave up.
    """
    found = []
    for first in range(0, len(segments.pieces), SEGMENTS):
        some = segments.pieces[first : first + SEGMENTS]
        items = len(some) * segments.blocks
        longest = max(nbytes for *_, nbytes in some)
        parts = max(1, min(-(-longest // SEGMENT_BYTES), SEGMENT_CTAS // items))
        words = [segments.bucket, given_up, segments.stride, segments.blocks, parts]
        for at, place, nbytes in some:
            words += at, _packed(place, nbytes)
        found.append((items * parts, words + [0] * (2 * (SEGMENTS - len(some)))))
    return found


def segments_layout() -> str:
    """Assertions about ``segments.cu``."""
    return (
        words_are("SegmentArguments", SEGMENT_HEAD, behind={"segments": 2 * SEGMENTS})
        + equals({f"(sizeof(SegmentArguments) <= {PARAMETER_BYTES})": 1})
        + _segment_layout()
    )


def _packed(place: int, nbytes: int) -> int:
    """The second word of a segment."""
    return place // 16 | nbytes << 32


def _segment_layout() -> str:
    return equals({"OFFSET_OF(Segment, place)": 8, "OFFSET_OF(Segment, nbytes)": 12})


def spans_for(stages: int) -> int:
    """How many spans a kernel for so many stages takes; 0 if its arguments have no room for them."""
    return next((spans for spans in SPANS if spans >= stages), 0)


def stages_layout(n: int, threads: int, spans: int) -> str:
    """Assertions about ``stages.cu``."""
    row = {name: index for index, name in enumerate(ROW)}
    behind = {"spans": SPAN_WORDS * spans} if spans else {}
    return (
        words_are("StageArguments", STAGES, n=n, before="c", behind=behind)
        + words_are("Channel", CHANNEL)
        + equals({**row, "WORDS_BEFORE_CHANNELS": BEFORE_CHANNELS, "THREADS": threads, "SPAN_WORDS": SPAN_WORDS})
        + equals({f"(sizeof(StageArguments) <= {PARAMETER_BYTES})": 1})
    )
