"""The C executor: compiled once per machine where there is a C compiler, loaded through ctypes.

``build()`` gives the library or the reason why there is none; it never raises for a missing compiler, because the NumPy
executor does the same work.
"""

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import SettingsError
from ...util.cache_folder import cache_dir, make_folder, put, read_kept, sealed, unsealed, why_not
from ...util.cache_folder import library as open_library
from ..control_pages import LATE_LOOKS, RECV_WORD, SEND_WORD, SEQ_BITS, SOON_NS
from ..events import CALL, CHUNK, ENTER, EVENT, WAIT, RingStruct
from .c_structs import fields, names

SOURCE = Path(__file__).with_name("executor.c")
SOURCES = (SOURCE, *sorted(SOURCE.parent.glob("*.h")))
NO_COMPILER = "no C compiler (cc, gcc, clang) on PATH; pip install 'blinkmpi[cc]' brings one"
COMPILE_S = 300  # time that a compiler may take
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-pthread", "-shared", "-fPIC")
DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32", "float64")  # fmt: skip  # noqa: E501
OPS = ("sum", "prod", "min", "max", "land", "lor", "lxor", "band", "bor", "bxor")


class CallStruct(ctypes.Structure):
    """``call_t`` of call.h: a call, from its program to how far it is."""

    _fields_ = fields("call.h", "call_t")


PIECE_BYTES, PIECES = 32 << 10, 40  # a message goes in pieces, short enough for MPI to send them at once
DONE_CHUNKS, HEADER, INPUT_WORDS = 9, 12, 6  # of a row: where it counts chunks, its words before the operands, an input
RUNNING = 4  # the phase in which all ranks have entered the same call
NETWORK, REMOTE_DIFFERS = 7, 8  # statuses: MPI failed; another node announced something else
UNTOLD = 6  # the status of a call that this rank has to describe in its record first
TOLD = 3  # the phase in which announcements alone cross between nodes, through Python
WITH_PYTHON = (
    ("launches.h", "launch_t"), ("block_kinds.h", "kind_t"), ("count_kinds.h", "count_kind_t"),
    ("block_launches.h", "block_launch_t"),
)  # fmt: skip
TIMING = 2  # words of a traced call's row
CONSTANTS = (
    SEQ_BITS, SEND_WORD, RECV_WORD, 2, DONE_CHUNKS, HEADER, INPUT_WORDS, RUNNING, UNTOLD,
    TIMING, EVENT.itemsize, ctypes.sizeof(RingStruct), CHUNK, WAIT, ENTER, CALL, NETWORK, REMOTE_DIFFERS, TOLD,
    *(8 * len(names("call.h", name)) for name in ("nodes_t", "node_t", "blocks_t", "block_t")),
    PIECE_BYTES, PIECES, SOON_NS, LATE_LOOKS, ctypes.sizeof(CallStruct),
)  # fmt: skip


class LayoutError(OSError):
    """The library and this package disagree about a structure that they share."""


@dataclass(frozen=True)
class Native:
    """The loaded library and the compiler that made it."""

    code: ctypes.CDLL
    compiler: str
    repeated: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None  # makes the functions of repeated_calls.h


def address(struct: CallStruct) -> int:
    """Where a structure lies."""
    return ctypes.addressof(struct)


def messages_done(native: Native, nodes: int) -> int:
    """Whether no message of calls in one shot is under way; ``nodes`` is the address of nodes_t."""
    call = CallStruct()
    call.nodes = nodes
    return int(native.code.blink_messages_done(address(call)))


def codes(dtype: str, op: str) -> tuple[int, int] | None:
    """The numbers that executor.c knows an element type and operation by, or None if NumPy must fold it (complex)."""
    op = "sum" if op in ("", "avg") else op
    if dtype == "bool":
        dtype = "uint8"
    if dtype in DTYPES and op in OPS:
        return DTYPES.index(dtype), OPS.index(op)
    return None


def build() -> tuple[Path | None, str]:
    """The C executor, compiled here or kept from before: (library, compiler), or (None, why there is none).

    Any number of processes may do this at once, of several jobs, users and machines that share a folder: each compiles
    into a scratch folder and puts the whole file in place. Where the cache folder cannot be used (a home that is
    read-only or may not be executed from, a folder that others write to) the library is kept below ``TMPDIR``.
    Where there is no compiler, as on the compute nodes of some clusters, one that was kept for this processor serves.
    """
    command, name, lost = _compiler()
    if (name or not command) and (found := kept(name)):
        return found, name or f"an earlier compiler ({lost}, but {found} is kept)"
    if not name:
        return None, lost
    folders, lost = _folders()
    for folder in folders:
        target = folder / _file_name(name, headers=bool(_python_flags()))
        try:
            make_folder(folder)
            if why := why_not(folder):
                raise OSError(why)
            _compile([*command, *FLAGS, *_python_flags()], SOURCE, target)
        except (OSError, subprocess.SubprocessError) as error:
            lost = "; ".join(filter(None, (lost, f"compiling the executor in {folder} failed: {error}")))
            continue
        return target, f"{name}, kept in {folder}: {lost}" if lost else name
    return None, lost


def kept(compiler: str = "") -> Path | None:
    """The library that was made for this processor and Python from these sources, by this compiler or by any."""
    names = [_file_name(compiler, headers=bool(_python_flags()))]
    if not compiler:  # without a compiler this Python may lack the headers, too, that the library was compiled with
        names = [_file_name("", headers=True), _file_name("", headers=False)]
    for folder in _folders()[0]:
        for path in (path for name in names for path in sorted(folder.glob(name))):
            if _is_whole(path):
                return path
    return None


def _file_name(compiler: str, *, headers: bool) -> str:
    """What a library is called, by all that it depends on; a pattern if the compiler is not named.

    Args:
        headers: whether Python's are there, without which it has no repeated_calls.h.
    """
    made_for = _digest(*(file.read_text() for file in SOURCES), *FLAGS, _cpu())
    python = f"py{sys.hexversion >> 16:x}-np{np.__version__}" if headers else "plain"
    return f"executor-{made_for}-{python}-{_digest(compiler) if compiler else '*'}.so"


def compiler_command(environ: Mapping[str, str]) -> list[str]:
    """The words that start a C compiler: ``CC``, one on PATH, or that of the package ziglang; none without."""
    named = environ.get("CC", "").strip()
    if named:
        try:
            return shlex.split(named)
        except ValueError:  # an unclosed quote: starting it as a command gives the error
            return [named]
    if found := next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), ""):
        return [found]
    return [sys.executable, "-m", "ziglang", "cc"] if find_spec("ziglang") else []


def _compiler() -> tuple[list[str], str, str]:
    """The compiler's command and what it calls itself; without one, an empty name and the reason."""
    command = compiler_command(os.environ)
    if not command:
        return command, "", NO_COMPILER
    try:
        path = Path(shutil.which(command[0]) or command[0])
        return command, _version((str(path), *command[1:]), path.stat().st_mtime_ns) or command[0], ""
    except (OSError, subprocess.SubprocessError) as error:
        return command, "", f"{shlex.join(command)} --version failed: {error}"


def kept_library(source: Path, flags: Sequence[str]) -> Path | None:
    """Another C library of ours, as :func:`built` has made it of this source; None if it has not."""
    for folder in _folders()[0]:
        for path in sorted(folder.glob(_library_name(source, flags, _compiler()[1]))):
            if _is_whole(path):
                return path
    return None


def built(source: Path, flags: Sequence[str]) -> tuple[Path | None, str]:
    """Another C library of ours, compiled and kept as :func:`build` does; or why there is none."""
    if found := kept_library(source, flags):
        return found, ""
    command, name, lost = _compiler()
    if not name:
        return None, lost
    folders, lost = _folders()
    for folder in folders:
        target = folder / _library_name(source, flags, name)
        try:
            make_folder(folder)
            if why := why_not(folder):
                raise OSError(why)
            _compile([*command, *flags], source, target)
        except (OSError, subprocess.SubprocessError) as error:
            lost = "; ".join(filter(None, (lost, f"compiling {source.name} in {folder} failed: {error}")))
            continue
        return target, lost
    return None, lost


def _library_name(source: Path, flags: Sequence[str], compiler: str) -> str:
    """What another library is called, by all that it depends on; a pattern if the compiler is not named."""
    made_of = _digest(*map(Path.read_text, _sources(source)), *flags, platform.machine())
    return f"{source.stem}-{made_of}-{_digest(compiler) if compiler else '*'}.so"


def _sources(source: Path) -> list[Path]:
    """A source and the headers of ours that it includes, and those that they include."""
    found = [source]
    for file in found:
        headers = (file.parent / name for name in re.findall(r'^#include "(.+)"$', file.read_text(), re.MULTILINE))
        found += (header for header in map(Path.resolve, headers) if header not in found)
    return found


def _compile(compiler: list[str], source: Path, target: Path) -> None:
    """Compile into a scratch folder beside ``target``, seal the library by its digest, and put it in place.

    Raises:
        OSError: if the folder cannot be written, or the compiler fails.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [*compiler, "-o", str(made), str(source), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            cause = next((line for line in lines if "error:" in line), "".join(lines[-1:]))
            raise OSError(f"{shlex.join(command)}: {cause}")
        put(target, sealed(made.read_bytes()), mode=0o755)


def _folders() -> tuple[list[Path], str]:
    """Where libraries are kept, the first choice first; and why there is no cache folder, if there is none.

    The last one is this user's in the folder for temporary files; that it really is the user's, :func:`why_not` checks.
    """
    found, lost = [], ""
    try:
        found.append(cache_dir())
    except SettingsError as error:
        lost = str(error)
    try:
        found.append(Path(tempfile.gettempdir()) / f"blinkmpi-{os.getuid()}")
    except FileNotFoundError as error:
        lost = "; ".join(filter(None, (lost, str(error))))
    return found, lost


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


@cache
def _version(compiler: tuple[str, ...], _changed: int) -> str:
    """What a compiler calls itself; asked once, because to start a process takes a large one a tenth of a second."""
    told = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    return told.splitlines()[0] if told else ""


def _is_whole(path: Path) -> bool:
    """Whether a kept library may be run and is what was compiled."""
    try:
        return not why_not(path.parent) and unsealed(read_kept(path)) is not None
    except OSError:
        return False


@cache
def load(path: Path, compiler: str) -> Native:
    """Open a library that :func:`build` made.

    Raises:
        OSError: if it cannot be opened, is not this user's alone, or was made of other structures than this package's.
    """
    checked = open_library(path)
    library = ctypes.CDLL(checked, use_errno=True)
    check_layout(library)
    library.blink_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    library.blink_begin.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    library.blink_execute.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.blink_barrier.argtypes = [ctypes.c_void_p]
    library.blink_messages_done.argtypes = [ctypes.c_void_p]
    library.blink_sum_lengths.argtypes, library.blink_sum_lengths.restype = [ctypes.c_void_p], None
    library.blink_export.argtypes, library.blink_export.restype = [ctypes.c_void_p], None
    library.blink_read.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    library.blink_read_shared.argtypes = [ctypes.c_void_p, *library.blink_read.argtypes]
    library.blink_time_steps.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_void_p]
    library.blink_time_steps.restype = ctypes.c_int64
    library.blink_help.argtypes, library.blink_help.restype = [], ctypes.c_void_p
    library.blink_help_no_more.argtypes, library.blink_help_no_more.restype = [ctypes.c_void_p], None
    return Native(library, compiler, _repeated(library, checked))


def _python_flags() -> list[str]:
    """What the compiler needs to know of this Python and its NumPy; nothing where Python's headers are missing."""
    python = sysconfig.get_path("include")
    if not Path(python, "Python.h").exists() or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return []
    return ["-DBLINK_PYTHON", f"-I{python}", f"-I{np.get_include()}"]


def _repeated(library: ctypes.CDLL, path: str) -> Callable[[tuple[Any, ...]], tuple[Any, ...]] | None:
    """What makes the functions of repeated_calls.h; None where they are missing, or are those of another Python."""
    try:
        version = ctypes.c_int64.in_dll(library, "blink_python").value
    except ValueError:
        return None
    if version != sys.hexversion >> 16:
        return None
    found = list((ctypes.c_int64 * len(WITH_PYTHON)).in_dll(library, "blink_sizes"))
    wanted = [8 * len(names(header, name)) for header, name in WITH_PYTHON]
    if found != wanted:
        raise LayoutError(f"the library has {WITH_PYTHON} of {found} bytes, and their headers of {wanted}")
    make = ctypes.PyDLL(path).blink_repeated_calls
    make.argtypes, make.restype = [ctypes.py_object], ctypes.py_object
    return make


def check_layout(library: ctypes.CDLL) -> None:
    """Raise LayoutError unless the library has the constants that this module lists, and structures of these sizes."""
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
