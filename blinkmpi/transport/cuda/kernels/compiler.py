"""The kernels' sources, and the machine code that NVRTC makes of them, which is kept on disk.

NVRTC is called directly, and not by CuPy's ``RawModule``: that appends ``-ftz=true``, so that numbers too small for a
normal float32 become zero, which they are neither to the host nor to NCCL.
"""

import hashlib
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from ....errors import DeviceError, SettingsError
from ....util.cache_folder import cache_dir, make_folder, put, read_kept, sealed, unsealed, why_not_trusted

KERNELS = Path(__file__).parent
INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
OPTIONS = ("-std=c++17", "-default-device")  # version 12 takes a generic lambda for host code otherwise


@cache
def kernel_source(name: str) -> str:
    """The text of one of the files in this folder, with each header that it includes, once."""
    included: set[str] = set()

    def text(file: str) -> str:
        if file in included:
            return ""
        included.add(file)
        return INCLUDE.sub(lambda found: text(found[1]), (KERNELS / file).read_text(encoding="utf-8"))

    return text(name)


@cache
def kernels_digest() -> str:
    """A few characters that differ if the kernels' sources do."""
    files = sorted(path for path in KERNELS.iterdir() if path.suffix in (".cu", ".cuh"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def machine_code(nvrtc: Any, source: str, capability: tuple[int, int]) -> bytes:
    """What the driver loads for a GPU of this compute capability: as it was kept, or compiled now.

    For a GPU that this NVRTC does not know it is PTX for the next older one, which the driver translates.

    Args:
        nvrtc: CuPy's module of that name.

    Raises:
        DeviceError: with the compiler's messages.
    """
    wanted, known = capability[0] * 10 + capability[1], nvrtc.getSupportedArchs()
    older = max((arch for arch in known if arch <= wanted), default=min(known))
    arch = f"sm_{wanted}" if wanted in known else f"compute_{older}"
    options = (*OPTIONS, f"-arch={arch}")
    key = hashlib.sha256("\n".join([source, *options, str(nvrtc.getVersion())]).encode()).hexdigest()
    path: Path | None = None
    try:
        path = cache_dir() / "kernels" / key
        if (kept := _kept(path)) is not None:
            return kept
    except (SettingsError, OSError) as error:
        _say(path, error)
        path = None
    code = _compiled(nvrtc, source, options, ptx=wanted not in known)
    if path is not None:
        try:
            _keep(path, code)
        except OSError as error:
            _say(path, error)
    return code


def _compiled(nvrtc: Any, source: str, options: tuple[str, ...], *, ptx: bool) -> bytes:
    program = nvrtc.createProgram(source, "blinkmpi.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getPTX(program).encode() + b"\0" if ptx else nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise DeviceError(f"{error}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def _kept(path: Path) -> bytes | None:
    """The code in a file, if it is there, whole, and this user's.

    Raises:
        OSError: if it cannot be read, or others may write into its folder.
    """
    if why := why_not_trusted(path.parent) if path.parent.exists() else "":
        raise OSError(why)
    try:
        return unsealed(read_kept(path))
    except (FileNotFoundError, PermissionError):
        return None  # what is kept next takes its place


def _keep(path: Path, code: bytes) -> None:
    make_folder(path.parent)
    put(path, sealed(code))


def _say(path: Path | None, error: Exception) -> None:
    """Say it once in a process, though each kernel meets it."""
    why = getattr(error, "strerror", None) or error
    where = f"in {path.parent} ({why}); set BLINKMPI_CACHE_DIR" if path else f"({why})"
    warnings.warn(f"kernels are compiled anew by each process, as they cannot be kept {where}", RuntimeWarning, 1)
