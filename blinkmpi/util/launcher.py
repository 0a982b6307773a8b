"""MPI's launcher: where mpirun is, and the rank and size that it tells a process before any MPI is loaded."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

# Open MPI's mpirun, PMIx (Open MPI under srun too), PMI (Hydra, srun).
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")


def launched_rank(environ: Mapping[str, str]) -> int | None:
    """The rank of this process; None if no launcher started it."""
    return next((int(environ[name]) for name in RANK_VARIABLES if environ.get(name, "").isdecimal()), None)


def launched_size(environ: Mapping[str, str]) -> int:
    """How many processes the launcher started; 1 without a launcher."""
    return max((int(environ[name]) for name in SIZE_VARIABLES if environ.get(name, "").isdecimal()), default=1)


def find_mpirun() -> str | None:
    """The launcher of this environment's MPI, else the one on PATH."""
    own = Path(sys.prefix) / "bin" / "mpirun"
    return str(own) if own.exists() else shutil.which("mpirun")
