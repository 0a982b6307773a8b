"""The environment: ``BLINKMPI_*`` variables, named after NCCL's where NCCL has the same.

An unknown name warns with the nearest one that exists; an impossible value is a
SettingsError. Arguments of the Communicator win over the environment.
"""

import difflib
import math
import os
import sys
import threading
from collections.abc import Mapping

from ..errors import SettingsError
from .codec import Value
from .text import brief, quoted, whole_number

PREFIX = "BLINKMPI_"
TIMEOUT_S, WARN_AFTER_S, PLAN_S = 1800.0, 30.0, 5.0
LONGEST_S = 1e9  # of a timeout: in nanoseconds it fits into 64 bits
LEAST_BUFFER_BYTES, MOST_BUFFER_BYTES = 256 << 10, 1 << 40
MOST_CTAS = 1024
TRACE_EVENTS, LEAST_EVENTS, MOST_EVENTS = 1 << 16, 16, 1 << 24
MOST_RANKS = 1 << 16  # of a virtual node
MOST_RANKS_PER_GPU = 64
WIRES = ("accumulator", "operand")
OFF = "off"
LEVELS = ("NONE", "VERSION", "WARN", "INFO", "TRACE")
KNOWN = {
    "DEBUG": f"how much to log on stderr: {' '.join(LEVELS)}",
    "TOPO_FILE": "take the machine from this file or catalogue name instead of probing",
    "TOPO_DUMP_FILE": "write the machine that was found, as JSON",
    "GRAPH_FILE": "take the plan from this file",
    "GRAPH_DUMP_FILE": "write the plan, as JSON",
    "ALGO": "schemes per collective: allreduce:chain;broadcast:^mpi",
    "PLAN_SECONDS": "seconds of CPU time for planning, which then ends with the best so far and its gap (default 5)",
    "TIMEOUT": "seconds without progress after which a collective fails (default 1800)",
    "WARN_AFTER": "seconds after which a wait is warned of, and again after each 2 of it; 0: never (default 30)",
    "WIRE": "accumulator or operand: the type in which partial results of 16-bit types travel (default accumulator)",
    "EXECUTOR": "auto, c or numpy: what executes programs on CPU ranks",
    "CMA_DISABLE": "1: ranks do not read one another's memory",
    "CMA_NTHREADS": "1 or 2: threads that read long vectors where half of the ranks only wait (default 2)",
    "GPU_DISABLE": "1: GPUs are not used, and arrays in GPU memory are refused",
    "RANKS_PER_GPU": "ranks that may share a GPU and take turns on it (default 1; for tests)",
    "GRAPH_MIXING": "0: CUDA graphs get no nodes that keep all calls in order; what overlaps is an error (default 1)",
    "CUDA_AWARE": "1 or 0: MPI takes GPU memory, or does not, whatever it says itself",
    "MAX_CTAS": "CTAs of a kernel at most, so that other kernels have room (default: the GPU's SMs but 32)",
    "GATE_FROM": "bytes from which on a GPU call first waits for all ranks in one warp; off: none does (default)",
    "TRACE": "write a trace of the calls to this file, for Perfetto or chrome://tracing",
    "TRACE_EVENTS": "the last events that a rank keeps for it, of each communicator (default 65536)",
    "TIMES": "1: stats() and top also say how long links and trees were busy, and who waited for whom",
    "BUFFSIZE": "bytes of shared memory for slots per rank",
    "END_WITH_LAUNCHER": "0: a rank goes on when the launcher that started it has ended (default: it ends after 1 s)",
    "CACHE_DIR": "where the compiled C executor is kept",
    "NCCL": "off, all, or allreduce:..4M,allgather: which calls `blinkmpi nccl run` may make in NCCL's place",
    "NCCL_LIBRARY": "NCCL's libnccl.so.2, where `blinkmpi nccl` does not find it",
    "NCCL_COUNTS": "the folder where processes count NCCL's calls; `blinkmpi nccl count` sets it",
    "NODES": "4+4: virtual nodes of so many ranks each, which share no memory (for tests and what-if measurements)",
    "NODE_ID": "overrides which ranks count as one node (for tests)",
    "TESTS_MIN_BW": "bench fails below 0.9 of this average bus bandwidth (GB/s)",
}


class Settings(Value, frozen=True):
    """What the environment says, parsed."""

    debug: str = "WARN"
    topo_file: str = ""
    topo_dump_file: str = ""
    graph_file: str = ""
    graph_dump_file: str = ""
    algo: str = ""
    plan_s: float = PLAN_S
    timeout_s: float = TIMEOUT_S
    warn_after_s: float = WARN_AFTER_S
    wire: str = ""
    executor: str = "auto"
    buffer_bytes: int = 8 << 20
    cma_disable: bool = False
    cma_threads: int = 2
    gpu_disable: bool = False
    ranks_per_gpu: int = 1
    graph_mixing: bool = True
    cuda_aware: bool | None = None
    max_ctas: int = 0
    gate_from: int | None = None
    trace: str = ""
    trace_events: int = TRACE_EVENTS
    times: bool = False
    end_with_launcher: bool = True
    nodes: tuple[int, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def events(self) -> int:
        """Events that a rank keeps of each communicator; 0: none, and it measures no times."""
        return self.trace_events if self.trace else LEAST_EVENTS if self.times else 0

    def wants(self, level: str) -> bool:
        """Whether messages of ``level`` are shown."""
        return LEVELS.index(level) <= LEVELS.index(self.debug)


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """Parse the environment.

    Raises:
        SettingsError: naming the variable, its value and what was expected.
    """
    given = os.environ if environ is None else environ
    ours = {k.removeprefix(PREFIX): v for k, v in given.items() if k.startswith(PREFIX)}
    debug = (ours.get("DEBUG") or "WARN").upper()
    if debug not in LEVELS:
        raise SettingsError(f"BLINKMPI_DEBUG={quoted(ours['DEBUG'])}: expected one of {', '.join(LEVELS)}")
    executor = ours.get("EXECUTOR") or "auto"
    if executor not in ("auto", "c", "numpy"):
        raise SettingsError(f"BLINKMPI_EXECUTOR={quoted(executor)}: expected auto, c or numpy")
    wire = ours.get("WIRE", "")
    if wire not in ("", *WIRES):
        raise SettingsError(f"BLINKMPI_WIRE={quoted(wire)}: expected {' or '.join(WIRES)}")
    never = ours.get("WARN_AFTER", "").strip() in ("0", "0.0")
    texts = ("TOPO_FILE", "TOPO_DUMP_FILE", "GRAPH_FILE", "GRAPH_DUMP_FILE", "ALGO", "TRACE")
    return Settings(
        debug=debug,
        **{name.lower(): ours.get(name, "") for name in texts},
        plan_s=_number(ours, "PLAN_SECONDS", PLAN_S, most=LONGEST_S),
        timeout_s=_number(ours, "TIMEOUT", TIMEOUT_S, most=LONGEST_S),
        warn_after_s=0.0 if never else _number(ours, "WARN_AFTER", WARN_AFTER_S, most=LONGEST_S),
        wire=wire,
        executor=executor,
        buffer_bytes=int(_number(ours, "BUFFSIZE", 8 << 20, least=LEAST_BUFFER_BYTES, most=MOST_BUFFER_BYTES)),
        cma_disable=_switch(ours, "CMA_DISABLE"),
        cma_threads=_choice(ours, "CMA_NTHREADS", (1, 2), 2),
        gpu_disable=_switch(ours, "GPU_DISABLE"),
        ranks_per_gpu=int(_number(ours, "RANKS_PER_GPU", 1, least=1, most=MOST_RANKS_PER_GPU)),
        graph_mixing=_switch(ours, "GRAPH_MIXING", "1"),
        cuda_aware=_switch(ours, "CUDA_AWARE") if ours.get("CUDA_AWARE") else None,
        max_ctas=int(_number(ours, "MAX_CTAS", 0, least=1, most=MOST_CTAS)),
        gate_from=_bytes_or_off(ours, "GATE_FROM"),
        trace_events=int(_number(ours, "TRACE_EVENTS", TRACE_EVENTS, least=LEAST_EVENTS, most=MOST_EVENTS)),
        times=_switch(ours, "TIMES"),
        end_with_launcher=_switch(ours, "END_WITH_LAUNCHER", "1"),
        nodes=_sizes(ours, "NODES"),
        unknown=tuple(_hint(name) for name in sorted(ours) if name not in KNOWN),
    )


def log(settings: Settings, level: str, text: str) -> None:
    """Write one log line to stderr if the settings want it."""
    if settings.wants(level):
        where = f"{os.uname().nodename}:{os.getpid()}:{threading.get_native_id()}"
        print(f"{where} BLINKMPI {level} {text}", file=sys.stderr, flush=True)


class LogOnce:
    """Writes log lines, each text the first time alone."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._said: set[str] = set()

    def __call__(self, text: str, level: str = "WARN") -> None:
        """Write a line."""
        if self._settings.wants(level) and text not in self._said:
            self._said.add(text)
            log(self._settings, level, text)


def _switch(ours: Mapping[str, str], name: str, default: str = "0") -> bool:
    text = ours.get(name) or default
    if text not in ("0", "1"):
        raise SettingsError(f"{PREFIX}{name}={quoted(text)}: expected 0 or 1")
    return text == "1"


def _choice(ours: Mapping[str, str], name: str, choices: tuple[int, ...], default: int) -> int:
    text = ours.get(name) or str(default)
    if text not in map(str, choices):
        raise SettingsError(f"{PREFIX}{name}={quoted(text)}: expected {' or '.join(map(str, choices))}")
    return int(text)


def _number(ours: Mapping[str, str], name: str, default: float, *, least: float = 0.0, most: float = math.inf) -> float:
    text = ours.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (value > 0 and least <= value <= most):
        low = f"at least {least:.0f}" if least else "more than 0"
        raise SettingsError(f"{PREFIX}{name}={quoted(text)}: expected a number, {low} and at most {most:.0f}")
    return value


def _bytes_or_off(ours: Mapping[str, str], name: str) -> int | None:
    text = (ours.get(name) or OFF).strip()
    number = whole_number(text)
    if text != OFF and (number is None or number > MOST_BUFFER_BYTES):
        raise SettingsError(
            f"{PREFIX}{name}={quoted(text)}: expected a number of bytes, 0 to {MOST_BUFFER_BYTES}, or {OFF}"
        )
    return number


def _sizes(ours: Mapping[str, str], name: str) -> tuple[int, ...]:
    text = ours.get(name) or ""
    sizes = [whole_number(part.strip()) for part in text.split("+")] if text else []
    if not all(size and size <= MOST_RANKS for size in sizes):
        raise SettingsError(f"{PREFIX}{name}={quoted(text)}: expected the ranks of each node, as in 4+4")
    return tuple(size for size in sizes if size)


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name[:80], KNOWN, n=1)
    return f"{PREFIX}{brief(name)} is unknown" + (f"; did you mean {PREFIX}{near[0]}?" if near else "")
