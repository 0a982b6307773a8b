"""What ranks saw and what the doctor finds, as values; and the words that findings are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from ..topology.gpu import GpuFacts, Unknown
from ..util.codec import Value, dumps

FORMAT_VERSION = 1
State = Literal["ok", "warn", "fail", "n/a"]


class Line(Value, frozen=True):
    """One finding. The remedy is empty where nothing needs one."""

    check: str
    state: State
    evidence: str
    remedy: str = ""


class Mpi(Value, frozen=True):
    """The MPI library of this process and how the process came to be."""

    implementation: str
    standard: str
    mpi4py: str
    path: str
    threads: str
    launcher: str
    launched: int
    size: int
    cuda: tuple[tuple[str, str], ...] = ()  # rungs of the ladder and their answers


class SelfTest(Value, frozen=True):
    """What became of the child job that handed GPU memory to MPI: its exit status and last words."""

    ran: bool
    right: bool
    words: str


class Pair(Value, frozen=True):
    """Whether this rank opened a peer's GPU memory; an empty error is success."""

    peer: int
    error: str


class Seen(Value, frozen=True):
    """What one rank sees."""

    rank: int
    host: str
    place: str
    cores: tuple[int, ...]
    python: str
    packages: dict[str, str]
    environment: dict[str, str]
    unknown: tuple[str, ...]
    settings_error: str
    compiler: str
    shm_free: int | Unknown
    shm_size: int | Unknown
    slots_bytes: int
    skew_s: float
    gpus_here: tuple[str, ...]  # PCI ids that NVML shows
    no_gpu: str  # why this rank has no CUDA device
    gpu: GpuFacts | None = None
    pairs: tuple[Pair, ...] = ()
    mpi: Mpi | None = None
    no_mpi: str = ""


class Report(Value, frozen=True):
    """All findings of a job."""

    ranks: int
    lines: tuple[Line, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing failed."""
        return all(line.state != "fail" for line in self.lines)

    def to_json(self) -> str:
        """The document of ``doctor --json``."""
        return dumps(self, kind="doctor", version=FORMAT_VERSION)


Lines = Iterator[Line]


def groups(seen: Sequence[Seen], of: Callable[[Seen], str]) -> dict[str, list[int]]:
    """Ranks by what they say."""
    found: dict[str, list[int]] = {}
    for s in seen:
        ranks = found.setdefault(of(s), [])
        if s.rank not in ranks:
            ranks.append(s.rank)
    return found
