"""What launches.h takes of a call on GPU memory, to launch its kernels again without Python."""

import ctypes

MOST_PARTS = 4  # kernels of a call: its own, and those that gather and scatter
FIELDS = (
    "launch", "current", "attribute", "capturing", "context", "device", "stream", "asks", "parts", "first", "end",
    *(f"{name}[{part}]" for name in ("function", "grid", "block", "words", "count") for part in range(MOST_PARTS)),
    "print_at", "base[0]", "base[1]", "moves", "moving", "nbytes", "n", "rank", "stride",
    "calls", "prints[0]", "prints[1]", "print", "body", "body_bytes", "elsewhere",
    "report", "history", "starts", "kernels",
)  # fmt: skip
MOST_WORDS = 512  # of a kernel's arguments
NO_BASE = ("base[0]", "base[1]")  # which the library fills in


class LaunchStruct(ctypes.Structure):
    """``launch_t`` of launches.h."""

    _fields_ = [(name, ctypes.c_uint64) for name in FIELDS]


def layout() -> tuple[list[str], list[int]]:
    """The fields, and where they and the end lie."""
    return list(FIELDS), [*(getattr(LaunchStruct, name).offset for name in FIELDS), ctypes.sizeof(LaunchStruct)]
