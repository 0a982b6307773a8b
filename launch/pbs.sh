#!/bin/bash
# Training, or a sweep of the benchmark, on all nodes of a PBS job. Submit it from the folder of your program.
#
#   qsub launch/pbs.sh                                                 # trains: python examples/train.py
#   qsub -v PROGRAM="python my_training.py" launch/pbs.sh              # trains; the words are split at spaces
#   qsub -v SWEEP=benchmarks/sweeps/quick.toml launch/pbs.sh           # a sweep: results/quick.json
#   qsub -l select=4:ncpus=16:mpiprocs=4:ngpus=4 -v GPUS=4 launch/pbs.sh
#
# A sweep that ran out of time continues where it stopped: submit it again. (Where qsub can pass arguments to a script,
# like Torque's -F, they are the same as for slurm.sbatch: sweep FILE.toml, or a program.)
#
# EDIT these lines for your site, or pass them to qsub, which overrides them. mpiprocs: ranks on each node.
#PBS -N blinkmpi
#PBS -j oe
#PBS -l select=2:ncpus=32:mpiprocs=8:ngpus=8
#PBS -l place=scatter:excl
#PBS -l walltime=01:00:00
##PBS -q gpu
##PBS -A project
set -euo pipefail

: "${PBS_NODEFILE:?start this with qsub}"
cd "${PBS_O_WORKDIR:-.}"

# EDIT: the environment with blinkmpi, the modules that it needs, the MPI (openmpi, mpich or intel; empty for the one of
# mpi4py), and the number of GPUs of each node.
# module load openmpi
VENV=${VENV:-.venv}
LAUNCHER=${LAUNCHER:-}
GPUS=${GPUS:-}
RESULTS=${RESULTS:-results}
tasks=$(grep -c . "$PBS_NODEFILE") # one line for each process

if [ -f "$VENV/bin/activate" ]; then
    # shellcheck source=/dev/null
    source "$VENV/bin/activate"
fi

flags=(--from-env -np "$tasks")
own=()
if [ -n "$LAUNCHER" ]; then
    flags+=(--mpi "$LAUNCHER")
    own+=(--launcher "$LAUNCHER")
fi
if [ -n "$GPUS" ]; then
    flags+=(--gpus-per-node "$GPUS")
fi

# Prints the command line that it runs; "blinkmpi launch" without --run only shows it, with the reason of each flag.
launch() {
    blinkmpi launch "${flags[@]}" --run -- "$@"
}

# With a launcher of another MPI, every rank is alone in a world of size 1, and the program would silently run N times.
launch python -c '
import sys
from mpi4py import MPI
size, want = MPI.COMM_WORLD.size, int(sys.argv[1])
if size != want:
    sys.exit(f"the world has {size} ranks, the job {want} tasks: the launcher does not fit this MPI; "
             "try LAUNCHER=openmpi, mpich or intel, and see blinkmpi doctor")
' "$tasks"

if [ "${1:-}" = sweep ]; then
    SWEEP=${2:?which sweep? give its TOML file}
fi
if [ -n "${SWEEP:-}" ]; then
    mkdir -p "$RESULTS"
    # One process on the first node, which starts the ranks of each run itself.
    blinkmpi bench --sweep "$SWEEP" "${own[@]}" -J "$RESULTS/$(basename "$SWEEP" .toml).json"
elif [ -n "${PROGRAM:-}" ]; then
    read -r -a program <<<"$PROGRAM"
    launch "${program[@]}"
elif [ "$#" -gt 0 ]; then
    launch "$@"
else
    launch python examples/train.py
fi
