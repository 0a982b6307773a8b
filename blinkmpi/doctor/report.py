"""The doctor's values: the facts of a rank, a finding, and the report of all findings."""

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Literal

import msgspec

from ..topology.gpu import GpuFacts, Unknown
from ..util.codec import Document, Value, dumps

FORMAT_VERSION = 1
State = Literal["ok", "warn", "fail", "n/a"]


class Finding(Value, frozen=True):
    """One finding. The remedy is empty where nothing needs one."""

    check: str
    state: State
    evidence: str
    remedy: str = ""


class MpiFacts(Value, frozen=True):
    """The MPI library of this process, and what started the process."""

    implementation: str
    standard: str
    mpi4py: str
    path: str
    threads: str
    launcher: str
    launched: int
    size: int
    cuda: tuple[tuple[str, str], ...] = ()  # each hint at CUDA-awareness, with what it says


class SelfTest(Value, frozen=True):
    """The child job that passes GPU memory to MPI: whether it ran, whether data arrived, and how it ended."""

    ran: bool
    right: bool
    words: str


class PeerTrial(Value, frozen=True):
    """Whether this rank opened a peer's GPU memory; an empty error is success."""

    peer: int
    error: str


class RankFacts(Value, frozen=True):
    """The facts of one rank."""

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
    pairs: tuple[PeerTrial, ...] = ()
    mpi: MpiFacts | None = None
    no_mpi: str = ""


class Report(Document, frozen=True):
    """All findings of a job."""

    KIND: ClassVar = "doctor"
    VERSION: ClassVar = FORMAT_VERSION
    ranks: int
    findings: tuple[Finding, ...] = msgspec.field(name="lines")  # its name in the JSON

    @property
    def healthy(self) -> bool:
        """Whether nothing failed."""
        return all(finding.state != "fail" for finding in self.findings)

    def to_json(self) -> str:
        """The document of ``doctor --json``."""
        return dumps(self, kind="doctor", version=FORMAT_VERSION)


Findings = Iterator[Finding]


def ok(check: str, evidence: str, remedy: str = "") -> Finding:
    return Finding(check, "ok", evidence, remedy)


def warn(check: str, evidence: str, remedy: str) -> Finding:
    return Finding(check, "warn", evidence, remedy)


def fail(check: str, evidence: str, remedy: str) -> Finding:
    return Finding(check, "fail", evidence, remedy)


def not_applicable(check: str, evidence: str) -> Finding:
    return Finding(check, "n/a", evidence)


def groups(seen: Sequence[RankFacts], of: Callable[[RankFacts], str]) -> dict[str, list[int]]:
    """Ranks by what ``of`` says of each."""
    found: dict[str, list[int]] = {}
    for s in seen:
        ranks = found.setdefault(of(s), [])
        if s.rank not in ranks:
            ranks.append(s.rank)
    return found
