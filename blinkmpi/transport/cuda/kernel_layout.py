"""The structs that host and kernels share, as the host fills them in; the compiler asserts that the kernels agree."""

from collections.abc import Iterable, Sequence
from dataclasses import fields

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
REPORT = ("abort", *(field.name for field in fields(AbortReport)))
PACKETS = (*(field.name for field in fields(PacketStreams)), "slice", "buffer_bytes")
DIRECT = (*Segment._fields, "even", "regions")
STAGES = ("table",)
ROW = (
    "KIND", "COUNT", "CHUNK", "FIRST", "STRIDE", "OWN", "STORE", "DEPTH", "STAGE", "EMULATED", "IN_BYTES", "OUT_BYTES",
)  # fmt: skip
BEFORE_CHANNELS = 16  # words of a row
CHANNEL = ("slots", "head", "tail", "peer", "link_clock", "link_ns_per_mib")


def common_arguments(symmetric: Sequence[int], report: int, fingerprint: int, rank: int, divisor: int) -> list[int]:
    """``CommonArguments``, without what :func:`fill_common` sets for each call."""
    known = {"report": report, "fingerprint": fingerprint, "rank": rank, "divisor": divisor}
    return [*symmetric, *(known.get(name, 0) for name in COMMON)]


def fill_common(args: list[int], n: int, **words: int) -> None:
    """Set some words of the ``CommonArguments`` that a kernel's arguments begin with, by their names."""
    for name, value in words.items():
        args[n + COMMON.index(name)] = value


def words_are(struct: str, names: Iterable[str], *, n: int = 0, before: str = "", behind: Sequence[str] = ()) -> str:
    """C++ that compiles only if a struct has words of these names in this order, and nothing else.

    Args:
        before, behind: members of ``n`` words before the first (or, if ``before`` is ``c``, the common arguments), and
            behind the last.
    """
    sizes = {before: n + (len(COMMON) if before == "c" else 0)} if before else {}
    sizes |= dict.fromkeys(names, 1) | dict.fromkeys(behind, n)
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
    taken = {"N": n, "MAX_RANKS": memory.MAX_RANKS, "MAX_CTAS": memory.MAX_CTAS, "OFFSET_BITS": OFFSET_BITS}
    return "".join(f"#define {name} {value}\n" for name, value in taken.items())


def common_layout(n: int) -> str:
    """Assertions about ``layout.cuh``."""
    codes = ("ABORTED", "TIMEOUT", "MISMATCH", "OVERLAP", "ANNOUNCEMENT", "FINISH", "PACKET")
    return (
        words_are("CommonArguments", COMMON, n=n, before="symmetric")
        + words_are("Report", REPORT)
        + equals({code: getattr(report, code) for code in codes})
        + equals({
            "sizeof(Announcement)": memory.LINE,
            "OFFSET_OF(Announcement, word)": 0,
            "OFFSET_OF(SymmetricHeader, announced)": memory.ANNOUNCED_AT,
            f"(sizeof(SymmetricHeader) <= {memory.HEAD_BYTES})": 1,
        })
    )  # fmt: skip


def packets_layout(n: int) -> str:
    """Assertions about ``exchange.cuh`` and the codecs."""
    codecs = {
        f"{codec.name}::{constant}": value
        for codec in (LL16, LL128)
        for constant, value in (("GROUP", codec.group), ("DATA", codec.data), ("BYTES", codec.position_bytes))
    }
    return words_are("PacketArguments", PACKETS, n=n, before="c", behind=["buffers"]) + equals(
        {**codecs, "SETS": memory.SETS, "SHOTS": memory.SHOTS}
    )


def direct_layout(n: int) -> str:
    """Assertions about ``direct.cu``."""
    return words_are("DirectArguments", DIRECT, n=n, before="c", behind=["src", "dst"])


def stages_layout(n: int, threads: int) -> str:
    """Assertions about ``stages.cu``."""
    row = {name: index for index, name in enumerate(ROW)}
    return (
        words_are("StageArguments", STAGES, n=n, before="c")
        + words_are("Channel", CHANNEL)
        + equals({**row, "WORDS_BEFORE_CHANNELS": BEFORE_CHANNELS, "THREADS": threads})
    )
