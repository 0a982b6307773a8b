"""The C executor: compiled once per machine where there is a C compiler, loaded through ctypes.

``build()`` gives the library or the reason why there is none; it never raises for a missing compiler, because the NumPy
executor does the same work.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...util.cache_folder import cache_dir
from ...util.files import read_file
from ..control_pages import RECV_WORD, SEND_WORD
from ..events import CALL, CHUNK, ENTER, EVENT, WAIT, RingStruct

SOURCE = Path(__file__).with_name("executor.c")
SOURCES = (SOURCE, *(SOURCE.with_name(f"{name}.h") for name in ("single_copy", "reduction", "waiting", "trace")))
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-pthread", "-shared", "-fPIC")
DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32", "float64")  # fmt: skip  # noqa: E501
OPS = ("sum", "prod", "min", "max", "land", "lor", "lxor", "band", "bor", "bxor")

# What executor.c and this package count on alike; :func:`load` compares them with the library's.
FIELDS = (
    "stages", "dtype", "op", "item", "acc", "chunk", "depth", "divide", "stream", "cma", "helper",
    "tally", "tallies", "trace", "program", "timing", "times", "timed",
    "n", "rank", "stride", "calls", "prints[0]", "prints[1]", "pids", "heartbeat", "abort", "spins",
    "send", "recv", "send_bytes", "recv_bytes", "print",
    "seq", "base", "timeout_ns", "phase", "left", "moved", "fault", "faulty",
)  # fmt: skip
SEQ_BITS = 24  # a flag is (sequence number << SEQ_BITS) + chunks
DONE_CHUNKS, HEADER, INPUT_WORDS = 9, 12, 6  # of a row: where it counts chunks, its words before the operands, an input
RUNNING = 2  # the phase in which all ranks have entered the same call
UNTOLD = 6  # the status of a call that this rank has to describe in its record first
TIMING = 2  # words of a traced call's row
CONSTANTS = (
    SEQ_BITS, SEND_WORD, RECV_WORD, 2, DONE_CHUNKS, HEADER, INPUT_WORDS, RUNNING, UNTOLD,
    TIMING, EVENT.itemsize, ctypes.sizeof(RingStruct), CHUNK, WAIT, ENTER, CALL,
)  # fmt: skip


class CallStruct(ctypes.Structure):
    """``call_t`` of executor.c: a call, from its program to how far it is."""

    _fields_ = [(name, ctypes.c_uint64 if name in ("print", "seq", "base") else ctypes.c_int64) for name in FIELDS]


class LayoutError(OSError):
    """The library and this package disagree about a structure that they share."""


@dataclass(frozen=True)
class Native:
    """The loaded library and the compiler that made it."""

    code: ctypes.CDLL
    compiler: str


def address(struct: CallStruct) -> int:
    """Where a structure lies."""
    return ctypes.addressof(struct)


def codes(dtype: str, op: str) -> tuple[int, int] | None:
    """The numbers that executor.c knows an element type and operation by, or None if NumPy must fold it (complex)."""
    op = "sum" if op in ("", "avg") else op
    if dtype == "bool":
        dtype = "uint8"
    if dtype in DTYPES and op in OPS:
        return DTYPES.index(dtype), OPS.index(op)
    return None


def build() -> tuple[Path | None, str]:
    """Compile the C executor if this machine has not done so before: (library, compiler), or (None, why not)."""
    compiler = os.environ.get("CC") or next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        return None, "no C compiler (cc, gcc, clang) on PATH"
    try:
        path = Path(shutil.which(compiler) or compiler)
        name = _version(path, path.stat().st_mtime_ns) or compiler
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"{compiler} --version failed: {error}"
    texts = [file.read_text() for file in SOURCES]
    key = hashlib.sha256("\n".join([*texts, name, *FLAGS, _cpu()]).encode()).hexdigest()[:16]
    folder = cache_dir()
    target = folder / f"executor-{key}.so"
    if _is_whole(target):
        return target, name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "executor.so"
            command = [compiler, *FLAGS, "-o", str(made), str(SOURCE), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode != 0:
                return None, f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}"
            with made.open("ab") as library:
                library.write(hashlib.sha256(made.read_bytes()).digest())
            os.replace(made, target)
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"compiling the executor in {folder} failed: {error}"
    return target, name


@cache
def _version(compiler: Path, _changed: int) -> str:
    """What a compiler calls itself; asked once, because to start a process takes a large one a tenth of a second."""
    told = subprocess.run([str(compiler), "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    return told.splitlines()[0] if told else ""


def _is_whole(path: Path) -> bool:
    """Whether a kept library is what was compiled: the loader would die of SIGBUS in the middle of a shortened one.

    Its last bytes, after what the loader reads, are the digest of those before.
    """
    try:
        text = read_file(path)
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(text[:-size]).digest() == text[-size:]


def load(path: Path, compiler: str) -> Native:
    """Open a library that :func:`build` made.

    Raises:
        OSError: if it cannot be opened, or was made of other structures than this package's.
    """
    library = ctypes.CDLL(str(path), use_errno=True)
    check_layout(library)
    library.blink_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    library.blink_begin.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    library.blink_execute.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.blink_barrier.argtypes = [ctypes.c_void_p]
    library.blink_export.argtypes, library.blink_export.restype = [ctypes.c_void_p], None
    library.blink_read.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    library.blink_read_shared.argtypes = [ctypes.c_void_p, *library.blink_read.argtypes]
    library.blink_help.argtypes, library.blink_help.restype = [], ctypes.c_void_p
    library.blink_help_no_more.argtypes, library.blink_help_no_more.restype = [ctypes.c_void_p], None
    return Native(library, compiler)


def check_layout(library: ctypes.CDLL) -> None:
    """Raise LayoutError unless the library has the fields, offsets and constants that this module lists."""
    names = ctypes.c_char * (len(" ".join(FIELDS)) + 2)
    fields = names.in_dll(library, "blink_call_fields").value.decode().split()
    if fields != list(FIELDS):
        raise LayoutError(f"executor.c has the fields {fields}, native.py {list(FIELDS)}; make them equal")
    found = list((ctypes.c_int64 * (len(FIELDS) + 1)).in_dll(library, "blink_call_offsets"))
    wanted = [*(getattr(CallStruct, name).offset for name in FIELDS), ctypes.sizeof(CallStruct)]
    if found != wanted:
        raise LayoutError(f"executor.c has its fields at {found}, native.py at {wanted}; make them equal")
    constants = tuple((ctypes.c_int64 * len(CONSTANTS)).in_dll(library, "blink_constants"))
    if constants != CONSTANTS:
        raise LayoutError(f"executor.c has the constants {constants}, native.py {CONSTANTS}; make them equal")


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            facts = [line for line in file if line.startswith(("flags", "Features", "model name", "CPU part"))]
    except OSError:
        facts = []
    return platform.machine() + "".join(sorted(set(facts)))
