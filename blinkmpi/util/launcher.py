"""MPI's launcher: where mpirun is, what it tells a process before any MPI is loaded, and jobs with a time limit."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .text import whole_number

# Open MPI's mpirun, PMIx (Open MPI under srun too), PMI (Hydra, srun).
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
END_SECONDS = 10.0  # that a launcher has to end its ranks


def launched_rank(environ: Mapping[str, str]) -> int | None:
    """The rank of this process; None if no launcher started it."""
    found = (whole_number(environ.get(name, "")) for name in RANK_VARIABLES)
    return next((rank for rank in found if rank is not None), None)


def launched_size(environ: Mapping[str, str]) -> int:
    """How many processes the launcher started; 1 without a launcher."""
    found = [whole_number(environ.get(name, "")) for name in SIZE_VARIABLES]
    return max((size for size in found if size is not None), default=1)


def outlives_ranks(environ: Mapping[str, str]) -> bool:
    """Whether the job goes on when a rank dies, as under Open MPI's ``mpirun --with-ft ulfm``, which sets this."""
    return environ.get("OMPI_MCA_mpi_ft_enable") in ("1", "true")


def library_name(text: str) -> str:
    """An MPI library in one line, name and version, from what it says of itself (``MPI_Get_library_version``).

    Open MPI goes on after a comma, MPICH with lines about its build.
    """
    line = next(iter(text.strip("\0\n ").splitlines()), "").partition(",")[0]
    return re.sub(r"^(\S+) +Version *:\s*", r"\1 ", line).strip()


def find_mpirun() -> str | None:
    """The launcher of this environment's MPI, else the one on PATH."""
    own = Path(sys.prefix) / "bin" / "mpirun"
    return str(own) if own.exists() else shutil.which("mpirun")


def run_limited(
    argv: Sequence[str], env: Mapping[str, str], seconds: float, *, grace: float = END_SECONDS
) -> tuple[int | None, str]:
    """Run a command in a session of its own; its exit status (None: it was ended after ``seconds``) and its output.

    It gets ``grace`` seconds to end what it has started itself; then its session is killed.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                   start_new_session=True)  # fmt: skip
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return code, log.read().decode(errors="replace")
