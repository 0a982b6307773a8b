"""Judge whether a job would run well here: each finding has a state, its evidence and a remedy.

Pure: :func:`judge` reads the facts that :mod:`.examination` collected on all ranks. A finding is ``ok``,
``warn`` (a job runs, but slower or not as intended), ``fail`` (it does not run, or not as started) or ``n/a``. The
findings about process and host are here, those about GPUs in :mod:`.gpu_checks`.
"""

from collections.abc import Callable, Sequence

from ..topology.gpu import Unknown
from ..util.text import plural, ranks_text
from .gpu_checks import GPU_CHECKS, cuda_aware
from .report import Finding, Findings, RankFacts, Report, SelfTest, State, fail, groups, not_applicable, ok, warn

MIB = 1 << 20
SKEW_S = 0.1
LEAST_SLOTS = MIB  # of a rank: with less, chunks are small and slow
# Variables that change how GPUs or MPI run, and what they do.
HINTS = {
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before",
    "NCCL_P2P_DISABLE": "NCCL, to which bench compares, goes through host memory",
    "NCCL_TOPO_FILE": "NCCL plans for the machine of that file, not for this one",
    "NCCL_ALGO": "NCCL may not choose for itself",
    "NCCL_PROTO": "NCCL may not choose for itself",
    "OMPI_MCA_coll": "Open MPI's choice of collectives is restricted",
}


def judge(seen: Sequence[RankFacts], self_test: SelfTest | None = None) -> Report:
    """All findings about a job, from what its ranks saw, in rank order."""
    findings: list[Finding] = []
    for check in (_mpi, _threads, _versions, _hosts, _clock, _cores, _compiler, _shm, _settings, _hints, *GPU_CHECKS):
        findings += check(seen)
    findings += cuda_aware(seen, self_test)
    return Report(len(seen), tuple(findings))


def _mpi(seen: Sequence[RankFacts]) -> Findings:
    lost = [s for s in seen if s.mpi is None]
    if lost:
        remedy = "pip install 'blinkmpi[mpi]'; or load your site's MPI and pip install --no-binary mpi4py mpi4py"
        yield fail("MPI", f"none found: {lost[0].no_mpi}", remedy)
        return
    m = seen[0].mpi
    assert m is not None
    yield ok("MPI", f"{m.implementation}, MPI {m.standard}, mpi4py {m.mpi4py}" + (f", {m.path}" if m.path else ""))
    if m.launched > m.size:
        fit = "srun --mpi=pmix" if "Open MPI" in m.implementation else "srun --mpi=pmi2"
        yield fail("start", f"the launcher started {m.launched} processes, MPI sees {m.size}: each is alone",
                   f"use this MPI's own mpirun, or {fit}")  # fmt: skip
    else:
        yield ok("start", f"{plural(m.size, 'rank')}, {m.launcher}")


def _threads(seen: Sequence[RankFacts]) -> Findings:
    levels = {s.mpi.threads for s in seen if s.mpi is not None}
    if levels and levels != {"MULTIPLE"}:
        yield warn("threads", f"MPI_THREAD_{sorted(levels)[0]}: non-blocking calls complete at once",
                   "leave mpi4py.rc.thread_level at 'multiple', and do not initialise MPI elsewhere")  # fmt: skip
    elif levels:
        yield ok("threads", "MPI_THREAD_MULTIPLE")


def _versions(seen: Sequence[RankFacts]) -> Findings:
    """The same programs on all ranks."""
    facts: list[tuple[str, Callable[[RankFacts], str], State]] = [
        ("blinkmpi", lambda s: s.packages.get("blinkmpi", "?"), "fail"),
        ("MPI", lambda s: s.mpi.implementation if s.mpi else "none", "fail"),
        ("Python", lambda s: s.python, "warn"),
        ("numpy", lambda s: s.packages.get("numpy", "?"), "warn"),
        ("mpi4py", lambda s: s.packages.get("mpi4py", "?"), "warn"),
    ]
    different = False
    for name, of, state in facts:
        said = groups(seen, of)
        if len(said) > 1:
            different = True
            words = "; ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in said.items())
            yield Finding("versions", state, f"{name} differs: {words}", "start the same environment on every node")
    if not different:
        packages = seen[0].packages
        names = ", ".join(f"{name} {packages[name]}" for name in ("blinkmpi", "numpy") if name in packages)
        yield ok("versions", f"{names}, Python {seen[0].python}" + (" on all ranks" if len(seen) > 1 else ""))


def _hosts(seen: Sequence[RankFacts]) -> Findings:
    """Launchers tell nodes apart by host name, shared memory does so by place: they must agree."""
    places = groups(seen, lambda s: s.place)
    hosts = groups(seen, lambda s: s.host)
    for host, ranks in hosts.items():
        if len({seen[r].place for r in ranks}) > 1:
            evidence = f"{ranks_text(ranks)} say {host}, and share no memory: containers, or hosts of one name"
            remedy = "give hosts different names (Open MPI hangs otherwise); share /dev/shm (docker --ipc=host)"
            yield warn("hosts", evidence, remedy)
            return
    where = ", ".join(f"{plural(len(r), 'rank')} on {seen[r[0]].host}" for r in list(places.values())[:4])
    more = ", ..." if len(places) > 4 else ""
    yield ok("hosts", (f"{plural(len(places), 'node')}: " if len(places) > 1 else "") + where + more)


def _clock(seen: Sequence[RankFacts]) -> Findings:
    if len(groups(seen, lambda s: s.place)) < 2:
        yield not_applicable("clocks", "one node has one clock")
        return
    worst = max(seen, key=lambda s: abs(s.skew_s))
    evidence = f"at most {abs(worst.skew_s) * 1e3:.1f} ms from rank 0's (rank {worst.rank}, {worst.host})"
    if abs(worst.skew_s) > SKEW_S:
        yield warn("clocks", evidence, "run chrony or ntpd: logs and traces of the ranks do not line up")
    else:
        yield ok("clocks", evidence)


def _cores(seen: Sequence[RankFacts]) -> Findings:
    """More ranks than cores, or all on one."""
    for ranks in groups(seen, lambda s: s.place).values():
        cores = {c for r in ranks for c in seen[r].cores}
        host, evidence = seen[ranks[0]].host, f"{plural(len(ranks), 'rank')} on {plural(len(cores), 'core')}"
        yields = seen[ranks[0]].environment.get("OMPI_MCA_mpi_yield_when_idle") == "1"
        open_mpi = any("Open MPI" in s.mpi.implementation for s in seen if s.mpi is not None)
        if len(ranks) > 1 and len(cores) == 1:
            yield warn("cores", f"{host}: all {len(ranks)} ranks may use one core only",
                       "mpirun --bind-to none, or srun --cpus-per-task")  # fmt: skip
        elif len(ranks) > len(cores) and open_mpi and not yields:
            yield warn("cores", f"{host}: {evidence}; waiting ranks take them",
                       "mpirun --mca mpi_yield_when_idle 1 --map-by slot:oversubscribe")  # fmt: skip
        else:
            yield ok("cores", f"{host}: {evidence}")


def _compiler(seen: Sequence[RankFacts]) -> Findings:
    without = [s.rank for s in seen if not s.compiler]
    if without:
        evidence = f"none on {ranks_text(without)}: CPU ranks run the NumPy executor, which is slower"
        yield warn("compiler", evidence, "install cc, or set CC, or pip install 'blinkmpi[cc]'")
    else:
        yield ok("compiler", seen[0].compiler)


def _shm(seen: Sequence[RankFacts]) -> Findings:
    for ranks in groups(seen, lambda s: s.place).values():
        first = seen[ranks[0]]
        if isinstance(first.shm_free, Unknown) or isinstance(first.shm_size, Unknown):
            reason = next(x.reason for x in (first.shm_free, first.shm_size) if isinstance(x, Unknown))
            yield fail("/dev/shm", f"{first.host}: {reason}", "mount a tmpfs there: ranks share memory through it")
            continue
        want, least = len(ranks) * first.slots_bytes, len(ranks) * LEAST_SLOTS
        evidence = f"{first.host}: {first.shm_free // MIB} of {first.shm_size // MIB} MiB free, "
        evidence += f"{plural(len(ranks), 'rank')} take {want // MIB}"
        remedy = "docker --shm-size=1g, or mount -o remount,size=1g /dev/shm; or a smaller BLINKMPI_BUFFSIZE"
        state: State = "fail" if first.shm_free < least else "warn" if first.shm_free < want else "ok"
        yield Finding("/dev/shm", state, evidence, "" if state == "ok" else remedy)


def _settings(seen: Sequence[RankFacts]) -> Findings:
    """Our own variables: impossible values, unknown names, contradictions, ranks that differ."""
    errors = groups([s for s in seen if s.settings_error], lambda s: s.settings_error)
    for text, ranks in errors.items():
        yield fail("settings", f"{ranks_text(ranks)}: {text}", "correct the variable")
    for text, ranks in groups([s for s in seen for _ in s.unknown], lambda s: "; ".join(s.unknown)).items():
        yield warn("settings", f"{ranks_text(ranks)}: {text}", "correct the name, or remove it")
    names = sorted({k for s in seen for k in s.environment if k.startswith("BLINKMPI_") and k != "BLINKMPI_DEBUG"})
    ours = [{k: s.environment[k] for k in names if k in s.environment} for s in seen]
    own = {tuple(sorted(o.items())) for o in ours if o}
    if len(own) > 1 or (own and not ours[0]):
        yield fail("settings", "ranks have different BLINKMPI_ variables",
                   "set them alike on every rank, or on rank 0 alone")  # fmt: skip
    env = ours[0]
    if env.get("BLINKMPI_GRAPH_FILE") and not env.get("BLINKMPI_TOPO_FILE"):
        evidence = "BLINKMPI_GRAPH_FILE without BLINKMPI_TOPO_FILE: the plan fits no machine that is measured anew"
        yield warn("settings", evidence, "set both")
    if env.get("BLINKMPI_EXECUTOR") == "c" and any(not s.compiler for s in seen):
        yield fail("settings", "BLINKMPI_EXECUTOR=c where there is no C compiler", "install one, or take auto")
    quiet = not errors and not any(s.unknown for s in seen) and len(own) < 2
    if quiet and env:
        yield ok("settings", ", ".join(f"{k}={v}" for k, v in sorted(env.items())))
    elif quiet:
        yield ok("settings", "no BLINKMPI_ variables are set")


def _hints(seen: Sequence[RankFacts]) -> Findings:
    """Other libraries' variables that explain surprises."""
    env = seen[0].environment
    for name, what in HINTS.items():
        if env.get(name, "0") not in ("", "0"):
            yield warn("environment", f"{name}={env[name]}: {what}", f"unset {name} unless it is meant")
