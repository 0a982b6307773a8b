"""torch_extension.cpp: torch's Work, its futures, and how C reads a tensor, compiled for this torch.

Where it is not kept yet, another process compiles it (``transport/host/compiling.py``), for half a minute, and nobody
waits: calls go on through Python, which does the same. Later processes find it in the cache folder.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
import time
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CollectiveTimeout
from ..runtime.foreign import read_tensors_by
from ..transport.host.compiling import compiler
from ..transport.host.native import COMPILE_S, compiler_command, kept_library
from ..util.cache_folder import library
from ..util.settings import log, read

SOURCE = Path(__file__).with_suffix(".cpp")
NAME = SOURCE.stem
POLL_S = 0.1
ZIG = "ziglang"


class _Compiling:
    """The library on its way: a process that compiles it, then the module, or why there is none."""

    def __init__(self) -> None:
        self.module: Any = None
        self.why = ""  # said once, where it is found out
        self._child: subprocess.Popen[str] | None = None
        self._one = Lock()  # autograd's threads call, too

    def get(self, *, begin: bool) -> None:
        """Get on with it, unless another thread does."""
        if self.why or not self._one.acquire(blocking=False):
            return
        try:
            if begin:
                self.begin()
            self.look()
        finally:
            self._one.release()

    def begin(self) -> None:
        """Load the library if it is kept, else have it compiled; no more than once."""
        if self.module is not None or self.why or self._child is not None:
            return
        flags, why = flags_of()
        if why:
            self._give_up(why)
            return
        try:
            path = kept_library(SOURCE, flags)
            if path is None:
                self._child = compiler(SOURCE, flags)
        except OSError as error:
            self._give_up(f"compiling {SOURCE.name} cannot begin: {error}")
            return
        if path is not None:
            self._load(path)

    def look(self) -> None:
        """Load the library if it has been compiled meanwhile."""
        if self._child is None or self._child.poll() is None:
            return
        told, _ = self._child.communicate()
        status, self._child = self._child.returncode, None
        if status:
            self._give_up(f"compiling {SOURCE.name} failed: {told.strip().splitlines()[-1:] or status}")
        else:
            self._load(Path(told.strip()))

    def _load(self, path: Path) -> None:
        try:
            module = loaded(NAME, library(path))
            module.raises(CollectiveTimeout)
            if not isinstance(module.fits(dist.AllreduceOptions()), dist._Work):
                raise ImportError("its Work is not torch's")
        except (ImportError, OSError, TypeError, RuntimeError) as error:  # of another libstdc++, say
            self._give_up(f"{path}: {error}")
            return
        self.module = module

    def _give_up(self, why: str) -> None:
        self.why = why
        log(read(), "WARN", f"torch's calls on GPUs go through Python, which takes the host longer: {why}")


def loaded(name: str, path: Path | str) -> Any:
    """A module of C++, from its library.

    Raises:
        ImportError: if it cannot be loaded.
    """
    loader = ExtensionFileLoader(name, str(path))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


_compiling = _Compiling()


def extension(*, begin: bool = False) -> Any:
    """The module, or None while there is none.

    Args:
        begin: have it made.
    """
    if _compiling.module is None:
        _compiling.get(begin=begin)
    return _compiling.module


def wait(seconds: float = COMPILE_S) -> Any:
    """The module once it is there, for measurements and tests; None if there will be none."""
    until = time.monotonic() + seconds
    while (found := extension(begin=True)) is None and not why_none() and time.monotonic() < until:
        time.sleep(POLL_S)
    return found


def why_none() -> str:
    """Why there will be none; empty while there may be."""
    return _compiling.why


def flags_of() -> tuple[list[str], str]:
    """What the compiler needs to know of this torch and Python, and why it cannot be."""
    if ZIG in (command := compiler_command(os.environ)):
        return [], f"{shlex.join(command)} has another C++ library than torch; install g++"
    folder, python = Path(torch.__file__).parent, sysconfig.get_path("include")
    include = folder / "include"
    if lost := [path for path in (include / "torch", Path(python, "Python.h")) if not path.exists()]:
        return [], f"there is no {lost[0]}; install it"
    found = ["-O2", "-std=c++20", "-fPIC", "-shared", "-pthread", "-w"]
    found += [f"-DBLINK_TORCH={torch.__version__}"]  # by which, as by all flags, the library is kept
    found += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):  # as torch's own pybind11 was compiled, up to 2.8
        if value := getattr(torch._C, f"_PYBIND11_{name}", None):
            found.append(f'-DPYBIND11_{name}="{value}"')
    for path in (include, include / "torch" / "csrc" / "api" / "include", python):
        found += ["-isystem", str(path)]
    libraries = ("torch", "torch_cpu", "torch_python", "c10", "stdc++")
    return [*found, f"-L{folder / 'lib'}", "-Wl,--no-as-needed", *(f"-l{name}" for name in libraries)], ""


read_tensors_by(extension)
