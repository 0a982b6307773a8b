"""Start jobs: host files, allocations of schedulers, and the command lines of launchers.

``hostfile``    reads, writes and converts the dialects of Open MPI and Hydra
``allocation``  reads what Slurm, PBS and LSF say in the environment
``command``     writes the command line that starts the ranks
``pmi``         what MPICH asks of a launcher, where torchrun started the ranks: a server, run as a process of its own

The job scripts ``slurm.sbatch`` and ``pbs.sh`` are here too. Nothing here starts a process or touches MPI.
"""
