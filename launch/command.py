"""The command line that starts the ranks, for each launcher, and the reason of each of its words.

Pure: a :class:`Job` and a launcher's name give a :class:`Command`. Nothing is looked up or started.
"""

import re
from collections.abc import Iterable
from typing import Literal, get_args

from ..errors import ArgumentError
from ..util.codec import Value
from .allocation import Scheduler
from .hostfile import Host

Launcher = Literal["openmpi", "mpich", "intel", "srun"]
Binding = Literal["none", "core", "numa"]
Pmi = Literal["pmix", "pmi2"]

LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
BINDINGS: tuple[Binding, ...] = get_args(Binding)
PMIS: tuple[Pmi, ...] = get_args(Pmi)

PREFIXES = ("BLINKMPI_", "NCCL_", "CUDA_", "FI_", "I_MPI_", "MPICH_", "UCX_")
NAMES = ("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PATH", "PYTHONPATH")  # without these, Python differs on other machines
VISIBLE = "CUDA_VISIBLE_DEVICES"

_NAMED = "only these variables of this shell reach the ranks on other machines"
_KNOWN: tuple[tuple[str, Launcher, Pmi], ...] = (
    (r"Open MPI|OpenRTE|PRRTE", "openmpi", "pmix"),
    (r"Intel\(R\) MPI", "intel", "pmi2"),  # its mpirun is a Hydra too
    (r"MPICH|MVAPICH|HYDRA", "mpich", "pmi2"),
)


class Job(Value, frozen=True):
    """The job to start.

    ``hosts`` is empty for this machine, or for the scheduler's allocation. ``hostfile`` holds the same hosts in the
    launcher's dialect. ``allocated``: the hosts are the scheduler's own. ``pmi`` is for srun only.
    """

    program: tuple[str, ...]
    ranks: int
    hosts: tuple[Host, ...] = ()
    hostfile: str = ""
    ppn: int | None = None
    gpus: int | None = None  # of each node, one for each rank
    bind: Binding = "none"
    variables: tuple[str, ...] = ()
    scheduler: Scheduler | None = None
    allocated: bool = False
    pmi: Pmi = "pmix"

    @property
    def per_node(self) -> int | None:
        """Ranks of each node, at most one for each GPU; None if they differ or the launcher decides."""
        if self.ppn is not None or self.gpus is None:
            return self.ppn
        slots = {host.slots or self.gpus + 1 for host in self.hosts}  # a host without a count is cut to its GPUs too
        if slots and max(slots) <= self.gpus:
            return slots.pop() if len(slots) == 1 else None
        return self.gpus

    def check(self) -> None:
        """Raise ArgumentError if the job cannot be started as it is."""
        if not self.program:
            raise ArgumentError("no program; write it after --: -- python train.py")
        for name, number in (("-np", self.ranks), ("--ppn", self.ppn), ("--gpus-per-node", self.gpus)):
            if number is not None and number < 1:
                raise ArgumentError(f"{name} {number}: expected at least 1; correct it")
        if self.gpus is not None and self.ppn is not None and self.ppn > self.gpus:
            raise ArgumentError(
                f"--ppn {self.ppn}: a node has {self.gpus} GPUs, and a rank takes one; give --ppn {self.gpus} or fewer"
            )
        k = self.per_node
        for host in self.hosts:
            if k is not None and host.slots is not None and k > host.slots:
                raise ArgumentError(f"{k} ranks on each node: {host.name} has {host.slots} slots; give --ppn "
                                    f"{host.slots}, or more slots in the hostfile or from the scheduler")  # fmt: skip
        room = sum(k or host.slots or self.ranks for host in self.hosts)
        if self.hosts and room < self.ranks:
            raise ArgumentError(f"-np {self.ranks}: {len(self.hosts)} hosts take {room} ranks; "
                                "give fewer ranks, more hosts, or more on each")  # fmt: skip


class ArgumentGroup(Value, frozen=True):
    """Words of a command line that belong together, and their reason."""

    words: tuple[str, ...]
    why: str


class Command(Value, frozen=True):
    """A command line in parts."""

    parts: tuple[ArgumentGroup, ...]

    @property
    def argv(self) -> tuple[str, ...]:
        """The words for exec."""
        return tuple(word for part in self.parts for word in part.words)


def mpi_of(text: str) -> tuple[Launcher, Pmi]:
    """The launcher, and srun's plugin, for the version text of an MPI: the library's or that of ``mpirun --version``.

    Raises:
        ArgumentError: for an MPI that is not known here.
    """
    for pattern, launcher, pmi in _KNOWN:
        if re.search(pattern, text) and "CRAY" not in text:
            return launcher, pmi
    first = (text.strip().splitlines() or [""])[0]
    raise ArgumentError(f"cannot tell which MPI this is: {first!r}; say so with --mpi {'|'.join(LAUNCHERS)}")


def exported(environ: Iterable[str], *, extra: Iterable[str] = (), allocated: bool = False) -> tuple[str, ...]:
    """The names of the variables that every rank needs, sorted.

    A scheduler numbers a job's GPUs separately on each node, so CUDA_VISIBLE_DEVICES of one node is wrong for others.

    Raises:
        ArgumentError: for an ``extra`` name that is not set.
    """
    there = set(environ)
    for name in extra:
        if name not in there:
            raise ArgumentError(f"-x {name}: there is no such variable here; set it first")
    found = {name for name in there if name.startswith(PREFIXES) or name in NAMES}
    return tuple(sorted((found - {VISIBLE} if allocated else found) | set(extra)))


def command(job: Job, launcher: Launcher, *, mpirun: str = "mpirun") -> Command:
    """The command line for ``launcher``; ``mpirun`` is the path of any launcher but srun.

    Raises:
        ArgumentError: for a job that this launcher cannot start.
    """
    job.check()
    if launcher == "srun":
        parts = _srun(job)
    elif launcher == "openmpi":
        parts = _openmpi(job, mpirun)
    else:
        parts = _hydra(job, mpirun, launcher)
    return Command((*parts, ArgumentGroup(job.program, "the program")))


def _openmpi(job: Job, mpirun: str) -> list[ArgumentGroup]:
    parts = [ArgumentGroup((mpirun,), "Open MPI's launcher"), _ranks(job, "-np")]
    if job.hostfile:
        parts.append(ArgumentGroup(("--hostfile", job.hostfile), "the machines, with their slots"))
    elif job.hosts:
        parts.append(ArgumentGroup(("--host", _list(job)), "the machines, with their slots"))
    if job.per_node is not None:
        parts.append(ArgumentGroup(("--map-by", f"ppr:{job.per_node}:node"), _each(job)))
    parts.append(ArgumentGroup(("--bind-to", job.bind), _bound(job)))
    for name in job.variables:
        parts.append(ArgumentGroup(("-x", name), _NAMED))
    return parts


def _hydra(job: Job, mpirun: str, launcher: Launcher) -> list[ArgumentGroup]:
    intel = launcher == "intel"
    parts = []
    if job.scheduler == "slurm" and not intel:
        parts.append(ArgumentGroup(("env", "SLURM_MPI_TYPE=none"),
                          "else MpiDefault=pmix of the site gives MPICH two process managers"))  # fmt: skip
    if job.scheduler is not None and intel and job.per_node is not None:
        parts.append(ArgumentGroup(("env", "I_MPI_JOB_RESPECT_PROCESS_PLACEMENT=off"),
                          "else the scheduler's ranks per node win over -ppn"))  # fmt: skip
    parts += [
        ArgumentGroup((mpirun,), "Intel MPI's launcher" if intel else "Hydra, MPICH's launcher"),
        _ranks(job, "-n"),
    ]
    if job.hostfile and job.per_node is None:
        flag = "-machinefile" if intel else "-f"
        why = "the machines, with their counts" + ("; -f would drop the counts" if intel else "")
        parts.append(ArgumentGroup((flag, job.hostfile), why))
    elif job.hosts and intel:
        each = {count for _, count in _counts(job)}
        if len(each) > 1:
            raise ArgumentError("these hosts take different numbers of ranks, which Intel MPI reads from a file alone; "
                                "write one with -o FILE, or give --ppn")  # fmt: skip
        names = ",".join(host.name for host in job.hosts)
        parts += [
            ArgumentGroup(("-hosts", names), "the machines"),
            ArgumentGroup(("-ppn", str(each.pop())), _each(job)),
        ]
    elif job.hosts:
        why = "the machines, with their counts" if job.per_node is None else f"the machines, and {_each(job)}"
        parts.append(ArgumentGroup(("-hosts", _list(job)), why))
    elif job.per_node is not None:
        parts.append(ArgumentGroup(("-ppn", str(job.per_node)), _each(job)))
    if intel:
        pin = {"none": ("I_MPI_PIN", "0")}.get(job.bind, ("I_MPI_PIN_DOMAIN", job.bind))
        parts.append(ArgumentGroup(("-genv", *pin), _bound(job)))
    else:
        parts.append(ArgumentGroup(("-bind-to", job.bind), _bound(job)))
    if job.variables:
        parts.append(ArgumentGroup(("-genvlist", ",".join(job.variables)), _NAMED))
    return parts


def _srun(job: Job) -> list[ArgumentGroup]:
    whose = "PMIx, for Open MPI" if job.pmi == "pmix" else "PMI-2, for MPICH and Intel MPI"
    k = job.per_node
    if k is None and job.hosts and not job.allocated:
        each = {count for _, count in _counts(job)}
        if len(each) > 1:
            raise ArgumentError("srun takes the same number of ranks on each node, and these hosts differ; give --ppn")
        k = each.pop()
    parts = [
        ArgumentGroup(("srun",), "Slurm's launcher"),
        ArgumentGroup((f"--mpi={job.pmi}",), f"{whose}; the wrong one gives every rank a world of its own"),
        _ranks(job, "--ntasks="),
    ]
    if k is not None:
        nodes = -(-job.ranks // k)
        if job.hosts and not job.allocated:
            names = ",".join(host.name for host in job.hosts[:nodes])
            parts.append(ArgumentGroup((f"--nodelist={names}",), "the machines"))
        parts.append(ArgumentGroup((f"--nodes={nodes}", f"--ntasks-per-node={k}"), _each(job)))
    if job.gpus is not None:
        why = "a rank sees all GPUs: with one alone (--gpus-per-task) it could not map its peers' memory"
        parts.append(ArgumentGroup((f"--gpus-per-node={job.gpus}", "--gpu-bind=none"), why))
    spelt = {"none": "none", "core": "cores", "numa": "ldoms"}[job.bind]
    parts.append(ArgumentGroup((f"--cpu-bind={spelt}",), _bound(job)))
    parts.append(ArgumentGroup(("--export=ALL",), "every variable of this shell, those that -x names too"))
    parts.append(ArgumentGroup(("--kill-on-bad-exit=1",), "a rank that fails ends the job, which would wait for it"))
    return parts


def _ranks(job: Job, flag: str) -> ArgumentGroup:
    words = (f"{flag}{job.ranks}",) if flag.endswith("=") else (flag, str(job.ranks))
    return ArgumentGroup(words, "this many ranks in all")


def _each(job: Job) -> str:
    if job.gpus is None:
        return "ranks of each node"
    return "ranks of each node: each takes the GPU of its local rank"


def _bound(job: Job) -> str:
    if job.bind == "none":
        return "ranks are not bound: two jobs on a machine would share its first cores"
    return f"each rank stays on {'a core' if job.bind == 'core' else 'the cores of one memory'}"


def _counts(job: Job) -> list[tuple[str, int]]:
    for host in job.hosts:
        if job.per_node is None and host.slots is None:
            raise ArgumentError(f"{host.name}: how many ranks? Give --ppn, or a count in the hostfile")
    return [(host.name, job.per_node or host.slots or 1) for host in job.hosts]


def _list(job: Job) -> str:
    return ",".join(f"{name}:{count}" for name, count in _counts(job))
