#!/bin/bash
# Training, or a sweep of the benchmark, on all nodes of a PBS job. Submit it from the folder of your program.
#
#   qsub launch/pbs.sh                                                 # trains: python examples/train.py
#   qsub -v PROGRAM="python my_training.py" launch/pbs.sh              # trains; the words are split at blanks
#   qsub -v SWEEP=benchmarks/sweeps/quick.toml launch/pbs.sh           # a sweep: results/quick.json
#   qsub -l select=4:ncpus=16:mpiprocs=4:ngpus=4 -v GPUS=4 launch/pbs.sh
#
# A sweep that ran out of time goes on where it stopped: submit it again. (Where qsub gives a script arguments, as
# Torque's -F does, they are read as slurm.sbatch reads them: sweep FILE.toml, or a program.)
#
# EDIT these lines for your site, or give them to qsub, which wins. mpiprocs is the number of ranks on each node.
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

# EDIT: the environment with blinkmpi, modules that it needs, the MPI (openmpi, mpich or intel; without it, the one that
# mpi4py has), and how many GPUs each node has.
# module load openmpi
VENV=${VENV:-.venv}
LAUNCHER=${LAUNCHER:-}
GPUS=${GPUS:-}
RESULTS=${RESULTS:-results}
tasks=$(grep -c . "$PBS_NODEFILE") # a line for each process

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

# Prints the line that it runs; "blinkmpi launch" without --run only shows it, with the reason of each flag.
launch() {
    blinkmpi launch "${flags[@]}" --run -- "$@"
}

# A launcher and an MPI that do not belong together start ranks that are each alone in a world of size 1, and a program
# would run there N times without a word.
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
    # One process, here on the first node: it starts the ranks of each run itself.
    blinkmpi bench --sweep "$SWEEP" "${own[@]}" -J "$RESULTS/$(basename "$SWEEP" .toml).json"
elif [ -n "${PROGRAM:-}" ]; then
    read -r -a program <<<"$PROGRAM"
    launch "${program[@]}"
elif [ "$#" -gt 0 ]; then
    launch "$@"
else
    launch python examples/train.py
fi
