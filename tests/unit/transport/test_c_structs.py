"""The structures that C and Python share are read as a compiler reads them."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from blinkmpi.transport.host import c_structs, native
from blinkmpi.transport.host.c_structs import fields, names

SHARED = [
    *(("call.h", name) for name in ("call_t", "node_t", "nodes_t", "blocks_t", "block_t")), *native.WITH_PYTHON,
    ("trace.h", "trace_t"),
]  # fmt: skip
COMPILER = next((name for name in ("gcc", "clang") if shutil.which(name)), "")


@pytest.mark.skipif(not COMPILER, reason="neither gcc nor clang")
def test_each_word_lies_where_the_compiler_puts_it(tmp_path: Path) -> None:
    wanted, lines = [], []
    for header, name in SHARED:

        class Read(ctypes.Structure):
            _fields_ = fields(header, name)

        wanted += [*(getattr(Read, word).offset for word in names(header, name)), ctypes.sizeof(Read)]
        lines += [*(f"offsetof({name}, {word})," for word in names(header, name)), f"sizeof({name}),"]
    headers = "".join(f'#include "{header}"\n' for header in dict.fromkeys(header for header, _ in SHARED))
    source, library = tmp_path / "offsets.c", tmp_path / "offsets.so"
    source.write_text(f"#define _GNU_SOURCE\n{headers}const int64_t at[] = {{{' '.join(lines)}}};\n")
    flags = [f"-I{c_structs.FOLDER}", f"-I{np.get_include()}", *native._python_flags(), *native.FLAGS]
    subprocess.run([COMPILER, "-w", *flags, str(source), "-o", str(library)], check=True, timeout=100)
    assert list((ctypes.c_int64 * len(wanted)).in_dll(ctypes.CDLL(str(library)), "at")) == wanted


def test_what_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LookupError, match=r"call\.h defines no structure other_t"):
        fields("call.h", "other_t")
    monkeypatch.setattr(c_structs, "FOLDER", tmp_path)
    (tmp_path / "a.h").write_text("typedef struct { int64_t a[MANY], b; } a_t;")
    with pytest.raises(LookupError, match="the constant MANY is not in the header"):
        fields("a.h", "a_t")
    (tmp_path / "b.h").write_text(
        "enum { MANY = 2 };\ntypedef struct b { /* a; b; */\n  uint64_t a[MANY], *b;\n"
        "  int (*run)(void *, int64_t);\n  struct c *next[2][MANY]; c_t each[]; } b_t;"
    )
    assert names("b.h", "b_t") == ("a[0]", "a[1]", "b", "run", *(f"next[{i}][{j}]" for i in (0, 1) for j in (0, 1)))
    assert [kind is ctypes.c_uint64 for _, kind in fields("b.h", "b_t")] == [True, True, *[False] * 6]
