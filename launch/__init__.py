"""What surrounds a job: the files and command lines of the launchers.

``hostfile`` reads, writes and converts the dialects of Open MPI and Hydra, ``allocation`` reads what Slurm, PBS and LSF
say in the environment, ``command`` writes the line that starts the ranks. Beside them lie job scripts, ``slurm.sbatch``
and ``pbs.sh``. Nothing here starts a process or touches MPI; imports come from ``errors``, ``codec`` and ``topology``
alone.
"""
