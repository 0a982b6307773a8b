"""What the ranks agree on when a Communicator is made: settings, arguments, machine, plan.

Each rank does its part and tells the others how it went, so that what fails on
one rank is an error on all of them, and none hangs. The communicator is handed
in; nothing here imports MPI.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from msgspec.structs import replace

from ..errors import ArgumentError, MismatchError, PlanError, SettingsError, TopologyError
from ..lang.algorithms import Algorithm
from ..planning.algorithms import check_algorithms, check_ways, named_in, with_algorithms
from ..planning.on_demand import Planned, PlanOnDemand
from ..planning.plan import Plan
from ..planning.selection import parse_algo
from ..planning.slots import BESIDE_CTAS, Gpus
from ..program.ir import Wire
from ..topology.model import Topology
from ..trees.tree import Collective
from ..util.files import read_file
from ..util.numbers import whole
from ..util.settings import LONGEST_S, MOST_CTAS, WIRES, Settings, log, read
from ..util.text import brief, quoted
from ..util.together import Comm, allgather, from_root, together

if TYPE_CHECKING:
    from ..planning.tuned_table import TunedTable

MOST_PLAN_BYTES = 1 << 29  # of a plan's file; that of 128 ranks has half of it

EXECUTORS = ("auto", "c", "numpy")


@dataclass(frozen=True)
class Options:
    """The keyword arguments of the Communicator; children inherit them."""

    topology: Topology | str | None = None
    plan: Plan | str | None = None
    timeout_s: float | None = None
    strict: bool = False
    deterministic: bool = False
    executor: str | None = None
    algo: str | None = None
    max_ctas: int | None = None
    stream: str | None = None
    algorithms: tuple[Algorithm, ...] = ()
    wire: str | None = None

    def __post_init__(self) -> None:
        """Keep Python's numbers in place of NumPy's; what is none is refused by :meth:`check`, on every rank."""
        if is_time(self.timeout_s):
            object.__setattr__(self, "timeout_s", float(self.timeout_s))  # type: ignore[arg-type]
        object.__setattr__(self, "max_ctas", _plain(self.max_ctas))

    def check(self) -> None:
        """Raise ArgumentError for a value that no rank could use."""
        if self.timeout_s is not None:
            check_timeout(self.timeout_s)
        if self.max_ctas is not None and not (isinstance(self.max_ctas, int) and 0 < self.max_ctas <= MOST_CTAS):
            raise ArgumentError(f"max_ctas={self.max_ctas!r}: expected a number of 1 to {MOST_CTAS}")
        if self.stream not in (None, "current"):
            raise ArgumentError(f"stream={self.stream!r}: expected None or 'current'; name other streams in each call")
        if self.wire is not None and self.wire not in WIRES:
            raise ArgumentError(f"wire={self.wire!r}: expected one of {', '.join(WIRES)}")
        if self.executor is not None and self.executor not in EXECUTORS:
            raise ArgumentError(f"executor={self.executor!r}: expected one of {', '.join(EXECUTORS)}")

    def describe(self) -> str:
        """What must be equal on all ranks, as people read it."""
        machine = self.topology.fingerprint if isinstance(self.topology, Topology) else self.topology
        plan = digest(self.plan) if isinstance(self.plan, Plan) else self.plan
        parts: dict[str, object] = {"topology": machine, "plan": plan, "executor": self.executor, "algo": self.algo}
        parts |= {
            "max_ctas": self.max_ctas,
            "stream": self.stream,
            "strict": self.strict or None,
            "deterministic": self.deterministic or None,
            "wire": self.wire,
            "algorithms": " ".join(f"{a.name}#{short_hash(a.to_json())}" for a in self.algorithms) or None,
        }
        return ", ".join(f"{k}={v}" for k, v in parts.items() if v is not None) or "no arguments"


def _plain(number: Any) -> Any:
    found = whole(number)
    return number if found is None else found


def agree_on_settings(comm: Comm, options: Options) -> Settings:
    """The settings and arguments of this job: rank 0's, which every other rank has too, or has none.

    A launcher may keep rank 0's environment from other nodes, so no setting at all is no contradiction.
    """

    def own() -> Settings:
        options.check()
        check_algorithms(options.algorithms, comm.size)
        return read()

    mine = together(comm, own)
    everybody = allgather(comm, (mine, options.describe()), tuple[Settings, str])
    for text in sorted({t for s, _ in everybody for t in s.unknown}) if comm.rank == 0 else ():
        log(mine, "WARN", text)
    common = [replace(s, debug=Settings().debug, unknown=()) for s, _ in everybody]
    for rank, settings in enumerate(common):
        if everybody[rank][1] != everybody[0][1]:
            raise MismatchError(
                f"rank {rank} made the communicator with {everybody[rank][1]}, rank 0 with {everybody[0][1]}; "
                "give every rank the same"
            )
        if settings not in (common[0], Settings()):
            raise MismatchError(
                f"rank {rank} has other BLINKMPI_ variables than rank 0: {differences(settings, common[0])}; "
                "set them alike on every rank, or on rank 0 alone"
            )
    return replace(common[0], debug=mine.debug)


def own_settings() -> Settings:
    """This process's settings before the ranks have agreed on them; the defaults where they are wrong."""
    try:
        return read()
    except SettingsError:
        return Settings()


def first_deadline(timeout_s: object) -> float:
    """How long a rank waits for the others to come, before they have agreed on it."""
    return float(timeout_s) if is_time(timeout_s) else own_settings().timeout_s  # type: ignore[arg-type]


def virtual_node(rank: int, n: int, settings: Settings) -> int | None:
    """Which virtual node this rank is in; None without such.

    Raises:
        SettingsError: on every rank, if BLINKMPI_NODES is for another number of ranks.
    """
    at = [index for index, size in enumerate(settings.nodes) for _ in range(size)]
    if at and len(at) != n:
        raise SettingsError(
            f"BLINKMPI_NODES={'+'.join(map(str, settings.nodes))} has {len(at)} ranks, the job has {n}; name as many, "
            "or unset it"
        )
    return at[rank] if at else None


def given_machine(comm: Comm, wanted: Topology | str, n: int) -> Topology:
    """The machine that the user named, the same on every rank."""

    def resolve() -> str:
        from ..topology.importers import load

        topology = load(wanted) if isinstance(wanted, str) else wanted.check()
        if topology.n != n:
            raise TopologyError(
                f"{topology.name} has {topology.n} devices, the job has {n} ranks; "
                "start as many ranks, or take a subset of the devices"
            )
        return topology.to_json()

    return Topology.from_json(from_root(comm, resolve, str), source="topology from rank 0")


def agree_on_plan(
    comm: Comm, machine: Topology, options: Options, settings: Settings, gpus: Gpus = "", table: Path | None = None,
    *, mpi: bool = True, change: Callable[[PlanOnDemand], None] | None = None, like: Planned | None = None,
) -> PlanOnDemand:  # fmt: skip
    """The plan that the user gave, read by rank 0 and checked by everybody, or one that rank 0 makes as calls come.

    A barrier is planned for at once, and so is what ``algo`` names: links that do not join all ranks, and schemes that
    there are not, are errors here. All is, if the plan is to be written to a file.

    Args:
        gpus: see :func:`.planner.make_plan`.
        table: where measured rows for this machine may lie; ``algo`` wins over them.
        mpi: whether MPI has collectives of its own among these ranks, to which short vectors in host memory may go.
        change: takes out what the ranks cannot do.
        like: what is planned for another communicator of the same ranks and options, with which it begins.
    """
    algo, asked = named_in(options.algo if options.algo is not None else settings.algo, options.algorithms, machine.n)
    given = options.plan or settings.graph_file or None

    @cache
    def measured() -> TunedTable | None:
        if table is None or algo:
            return None
        from ..planning.tuned_table import read as read_table
        from ..transport.cuda.kernels.compiler import kernels_digest

        found = read_table(table)
        if found is not None and found.kernels != kernels_digest():
            text = f"the tuned table {table} is not used: it was measured with other kernels; run blinkmpi tune again"
            log(settings, "WARN", text)
            return None
        return found

    def planned(collective: Collective | None = None, roots: Sequence[int] | None = None) -> Plan:
        from ..planning.planner import ALL_COLLECTIVES, make_plan, planned_with  # imported here: rank 0 alone plans

        collectives = ALL_COLLECTIVES if collective is None else planned_with(collective, gpus)
        short, seconds = mpi and not options.deterministic and not gpus, settings.plan_s
        asked_ctas = options.max_ctas or settings.max_ctas
        beside = BESIDE_CTAS if options.stream == "current" and not asked_ctas else 0
        plan = make_plan(
            machine, algo=algo, mpi=short, gpus=gpus, collectives=collectives, roots=roots, seconds=seconds,
            max_ctas=asked_ctas or beside,
        )  # fmt: skip
        rows = measured()
        if rows is None:
            return plan
        from ..planning.tuned_table import taken

        return taken(plan, rows, machine, beside)

    def part(collective: Collective, root: int) -> Plan:
        return planned(collective, (root,))

    def whole() -> str:
        if given is None:
            return planned().to_json()
        plan = given if isinstance(given, Plan) else read_plan(given)
        one_hop = gpus == "onehop" and any(packing.scheme == "onehop" for packing in plan.packings)
        if one_hop and all(rule.protocol == "slots" for rule in plan.rules):
            text = "the plan was made without these GPUs: it knows no protocol but slots, and calls take longer"
            log(settings, "WARN", f"{text}; write one with mpirun -np {machine.n} blinkmpi plan -o FILE")
        return plan.to_json()

    if given is not None or settings.graph_dump_file:
        text = from_root(comm, whole, str)
        plan = together(comm, lambda: Plan.from_json(text, source="plan from rank 0").check(machine))
        plans = PlanOnDemand(comm, machine, plan)
    else:
        plans = PlanOnDemand(comm, machine, part)
    forced = {} if given is not None else parse_algo(algo)  # a given plan is taken as it is
    named = {kind for kind, schemes in forced.items() if not all(scheme.startswith("^") for scheme in schemes)}
    free = [one for one in options.algorithms if one.collective not in named]
    if free or asked:
        plans.change(partial(with_algorithms, algorithms=free, asked=asked, gpus=gpus))
    if wire := cast(Wire | Literal[""], options.wire or settings.wire):
        plans.change(partial(replace, wire=wire))
    if change is not None:
        change(plans)
    if like is not None:
        plans.like(like)
    if gpus:
        check_ways(plans.plan, machine)
    return plans.with_parts((collective, 0) for collective in ("barrier", *forced))


def dump_files(comm: Comm, settings: Settings, machine: Topology, plan: Plan) -> None:
    """Write the files that the settings ask of rank 0."""

    def work() -> None:
        if comm.rank == 0 and settings.topo_dump_file:
            dump("TOPO_DUMP_FILE", settings.topo_dump_file, machine.to_json())
        if comm.rank == 0 and settings.graph_dump_file:
            dump("GRAPH_DUMP_FILE", settings.graph_dump_file, plan.to_json())

    together(comm, work)


def is_time(seconds: object) -> bool:
    """Whether ``seconds`` is a time to wait."""
    return isinstance(seconds, Real) and 0 < float(seconds) <= LONGEST_S


def check_timeout(seconds: float) -> None:
    """Raise ArgumentError unless ``seconds`` is a time to wait."""
    if not is_time(seconds):
        raise ArgumentError(f"timeout={seconds!r}: expected a number of seconds, more than 0, at most {LONGEST_S:.0e}")


def digest(plan: Plan) -> str:
    """A few characters that differ if two plans do."""
    return f"{plan.machine}#{short_hash(plan.to_json())}"


def short_hash(text: str) -> str:
    """12 hex digits."""
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def differences(one: Settings, other: Settings) -> str:
    """Where two ranks' settings differ, in words."""
    names = {
        "timeout_s": "TIMEOUT",
        "warn_after_s": "WARN_AFTER",
        "buffer_bytes": "BUFFSIZE",
        "cma_threads": "CMA_NTHREADS",
    }
    pairs = {f: (getattr(one, f), getattr(other, f)) for f in one.__struct_fields__}
    return ", ".join(f"{names.get(f, f.upper())}={a!r} against {b!r}" for f, (a, b) in pairs.items() if a != b)


def read_plan(path: str) -> Plan:
    """Read a plan's file."""
    try:
        text = read_file(path, most=MOST_PLAN_BYTES)
    except OSError as error:
        raise PlanError(f"cannot read plan file {quoted(path)}: {error.strerror}; correct the path") from error
    return Plan.from_json(text, source=brief(path))


def dump(setting: str, path: str, text: str) -> None:
    """Write a file that a setting asked for."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"BLINKMPI_{setting}={path!r}: cannot write it: {error.strerror}; correct it") from error
