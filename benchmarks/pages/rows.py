"""What the sections of the performance page have in common: facts of a file, its rows, and how numbers are written."""

import itertools
import math
import shlex
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from scipy.stats import quantile_test

MEAN_FROM = 1 << 20  # bytes: geometric means are over rows of at least this size
PLACES = (("out_of_place", "out of place"), ("in_place", "in place"))
NONE = "-"


# Ways of ours to train, as the pages call them; the others are beside them.
OURS_IN_TRAINING = {
    "blink": "backend `blink`", "hook": "`ddp_hook`", "registered": "`ddp_hook`, buckets in a memory pool",
}  # fmt: skip


def emulated_links(document: dict[str, Any]) -> str:
    """Whose links a training used, if they were paced."""
    gpus = document["training"].get("emulated")
    return f", on links of GPUs {gpus} of a DGX-1V" if gpus else ""


def step_ratio(other: dict[str, Any], ours: dict[str, Any]) -> tuple[float, str]:
    """The other library's step by ours, and its 95 % confidence interval, if the file has every turn."""
    turns = list(zip(other.get("turns_ms", ()), ours.get("turns_ms", ()), strict=True))
    if not turns:
        return other["step_ms"] / ours["step_ms"], ""
    ratios = [theirs / own for theirs, own in turns]  # of one round each
    median = statistics.median(ratios)
    low, high = quantile_test(ratios, q=median, p=0.5).confidence_interval(0.95)
    return median, "" if math.isnan(low + high) else f" ({low:.3f} to {high:.3f})"


def blocks(document: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The tables of a file: (executor, rows). A run measures all its rows once for each executor and cycle."""
    rows: list[dict[str, Any]] = []
    seen: set[tuple[Any, ...]] = set()
    for row in document["results"]:
        key = (row.get("experiment_name"), row["size"], row.get("root"))
        if key in seen:
            yield executor_of(rows), rows
            rows, seen = [], set()
        rows.append(row)
        seen.add(key)
    if rows:
        yield executor_of(rows), rows


def mean(rows: Sequence[dict[str, Any]], place: str, peer: str, *, small: bool = False) -> float | None:
    """Geometric mean of the ratios from 1 MiB on, or below; None if no such row has one."""
    ratios = [ratio_of(row, place, peer) for row in rows if (row["size"] < MEAN_FROM) == small]
    known = [r for r in ratios if r is not None and r > 0]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


def facts_of(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    ours = document["blinkmpi"]
    hardware, versions, machine = (ours.get(k) or {} for k in ("hardware", "versions", "machine"))
    memory = hardware.get("memory_bytes")
    hosts = len(ours.get("hostnames") or [])
    yield "hardware", ", ".join([
        str(hardware.get("cpu") or "unknown processor"),
        f"{hardware.get('cores_available', 'unknown')} cores available to rank 0",
        f"{memory / 2**30:.1f} GiB" if memory else "unknown memory",
        f"Linux {hardware.get('kernel', 'unknown')} {hardware.get('architecture', '')}".strip(),
        *([f"{hosts} host{'' if hosts == 1 else 's'}"] if hosts else []),
    ])  # fmt: skip
    yield "versions", ", ".join(f"{k} {v}" for k, v in versions.items() if v) or "unknown"
    commit = ours.get("commit")
    dirty = {True: ", with changes since", False: ""}.get(ours.get("dirty"), "")
    yield "commit", f"`{commit[:12]}`{dirty}" if commit else "unknown"
    yield "date", str(ours.get("date") or document.get("start_time") or "unknown")
    words = [str(word) for word in document.get("args") or []][1:]
    yield "command", f"`mpirun -np {ours['ranks']} blinkmpi {shlex.join(words)}`"
    prefixes = ("BLINKMPI_", "NCCL_", "TORCH_SYMM") if on_gpu(document) else ("BLINKMPI_",)
    settings = [s for s in document.get("env") or [] if s.startswith(prefixes)]
    yield "settings", ", ".join(f"`{s}`" for s in settings) or "none"
    emulated = ", emulated on CPU ranks" if machine.get("emulated") else ""
    yield "machine", f"{machine.get('name', 'unknown')}{emulated}, fingerprint {machine.get('fingerprint', 'unknown')}"
    yield "time", str(ours.get("statistic") or "unknown")


def on_gpu(document: dict[str, Any]) -> bool:
    return document["blinkmpi"].get("memory") == "gpu"


def gpu_lines(document: dict[str, Any]) -> list[str]:
    """The GPUs of a file and their versions, if it was measured on GPUs."""
    gpu = document["blinkmpi"].get("gpu") if on_gpu(document) else None
    if not gpu:
        return []
    versions = ", ".join(f"{key} {value}" for key, value in gpu.items() if key != "name" and value)
    return [f"- GPUs: {document['blinkmpi']['ranks']} x {gpu['name']}, {versions or 'unknown versions'}"]


def ranks_text(document: dict[str, Any]) -> str:
    """``2``, or ``2 GPUs``."""
    return f"{document['blinkmpi']['ranks']}{' GPUs' * on_gpu(document)}"


def label_of(peer: str, document: dict[str, Any]) -> str:
    """A peer as a column's name."""
    return with_nvls_told({"mpi": "MPI", "nccl": "NCCL"}.get(peer, peer), document)


def with_nvls_told(library: str, document: dict[str, Any]) -> str:
    """A library's name; of NCCL's it says where the run was without NVLS, the reductions in the NVSwitch."""
    off = any("NCCL_NVLS_ENABLE=0" in (facts.get("env") or ()) for facts in (document, document["blinkmpi"]))
    return f"{library} without NVLS" if off and "nccl" in library.lower() else library


def peers_of(document: dict[str, Any]) -> list[str]:
    return list(document["blinkmpi"].get("compare") or [])


def first_peer(document: dict[str, Any]) -> str:
    return next(iter(document["blinkmpi"].get("compare") or []), "mpi")


def executor_of(rows: Sequence[dict[str, Any]]) -> str:
    """What ran a block: its one executor besides MPI."""
    names = dict.fromkeys(str((row.get("blinkmpi") or {}).get("executor") or "unknown") for row in rows)
    return "+".join(name for name in names if name != "mpi") or "mpi"


def is_emulated(rows: Sequence[dict[str, Any]]) -> bool:
    return any((row.get("blinkmpi") or {}).get("emulated") for row in rows)


def our_time(row: dict[str, Any], place: str) -> float | None:
    timed = row.get(place) or {}
    value = timed.get("time", timed.get("cpu_time"))
    return None if value is None else float(value)


def compared(row: dict[str, Any], place: str, peer: str) -> dict[str, Any] | None:
    compare = ((row.get("blinkmpi") or {}).get(place) or {}).get("compare") or {}
    found: dict[str, Any] | None = compare.get(peer)
    return found


def ratio_of(row: dict[str, Any], place: str, peer: str) -> float | None:
    theirs = compared(row, place, peer)
    return None if theirs is None else float(theirs["ratio"])


def wrong_text(rows: Sequence[dict[str, Any]]) -> str:
    counts = [(row.get(place) or {}).get("nwrong") for row in rows for place, _ in PLACES]
    known = [int(c) for c in counts if c is not None]
    return str(sum(known)) if known else "not checked"


def exact_size_text(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def us_text(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def ms_text(us: float | None) -> str:
    return NONE if us is None else f"{us / 1e3:.2f}" if us < 1e5 else f"{us / 1e3:.1f}"


def ratio_text(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}"


def anchor(name: str) -> str:
    """The fragment that a heading of this text gets: lower case, without dots."""
    return "".join(c for c in name.lower() if c.isalnum() or c in "-_")


def table_head(*names: str) -> tuple[str, str]:
    """The two heading lines of a table; ``>name`` is a column of numbers."""
    marks = "|".join("---:" if name.startswith(">") else "---" for name in names)
    return line(name.removeprefix(">") for name in names), f"|{marks}|"


def line(cells: Iterable[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def fact_lines(document: dict[str, Any], *, command: str = "") -> list[str]:
    """The facts of a file as a list, and what failed; ``command`` where the file is not ``blinkmpi bench``'s."""
    facts = [f"- {label}: {text}" for label, text in facts_of(document) if not command or label != "command"]
    return [*facts, *([f"- command: `python benchmarks/{command}`"] if command else [])]


def failures(document: dict[str, Any]) -> list[str]:
    """What failed, a line each."""
    return [f"- failed: {failure.splitlines()[0]}" for failure in document.get("failed") or []]


def wrong_count(counts: Iterable[int | None]) -> str:
    """Their sum, if all were checked."""
    found = list(counts)
    return "not checked" if None in found else str(sum(filter(None, found)))


def label_with_mark(document: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The collective, what it was told to take, and whether its machine was emulated."""
    return f"{collective_text(document)}{' (emulated)' if is_emulated(rows) else ''}"


def collective_text(document: dict[str, Any]) -> str:
    """The collective, and what scheme it was told to take: ``alltoall by lang:bruck_alltoall``."""
    name = str(document["blinkmpi"].get("collective"))
    forced = _forced_scheme(document, name) if on_gpu(document) else ""
    return f"{name} by {forced}" if forced else name


def _forced_scheme(document: dict[str, Any], name: str) -> str:
    """What ``--algo`` or ``--algorithm`` made the calls take; empty if they chose themselves."""
    words = [str(word) for word in document.get("args") or []]
    if "--algorithm" in words:
        return str(document["results"][0]["blinkmpi"]["scheme"]) if document["results"] else ""
    told = dict(itertools.pairwise(words)).get("--algo", "")
    forced = told.removeprefix(f"{name}:")
    return "" if forced == told or "^" in forced else forced


def scheme_text(own: dict[str, Any]) -> str:
    """The scheme of a row, and whether its machine was emulated."""
    return str(own.get("scheme") or NONE) + (" (emulated)" if own.get("emulated") else "")


def link_to(name: str) -> str:
    """A link to the section of a file."""
    return f"[{name}](#{anchor(name)})"
