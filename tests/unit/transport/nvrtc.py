"""CUDA's compiler without a GPU: NVRTC's wheels from PyPI through ctypes, with what ptxas says of registers."""

import ctypes
import importlib.util
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from blinkmpi.transport.cuda.kernels.compiler import OPTIONS

LIBRARIES = {12: "cuda_nvrtc/lib/libnvrtc.so.12", 13: "cu13/lib/libnvrtc.so.13"}  # in the namespace package nvidia
USED = re.compile(
    r"Function properties for (\w+)\n[^\n]*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r"\n[^\n]*Used (\d+) registers"
)


@dataclass(frozen=True)
class Used:
    """What an entry function takes."""

    registers: int
    stack: int
    spilled: int
    fused: int  # multiply-adds of floats in the whole source: each rounds once where two operations round twice


@cache
def library(version: int) -> Any:
    """NVRTC of a CUDA version; skips the test where its wheel is not installed."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        if (path := Path(folder) / LIBRARIES[version]).exists():
            for builtins in path.parent.glob("libnvrtc-builtins.so*"):
                ctypes.CDLL(str(builtins))  # 13.0 does not look for it beside itself
            return ctypes.CDLL(str(path))
    return pytest.skip(f"NVRTC {version} is not installed: pip install 'blinkmpi[test]' on Linux")


def compiled(source: str, arch: str, *, version: int = 13) -> dict[str, Used]:
    """Compile for an architecture as ``Gpu.compile`` does; what each kernel takes.

    Raises:
        AssertionError: with the compiler's words.
    """
    nvrtc = library(version)
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"blinkmpi.cu", 0, None, None) == 0
    options = [o.encode() for o in (*OPTIONS, f"-arch={arch}", "--ptxas-options=-v")]
    code = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, text)
    log = text.value.decode()
    assert code == 0, f"NVRTC {version} for {arch}: {log}"
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    fused = len(re.findall(rb"fma\.rn(?:\.ftz)?\.f(?:32|64)", ptx.value))
    rows = {name: tuple(map(int, numbers)) for name, *numbers in USED.findall(log)}
    return {name: Used(registers, stack, out + back, fused) for name, (stack, out, back, registers) in rows.items()}


def all_compiled(sources: Sequence[str], arch: str, *, version: int = 13) -> list[dict[str, Used]]:
    """As :func:`compiled`, for several at once: the compiler runs on every core."""
    library(version)  # skips here, and not in a thread
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda source: compiled(source, arch, version=version), sources))
