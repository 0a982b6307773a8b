"""The libraries that lie between a program and NCCL, compiled and kept, and the environment in which it meets them."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import ArgumentError
from ..transport.host.native import built

HERE = Path(__file__).parent
COUNT, DOOR, BY_NAME = HERE / "count.c", HERE / "door" / "door.c", HERE / "by_name.c"
FLAGS = ("-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")
SONAME = "libnccl.so.2"
LIBRARY, FOLDER = "BLINKMPI_NCCL_LIBRARY", "BLINKMPI_NCCL_COUNTS"
PATHS = ("VLLM_NCCL_SO_PATH", "SGLANG_NCCL_SO_PATH")  # by which vLLM and SGLang are told what to open


def door() -> Path:
    """The library that makes calls.

    Raises:
        ArgumentError: if it cannot be compiled.
    """
    return _compiled(DOOR, FLAGS)


def preloaded(source: Path = DOOR) -> Path:
    """The library for ``LD_PRELOAD``: the door, or what counts.

    Raises:
        ArgumentError: if it cannot be compiled, or lies where no program can be told of it.
    """
    path = _compiled(source, FLAGS)
    if any(mark in str(path) for mark in " :"):
        raise ArgumentError(f"LD_PRELOAD cannot name {str(path)!r}: it ends names at blanks and colons; "
                            "set BLINKMPI_CACHE_DIR to a folder without")  # fmt: skip
    return path


def opened_by_name(source: Path = DOOR) -> Path:
    """The library for programs that open NCCL by name, which finds the functions of :func:`preloaded` first.

    Raises:
        ArgumentError: if there is no NCCL, or it cannot be compiled.
    """
    nccl = find_nccl()
    if nccl is None:
        raise ArgumentError(
            f"no {SONAME} was found: not by {LIBRARY}, not in this Python's packages, not by the linker; "
            f"set {LIBRARY} to its path"
        )
    needs = (str(preloaded(source)), str(nccl))
    return _compiled(BY_NAME, (*FLAGS, "-Wl,--no-as-needed", *needs, f"-Wl,-rpath,{nccl.parent}"))


def find_nccl() -> Path | None:
    """NCCL's library: the one that the environment names, that of this Python's packages, or the linker's."""
    named = os.environ.get(LIBRARY)
    if named:
        path = Path(named)
        if not path.is_file():
            raise ArgumentError(f"{LIBRARY}={named}: there is no such file; set it to NCCL's {SONAME}")
        return path.absolute()
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # nvidia
        package = None
    for folder in package.submodule_search_locations or () if package else ():
        if (path := Path(folder, "lib", SONAME)).is_file():
            return path
    found = ctypes.util.find_library("nccl")
    for folder in ("/usr/lib64", "/usr/lib", f"/usr/lib/{os.uname().machine}-linux-gnu", "/usr/local/lib"):
        if found and (path := Path(folder, found)).is_file():
            return path
    return None


def nccl_version() -> str:
    """The version of the NCCL that this process has loaded; empty if that is not known."""
    try:
        told = ctypes.c_int()
        if ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(told)):
            return ""
    except (OSError, AttributeError):
        return ""
    return f"{told.value // 10000}.{told.value // 100 % 100}.{told.value % 100}"


def environment(given: Mapping[str, str], source: Path = DOOR) -> dict[str, str]:
    """The environment of a program that meets a library before NCCL; what the user has set there stays.

    Raises:
        ArgumentError: if the library cannot be compiled.
    """
    preload = ":".join(filter(None, (str(preloaded(source)), given.get("LD_PRELOAD"))))
    made = {**given, "LD_PRELOAD": preload}
    if find_nccl() is not None:
        made = {**dict.fromkeys(PATHS, str(opened_by_name(source))), **made}
    return made


def _compiled(source: Path, flags: tuple[str, ...]) -> Path:
    path, lost = built(source, flags)
    if path is None:
        raise ArgumentError(f"the library between programs and NCCL ({source.name}) cannot be compiled: {lost}")
    return path
