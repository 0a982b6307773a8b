#!/bin/bash
# A program, or a sweep of the benchmark, on all ranks of a PBS job.
#
#   qsub launch/pbs.sh                                       # the sweep: results/*.json
#   qsub -v PROGRAM="python examples/train.py" launch/pbs.sh # a program; its words are split at blanks
#   qsub -l select=4:ncpus=16:mpiprocs=4:ngpus=4 -v GPUS=4 launch/pbs.sh
#
# VENV names the environment with blinkmpi (.venv), LAUNCHER the MPI: openmpi, mpich or intel (without it, the one that
# mpi4py has), GPUS how many each node has.
#
#PBS -N blinkmpi
#PBS -j oe
#PBS -l select=2:ncpus=32:mpiprocs=8:ngpus=8
#PBS -l place=scatter:excl
#PBS -l walltime=01:00:00
set -euo pipefail

: "${PBS_NODEFILE:?start this with qsub}"
cd "${PBS_O_WORKDIR:-.}"
VENV=${VENV:-.venv}
RESULTS=${RESULTS:-results}
tasks=$(grep -c . "$PBS_NODEFILE") # a line for each process

if [ -f "$VENV/bin/activate" ]; then
    # shellcheck source=/dev/null
    source "$VENV/bin/activate"
fi

flags=(--from-env -np "$tasks")
if [ -n "${LAUNCHER:-}" ]; then
    flags+=(--mpi "$LAUNCHER")
fi
if [ -n "${GPUS:-}" ]; then
    flags+=(--gpus-per-node "$GPUS")
fi

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

if [ -n "${PROGRAM:-}" ]; then
    read -r -a program <<<"$PROGRAM"
    launch "${program[@]}"
    exit
fi

mkdir -p "$RESULTS"
for collective in all_reduce broadcast reduce all_gather reduce_scatter; do
    launch blinkmpi bench "$collective" -b 1K -e "${LARGEST:-256M}" -f 4 --compare mpi \
        -J "$RESULTS/$collective-${PBS_JOBID:-0}.json"
done
