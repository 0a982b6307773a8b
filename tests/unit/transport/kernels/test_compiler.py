"""Machine code of kernels: what the compiler is told, and what is kept on disk; by NVRTC's wheel, without a GPU."""

import ctypes
import os
import warnings
from pathlib import Path

import pytest

from blinkmpi.errors import DeviceError
from blinkmpi.transport.cuda.kernels.compiler import machine_code
from tests.unit.transport.nvrtc import library

SOURCE = 'extern "C" __global__ void add(float* a, float b) { *a = *a + b < b ? *a / b : *a * b; }'
HERE, NEWER = (9, 0), (99, 0)


class NVRTCError(Exception):
    """What CuPy's module raises."""


class Nvrtc:
    """CuPy's module ``nvrtc``, as far as it is used."""

    NVRTCError = NVRTCError

    def __init__(self) -> None:
        self._nvrtc, self.compiled = library(13), 0

    def getVersion(self) -> tuple[int, int]:
        return 13, 0

    def getSupportedArchs(self) -> list[int]:
        return [80, 90, 100]

    def createProgram(self, source: str, name: str, headers: tuple[()], names: tuple[()]) -> int:
        program = ctypes.c_void_p()
        self._nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        return program.value or 0

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        self.compiled += 1
        texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if code := self._nvrtc.nvrtcCompileProgram(ctypes.c_void_p(program), len(options), texts):
            raise NVRTCError(code)

    def getProgramLog(self, program: int) -> str:
        return self._text("ProgramLog", program)[:-1].decode()

    def getPTX(self, program: int) -> str:
        return self._text("PTX", program)[:-1].decode()

    def getCUBIN(self, program: int) -> bytes:
        return self._text("CUBIN", program)

    def destroyProgram(self, program: int) -> None:
        self._nvrtc.nvrtcDestroyProgram(ctypes.byref(ctypes.c_void_p(program)))

    def _text(self, what: str, program: int) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._nvrtc, f"nvrtcGet{what}Size")(ctypes.c_void_p(program), ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        getattr(self._nvrtc, f"nvrtcGet{what}")(ctypes.c_void_p(program), found)
        return found.raw


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLINKMPI_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


def test_small_numbers_are_not_made_zero(folder: Path) -> None:
    code = machine_code(Nvrtc(), SOURCE, NEWER)
    assert b".target sm_100" in code, "of the newest GPU that this NVRTC knows, for the driver to translate"
    assert b".target sm_80" in machine_code(Nvrtc(), SOURCE, (8, 7)), "of the next older one"
    assert b"add.f32" in code or b"add.rn.f32" in code
    assert b".ftz" not in code
    assert code.endswith(b"\0")


def test_code_is_kept(folder: Path) -> None:
    nvrtc = Nvrtc()
    code = machine_code(nvrtc, SOURCE, HERE)
    assert code.startswith(b"\x7fELF")
    assert machine_code(nvrtc, SOURCE, HERE) == code
    assert nvrtc.compiled == 1
    machine_code(nvrtc, SOURCE, (8, 0))
    assert (nvrtc.compiled, len(list(folder.iterdir()))) == (2, 2), "of another GPU"


@pytest.mark.parametrize("spoilt", ["shortened", "changed", "another user's"])
def test_what_is_not_whole_or_not_ours_is_made_anew(folder: Path, spoilt: str) -> None:
    nvrtc = Nvrtc()
    code = machine_code(nvrtc, SOURCE, HERE)
    (file,) = folder.iterdir()
    if spoilt == "shortened":
        file.write_bytes(file.read_bytes()[:-1])
    elif spoilt == "changed":
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    else:
        file.chmod(0o666)
    assert machine_code(nvrtc, SOURCE, HERE) == code
    assert nvrtc.compiled == 2
    assert machine_code(nvrtc, SOURCE, HERE) == code
    assert nvrtc.compiled == 2, "the new one is kept"


def test_where_nothing_can_be_kept_it_says_so_and_goes_on(folder: Path) -> None:
    folder.write_text("no folder")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        code = machine_code(Nvrtc(), SOURCE, HERE)
        machine_code(Nvrtc(), SOURCE, (8, 0))
    (one,) = said  # once, though there were two
    assert "compiled anew by each process, as they cannot be kept in" in str(one.message)
    assert "set BLINKMPI_CACHE_DIR" in str(one.message)
    folder.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert machine_code(Nvrtc(), SOURCE, HERE) == code


def test_a_folder_that_others_can_write_is_not_trusted(folder: Path) -> None:
    nvrtc = Nvrtc()
    machine_code(nvrtc, SOURCE, HERE)
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=r"compiled anew by each process.*can be written by everybody"):
        machine_code(nvrtc, SOURCE, HERE)
    assert nvrtc.compiled == 2


def test_an_error_has_the_compilers_words(folder: Path) -> None:
    with pytest.raises(DeviceError, match="nonsense"):
        machine_code(Nvrtc(), "nonsense", HERE)
    assert not folder.exists() or not os.listdir(folder)
