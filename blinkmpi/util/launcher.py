"""What launchers tell the processes that they start, before any MPI is loaded: rank and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping

# Open MPI's mpirun, PMIx (Open MPI under srun too), PMI (Hydra, srun).
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")


def launched_rank(environ: Mapping[str, str]) -> int | None:
    """The rank of this process; None if no launcher started it."""
    return next((int(environ[name]) for name in RANK_VARIABLES if environ.get(name, "").isdecimal()), None)


def launched_size(environ: Mapping[str, str]) -> int:
    """How many processes the launcher started; 1 without a launcher."""
    return max((int(environ[name]) for name in SIZE_VARIABLES if environ.get(name, "").isdecimal()), default=1)
