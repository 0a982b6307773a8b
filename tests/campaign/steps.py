"""What a campaign does, drawn from a seed: the same steps on all ranks, and the same again from the same seed.

Nothing here calls anything. :func:`steps` never ends; a job takes as many as its time allows.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from blinkmpi.program.reduction import DTYPES, OPS, dtype_of
from tests.campaign.kinds import KINDS
from tests.conformance import Case, allowed

MPI_TYPES = ("int32", "int64", "float32", "float64", "complex128")  # that MPI's own persistent calls reduce exactly
MPI_OPS = ("sum", "prod", "band", "lor")  # not min and max, which may lose a NaN
TORCH_ONLY = ("float8_e4m3fn", "float8_e5m2", "bfloat16")  # which CuPy lacks
ON_GPU = ("cupy", "torch", "registered")
MOST_BYTES = 64 << 20
COMMON = ("float32", "float64", "int32", "bfloat16")

# Faults after which the job goes on, and how often each is drawn; `faults.py` has a method for each.
FAULTS = {
    "bad_argument": 8, "mismatch": 5, "late": 5, "stopped": 4, "too_late": 2, "stopped_too_long": 2, "fork": 3,
    "truncated": 5,
}  # fmt: skip
FULL = "shared_memory_full"  # only in a job with a small /dev/shm
LINK = "link_down"  # only between hosts


@dataclass(frozen=True, slots=True)
class Mix:
    """What may be drawn: faults as a share of all steps, and where buffers lie."""

    n: int
    faults: float = 0.0
    memories: tuple[str, ...] = ("numpy", "numpy", "numpy", "spec", "dlpack")
    most_bytes: int = MOST_BYTES
    small_shm: bool = False
    hosts: bool = False

    @property
    def gpus(self) -> bool:
        """Whether calls are made on GPU memory."""
        return "cupy" in self.memories


def settings(seed: int, n: int) -> dict[str, str]:
    """Draw the settings of a job on CPU ranks: in half of the jobs none."""
    rng = random.Random(seed)
    first, second = rng.randrange(1, n) if n > 1 else 1, rng.randrange(1, n - 1) if n > 2 else 1
    some = (
        {"BLINKMPI_CMA_DISABLE": "1"}, {"BLINKMPI_CMA_NTHREADS": "1"}, {"BLINKMPI_BUFFSIZE": "262144"},
        {"BLINKMPI_BUFFSIZE": "1000003", "BLINKMPI_CMA_DISABLE": "1"},
        *([{"BLINKMPI_NODES": f"{first}+{n - first}"}] * 2 if n > 1 else []),
        *([{"BLINKMPI_NODES": f"1+{second}+{n - 1 - second}"}] * 2 if n > 2 else []),  # two may wait for each other
    )  # fmt: skip
    return rng.choice(some) if rng.random() < 0.5 else {}


@dataclass(frozen=True, slots=True)
class Call:
    """One call: what (a case), how it begins, and what becomes of its buffers.

    Args:
        how: ``blocking``, ``request``, ``persistent``, ``joined`` or ``graph``.
        memory: ``numpy``, ``spec`` ([array, count]), ``dlpack``; on GPUs ``cupy``, ``torch``, ``registered``.
        skews: elements by which the send and the receive buffer begin behind an aligned address.
        after: ``check`` that the send buffer is as before, ``scribble`` over it, or ``drop`` it: as the call returns.
        times: how often it is made on the same buffers, with other numbers each time.
    """

    case: Case
    how: str
    memory: str
    skews: tuple[int, int]
    after: str
    times: int = 1


@dataclass(frozen=True, slots=True)
class Step:
    """Something that all ranks do together.

    Args:
        what: ``calls`` (one after another), ``requests`` (begun together, completed in any order), ``joined`` (made
            together, as a group), ``graph`` (of a GPU), ``threads`` (some calls for each thread), ``children`` (some
            for each communicator made) or ``fault``.
        comm: which of the job's communicators.
        groups: the calls; but for threads and children there is one group.
        colours: of each rank, for ``children``; -1 is in none.
        late: seconds by which each rank comes late.
        fault: its name, with ``victim`` the rank that it strikes.
        draw: a number for what else has to be drawn.
    """

    number: int
    what: str
    comm: int
    groups: tuple[tuple[Call, ...], ...]
    colours: tuple[int, ...] = ()
    late: tuple[float, ...] = ()
    fault: str = ""
    victim: int = 0
    draw: int = 0


def steps(seed: int, mix: Mix) -> Iterator[Step]:
    """Draw steps without end."""
    rng, number = random.Random(seed), 0
    while True:
        yield _step(rng, number, mix)
        number += 1


def _step(rng: random.Random, number: int, mix: Mix) -> Step:
    comm, draw = rng.randrange(1 << 16), rng.randrange(1 << 30)
    late = tuple(rng.random() * 0.004 if rng.random() < 0.04 else 0.0 for _ in range(mix.n))
    if rng.random() < mix.faults:
        names = dict(FAULTS)
        names |= {FULL: 8} if mix.small_shm else {}
        names |= {LINK: 20} if mix.hosts else {}
        fault = rng.choices(list(names), list(names.values()))[0]
        healthy = (_call(rng, mix, mix.n, how="blocking", most=1 << 20),)  # afterwards
        return Step(number, "fault", comm, (healthy,), (), late, fault, rng.randrange(mix.n), draw)
    weights = (60, 25, 10, 0, 2, 10) if mix.gpus else (60, 25, 10, 6, 2, 0)  # GPUs keep one order for all communicators
    what = rng.choices(("calls", "requests", "joined", "threads", "children", "graph"), weights)[0]
    if what == "children":
        groups, colours = _families(rng, mix)
        return Step(number, what, comm, groups, colours, late, draw=draw)
    if what == "threads":
        groups = tuple(tuple(_call(rng, mix, mix.n, most=1 << 20) for _ in range(rng.randint(2, 5))) for _ in range(2))
        return Step(number, what, comm, groups, (), late, draw=draw)
    if what == "joined":
        return Step(number, what, comm, (_joined(rng, mix),), (), late, draw=draw)
    how = {"requests": "request", "graph": "graph"}.get(what, "")
    some = rng.randint(1, 6) if what != "calls" else rng.choice((1, 1, 2, 3))
    most = mix.most_bytes if what == "calls" else mix.most_bytes >> 3
    if what != "graph" and rng.random() < 0.15:
        return Step(number, what, comm, (_lengths(rng, mix, how),), (), late, draw=draw)
    return Step(
        number, what, comm, (tuple(_call(rng, mix, mix.n, how, most) for _ in range(some)),), (), late, draw=draw
    )


def _families(rng: random.Random, mix: Mix) -> tuple[tuple[tuple[Call, ...], ...], tuple[int, ...]]:
    """Colours of the ranks, and calls for each colour's communicator."""
    way = rng.choice(("split", "split", "dup"))
    colours = (0,) * mix.n if way == "dup" else tuple(rng.choice((0, 0, 1, 1, -1)) for _ in range(mix.n))
    groups = []
    for colour in (0, 1):
        n = colours.count(colour)
        groups.append(tuple(_call(rng, mix, n, most=1 << 20) for _ in range(rng.randint(1, 4))) if n else ())
    return tuple(groups), colours


def _joined(rng: random.Random, mix: Mix) -> tuple[Call, ...]:
    """Calls that differ in their lengths and buffers alone, with one of another kind among them."""
    like, many = _call(rng, mix, mix.n, "joined", 1 << 20), rng.choice((2, 3, 7, 18, 120))
    case, some = like.case, []
    each = dtype_of(case.dtype).itemsize * (mix.n if KINDS[case.collective].blocked else 1)
    for _ in range(many):
        one = replace(case, count=min(_nbytes(rng), (1 << 20) // many) // each, salt=rng.randrange(1, 1 << 30))
        some.append(replace(like, case=one, skews=(rng.choice((0, 1, 3)), rng.choice((0, 1, 5)))))
    other = _call(rng, mix, mix.n, "joined", 1 << 20)
    some.insert(rng.randrange(many), replace(other, times=like.times, after="check"))  # which keeps what it sends
    return tuple(some)


def _lengths(rng: random.Random, mix: Mix, how: str) -> tuple[Call, ...]:
    """Calls that differ in their lengths alone: from the third on of a size, C makes them by itself."""
    like = _call(rng, mix, mix.n, how, 1 << 20)
    each = dtype_of(like.case.dtype).itemsize * (mix.n if KINDS[like.case.collective].blocked else 1)
    counts = (min(_nbytes(rng), 1 << 20) // each for _ in range(rng.randint(4, 9)))
    return tuple(
        replace(like, case=replace(like.case, count=c, salt=rng.randrange(1, 1 << 30)), times=1) for c in counts
    )


def _call(rng: random.Random, mix: Mix, n: int, how: str = "", most: int = 0) -> Call:
    """One call on ``n`` ranks of ``most`` bytes at most; ``how`` is drawn if it is not given."""
    name = rng.choice(list(KINDS))
    kind = KINDS[name]
    how = how or rng.choices(("blocking", "request", "persistent"), (80, 15, 5 * kind.persistent))[0]
    memory = rng.choice(mix.memories)
    common = 0.8 if mix.gpus else 0.4  # on GPUs each type and operation is a kernel to compile
    on_mpi = how == "persistent" and memory not in ON_GPU
    if on_mpi or (memory == "spec" and kind.blocked):
        memory = "numpy"
    dtypes: Sequence[str] = MPI_TYPES if on_mpi else COMMON if rng.random() < common else DTYPES
    if memory in ("cupy", "registered"):
        dtypes = [d for d in dtypes if d not in TORCH_ONLY]
    if memory == "torch":
        dtypes = [d for d in dtypes if d not in ("uint16", "uint32", "uint64")]
    dtype = rng.choice(dtypes)
    op = rng.choice(_operations(name, dtype, MPI_OPS if on_mpi else OPS)) if kind.reduces else ""
    nbytes = min(_nbytes(rng), most or mix.most_bytes)
    count = nbytes // dtype_of(dtype).itemsize // (n if kind.blocked else 1)
    case = Case(
        name, n, dtype, op, count, kind.in_place and rng.random() < 0.35,
        rng.randrange(n) if kind.rooted else 0, rng.randrange(1, 1 << 30),
    )  # fmt: skip
    skews = (rng.choice((0, 0, 1, 3, 17)), rng.choice((0, 0, 1, 5)))
    after = rng.choice(("check", "scribble", "drop"))
    times = rng.choice((1, 1, 1, 2, 4, 12)) if nbytes < 1 << 16 and after != "drop" else 1
    return Call(case, how, memory, skews, after, times)


def _operations(collective: str, dtype: str, among: Sequence[str]) -> list[str]:
    """The operations of a collective on a type."""
    return [op for op in allowed(dtype) if op in among and (op != "avg" or "scan" not in collective)]


def _nbytes(rng: random.Random) -> int:
    """Bytes of a call's largest buffer: mostly short, now and then up to 64 MiB."""
    dice = rng.random()
    if dice < 0.08:
        return rng.randrange(32)
    if dice < 0.85:
        return int(2 ** rng.uniform(3, 15))
    if dice < 0.98:
        return int(2 ** rng.uniform(15, 20))
    if dice < 0.998:
        return int(2 ** rng.uniform(20, 23.5))
    return rng.choice((MOST_BYTES, int(2 ** rng.uniform(23.5, 26))))
