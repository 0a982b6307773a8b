"""The headers of the C executor: each compiles by itself, without a warning, so it names all that it needs."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from blinkmpi.transport.host import native

HEADERS = [path for path in native.SOURCES if path.suffix == ".h"]
WITHOUT_PYTHON = ("call.h", "stages.h", "meeting.h", "blocks.h", "node_messages.h", "step_times.h", "single_copy.h")
COMPILER = next((name for name in ("gcc", "clang") if shutil.which(name)), "")


@pytest.mark.skipif(not COMPILER, reason="neither gcc nor clang")
@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_a_header_compiles_by_itself(header: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone.c"
    alone.write_text(f'#define _GNU_SOURCE\n#include "{header.name}"\nint nothing;\n')
    python = [] if header.name in WITHOUT_PYTHON else [*native._python_flags(), f"-I{np.get_include()}"]
    flags = ["-fsyntax-only", "-Wall", "-Wno-unused-function", "-Wno-unused-variable", "-march=native"]
    command = [COMPILER, *flags, *python, f"-I{header.parent}", str(alone)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
