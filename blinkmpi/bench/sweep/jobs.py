"""One run of a sweep: the machines, the launcher's line for some of them, and the job itself, with a time limit."""

import glob
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ArgumentError, BlinkError
from ...launch.allocation import Scheduler, allocation, scheduler_of
from ...launch.command import Job, Launcher, Pmi, command, exported, mpi_of
from ...launch.hostfile import Host, read_for
from ...topology.probe import Nvml
from ...util.codec import Value
from ...util.files import read_json
from ...util.launcher import END_SECONDS, find_mpirun, run_limited
from ...util.settings import read as read_settings
from ...util.text import whole_number
from .file import Resources, Run, Sweep

GIVEN = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "PBS_NODEFILE", "LSB_MCPU_HOSTS", "LSB_DJOB_HOSTFILE")
FILE_SECONDS = 10.0  # after which a file written on another machine must be seen here
NOISE = re.compile(r"^[\s\-=*#]*$|^(prterun|mpirun|srun|mpiexec)\b.*(detected|noticed|exited)|^Primary job|"
                   r"^\s*(Process name|Exit code):|slurmstepd|^with errorcode|^\s*a non-zero exit")  # fmt: skip


class Machines(Value, frozen=True):
    """Where the runs of a sweep go, and what starts them."""

    hosts: tuple[Host, ...]  # () for this machine
    scheduler: Scheduler | None
    allocated: bool  # the hosts are the scheduler's
    launcher: Launcher
    pmi: Pmi
    mpirun: str
    gpus: int | None  # of each node, as far as somebody said so
    resources: Resources


class RunOutcome(NamedTuple):
    """How a run ended: its document, or the line that says why there is none."""

    document: dict[str, Any] | None
    error: str | None
    seconds: float


def machines(
    sweep: Sweep, environ: Mapping[str, str], library: str, *, hostfile: str | None = None,
    launcher: Launcher | None = None,
) -> Machines:  # fmt: skip
    """Find the machines: a hostfile's, the scheduler's, or this one.

    Args:
        library: what the MPI that mpi4py has says of its version.
        hostfile, launcher: instead of the sweep's own.

    Raises:
        BlinkError: for a hostfile or variables that cannot be read, or an MPI that is not known.
    """
    launcher, pmi, mpirun = _launcher(launcher or sweep.launcher, library)
    file = hostfile or sweep.hostfile
    hosts: tuple[Host, ...] = ()
    allocated = False
    if file is not None:
        hosts, _ = read_for(file, "openmpi" if launcher == "openmpi" else "hydra")
    elif any(environ.get(name) for name in GIVEN):
        hosts, allocated = allocation(environ).hosts, True
    gpus, seen = sweep.gpus_per_node, sweep.gpus_per_node
    if gpus is None:
        count = environ.get("SLURM_GPUS_ON_NODE", "")
        gpus = whole_number(count)
        seen = gpus if gpus is not None else _gpus_here(environ)
    resources = Resources(max(1, len(hosts)), _slots(hosts, sweep, seen or 0), bool(seen), local=not hosts)
    return Machines(hosts, scheduler_of(environ), allocated, launcher, pmi, mpirun, gpus or None, resources)


def _launcher(asked: Launcher | None, library: str) -> tuple[Launcher, Pmi, str]:
    if asked is None:
        return (*mpi_of(library), find_mpirun() or "mpirun")
    return asked, mpi_of(library)[1] if asked == "srun" else "pmix", "srun" if asked == "srun" else "mpirun"


def _gpus_here(environ: Mapping[str, str]) -> int:
    """GPUs of this node; the others are taken to have as many."""
    if read_settings(environ).gpu_disable:
        return 0
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    return len(Nvml().buses()) if shown is None else len([word for word in shown.split(",") if word.strip()])


def _slots(hosts: tuple[Host, ...], sweep: Sweep, gpus: int) -> int:
    """The ranks that each node takes: the fewest slots of a host, and at most one rank for each GPU."""
    unknown = [host.name for host in hosts if host.slots is None]
    if unknown and not sweep.ranks_per_node:
        raise ArgumentError(f"{unknown[0]}: how many ranks? Give ranks_per_node in the sweep, or slots in the hostfile")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(sweep.ranks_per_node, default=1)
    slots = min((host.slots or most for host in hosts), default=cores if not gpus or sweep.memory == "host" else gpus)
    return min(slots, gpus) if gpus and sweep.memory != "host" else slots


def line(run: Run, on: Machines, output: str, environ: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command line of a run, and its environment.

    Raises:
        ArgumentError: for a job that cannot be started so.
    """
    env = {**environ, "BLINKMPI_NODES": run.virtual, **run.env}
    if not run.virtual:
        del env["BLINKMPI_NODES"]  # real nodes are what the run says that they are
    hosts = on.hosts[: 1 if run.virtual else run.nodes]
    ppn = run.ranks // len(hosts) if hosts else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not hosts and on.launcher == "openmpi" and run.ranks > cores:
        hosts = (Host("localhost", run.ranks),)  # a slot for each, or Open MPI refuses them
    program = (sys.executable, "-m", "blinkmpi", "bench", *run.words, "-J", output)
    job = Job(
        program=program, ranks=run.ranks, hosts=hosts, ppn=ppn, gpus=on.gpus if run.memory != "host" else None,
        bind=run.bind, variables=exported(env, extra=sorted(run.env), allocated=on.allocated), scheduler=on.scheduler,
        allocated=False, pmi=on.pmi,  # some of the scheduler's hosts: they are named
    )  # fmt: skip
    try:
        return command(job, on.launcher, mpirun=on.mpirun).argv, env
    except BlinkError as error:
        raise ArgumentError(f"{run.label()}: {error}") from error


def start(argv: tuple[str, ...], env: Mapping[str, str], output: Path, seconds: float, *, ranks: int) -> RunOutcome:
    """Run a job to its end, or end it when its time is over; nothing of it stays behind.

    ``MPIEXEC_TIMEOUT`` is the launcher's own limit, should this process not live to see it.
    """
    clear(output)
    began = time.monotonic()
    limit = {"MPIEXEC_TIMEOUT": str(int(seconds + 2 * END_SECONDS))}
    try:
        code, text = run_limited(argv, {**limit, **env}, seconds)
    except OSError as error:
        raise ArgumentError(f"cannot start {argv[0]!r}: {error.strerror}; install this MPI, load its module, or "
                            "name another launcher in the sweep") from error  # fmt: skip
    took = time.monotonic() - began
    if code is None:
        return RunOutcome(None, f"no end within {seconds:g} s", took)
    document, why = _document(output, patient=code == 0)
    worlds = len(list(output.parent.glob(f"{glob.escape(output.name)}*")))
    clear(output)
    if code != 0:
        return RunOutcome(document, f"exit status {code}: {last_words(text)}", took)
    if document is None:
        return RunOutcome(None, f"{why}: {last_words(text)}", took)
    if document["blinkmpi"]["ranks"] != ranks:
        found = f"{worlds} worlds of {document['blinkmpi']['ranks']} ranks instead of one of {ranks}"
        why = "the launcher does not fit the MPI that mpi4py has; try another --launcher"
        return RunOutcome(None, f"{found}: {why}", took)
    return RunOutcome(document, None, took)


def clear(output: Path) -> None:
    """Remove what a run wrote; ranks that are worlds of their own write a file each."""
    for found in output.parent.glob(f"{glob.escape(output.name)}*"):
        found.unlink(missing_ok=True)


def _document(output: Path, *, patient: bool) -> tuple[dict[str, Any] | None, str | None]:
    """The JSON that a run wrote, or why there is none; a shared file system may show it late."""
    end = time.monotonic() + (FILE_SECONDS if patient else 0.0)
    while not output.exists() and time.monotonic() < end:
        time.sleep(0.1)
    try:
        found = read_json(output)
        return {**found, "results": list(found["results"]), "blinkmpi": {"ranks": 0, **found["blinkmpi"]}}, None
    except OSError:
        return None, "it wrote no JSON; the results must lie where every node can write"
    except (ValueError, KeyError, TypeError) as error:
        return None, f"what it wrote is no result ({error})"


def last_words(text: str) -> str:
    """The line of a failed job that says most: our error, else the last that is none of the launcher's frame."""
    lines = [line.strip() for line in text.splitlines() if not NOISE.search(line)]
    ours = [line for line in lines if line.startswith("blinkmpi: error:")]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Timeout|Lost|Exception): ", line)]
    for found in (ours, raised, lines):
        if found:
            return found[-1][:500]
    return "it said nothing"
