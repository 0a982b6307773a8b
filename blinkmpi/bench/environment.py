"""Facts about where a benchmark ran: commit, hardware, versions, settings.

A fact that cannot be found is null. Of the environment only variables that concern collectives are kept, since others
may hold secrets.
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from ..util.launcher import library_name

ENVIRONMENT = (
    "BLINKMPI_", "NCCL_", "OMPI_", "UCX_", "SLURM_", "CUDA_", "PRTE_MCA_", "MPICH_", "MPIR_CVAR_", "I_MPI_",
    "TORCH_SYMM",
)  # fmt: skip
PACKAGES = ("blinkmpi", "topology", "trees", "launch")
# The launcher's own addresses and keys, inside the prefixes above, are left out too.
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|JWT|KEY|URI", re.IGNORECASE)
_FOLDERS = re.compile(r"(?<![\w.])(?:/[^\s/:,;=]+)+/")


def environment() -> list[str]:
    """``NAME=VALUE`` of the variables that concern a collective, sorted, without folders."""
    kept = {k: v for k, v in os.environ.items() if k.startswith(ENVIRONMENT) and not _SECRET.search(k)}
    return sorted(f"{k}={without_folders(v)}" for k, v in kept.items())


def without_folders(text: str) -> str:
    """``text`` with the folders of absolute paths left out: they tell of a user, not of a speed."""
    return _FOLDERS.sub(".../", text)


class Process(NamedTuple):
    """One rank: where it runs, and on what."""

    rank: int
    pid: int
    host: str
    info: str  # the name of the processor or GPU
    device: int | None = None  # the GPU's index
    bus: str = "cpu"  # the GPU's PCI address


def devices(processes: Sequence[Process]) -> list[dict[str, Any]]:
    """nccl-tests' list of devices; CPU ranks count as devices of their host."""
    hosts = [process.host for process in processes]
    numbers = [hosts[:i].count(p.host) if p.device is None else p.device for i, p in enumerate(processes)]
    return [
        {"rank": p.rank, "group": 0, "pid": p.pid, "hostname": p.host, "device": number, "device_hex": p.bus,
         "device_info": p.info}
        for p, number in zip(processes, numbers, strict=True)
    ]  # fmt: skip


def commit() -> dict[str, Any]:
    """The commit of the checkout that this package lies in, and whether the package was changed since.

    For a copy without .git, ``GIT_COMMIT`` says it, as continuous integration sets it.
    """
    root = Path(__file__).resolve().parents[2]
    unknown: dict[str, Any] = {"commit": os.environ.get("GIT_COMMIT"), "dirty": None}
    if not (root / ".git").exists():
        return unknown
    try:
        head, status = (
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=10)
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", *PACKAGES])
        )
    except (OSError, subprocess.SubprocessError):
        return unknown
    return {"commit": head.stdout.strip(), "dirty": bool(status.stdout.strip())}


def cpu_model() -> str | None:
    """The processor's name."""
    found = re.search(r"^(?:model name|Model|cpu)\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or None


def memory(field: str) -> int | None:
    """A field of /proc/meminfo in bytes."""
    found = re.search(rf"^{field}:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def hardware() -> dict[str, Any]:
    """What this host is."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_model(),
        "cores_available": cores,
        "memory_bytes": memory("MemTotal"),
        "kernel": platform.release(),
        "architecture": platform.machine(),
    }


def nvidia_driver() -> str | None:
    """The version of NVIDIA's kernel driver."""
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", _read("/proc/driver/nvidia/version"))
    return found[1] if found else None


def mpi_library(mpi: Any) -> str:
    """What the MPI behind mpi4py's module calls itself."""
    return library_name(str(mpi.Get_library_version()))


def versions(mpi_library: str, executor: str | None, *, gpu: bool = False) -> dict[str, Any]:
    """Everything whose version may change a number."""
    found: dict[str, Any] = {"python": sys.version.split()[0]}
    for package in ("blinkmpi", "numpy", "mpi4py", "ml_dtypes", *(("torch",) if gpu else ())):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return {**found, "mpi": mpi_library, "executor": executor}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
