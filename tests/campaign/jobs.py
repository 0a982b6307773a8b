"""Starts a campaign's jobs, waits for them or ends them, and says what each of them did."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.campaign.deadly import DEADLY, judge
from tests.campaign.rank import AFTER_S, Order
from tests.campaign.steps import Mix
from tests.harness import PATIENCE_S, ROOT, TAIL, Job, Outcome, SharedMemoryWatch

DEADLY_S = 4 * PATIENCE_S  # that a job may take which a fault ends
SMALL_SHM_MIB = 640  # for each virtual node, which takes a quarter of what is left for each communicator
CROWDED_LOAD_S = 150.0  # that all kernels take to compile, at most
SHORT = 9  # functions of a thread
ULFM = ("--with-ft", "ulfm")


@dataclass
class Result:
    """What came of a job."""

    name: str
    seed: int
    ranks: int
    calls: int = 0
    steps: int = 0
    seconds: float = 0.0
    kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    slowest: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    device: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    again: str = ""  # the command that does the same


def calls(seed: int, seconds: float, mix: Mix, *, steps: int = 1 << 60, env: dict[str, str] | None = None) -> Result:
    """Run the steps of a seed on one machine."""
    order = Order(seed, seconds, mix, steps)
    nodes = 1 + (env or {}).get("BLINKMPI_NODES", "").count("+")
    prefix = small_shm(nodes) if mix.small_shm else []
    with _box() as box, SharedMemoryWatch() as watch:
        argv = [sys.executable, "-m", "tests.campaign.rank", str(box), json.dumps(asdict(order))]
        variables = {"PYTHONPATH": str(ROOT), **watch.environment, **(env or {})}
        with Job(mix.n, argv, timeout=seconds + AFTER_S + 5, env=variables, prefix=prefix, cwd=ROOT) as job:
            outcome = job.wait()
        left = watch.left()
        return _read(Result("calls", seed, mix.n, settings=env or {}), box, outcome, left)


def hosts(seed: int, seconds: float, layout: tuple[int, ...], mix: Mix, *, steps: int = 1 << 60) -> Result:
    """Run the steps of a seed on hosts made of namespaces, whose links go down and up when the ranks ask for it."""
    from tests.hosts.world import World

    order = Order(seed, seconds, mix, steps)
    with _box() as box, World(len(layout)) as world:
        argv = [sys.executable, "-m", "tests.campaign.rank", str(box), json.dumps(asdict(order))]
        with (
            world.start(layout, argv, timeout=seconds + AFTER_S + 5, env={"PYTHONPATH": str(ROOT)}) as job,
            _links(box, lambda number, state: world.link(f"host{number % len(layout)}", state)),
        ):
            outcome = job.wait()
        return _read(Result("hosts", seed, mix.n), box, outcome, [])


def deadly(fault: str, seed: int, n: int, memory: str = "numpy") -> Result:
    """Run a job that a fault ends, with calls on host or GPU memory (``cupy``)."""
    options = ULFM if DEADLY[fault].ft else ()
    result = Result(fault, seed, n, faults={fault: 1})
    with _box() as box, SharedMemoryWatch() as watch:
        argv = [sys.executable, "-m", "tests.campaign.deadly", str(box), str(seed), fault, memory]
        variables = {"PYTHONPATH": str(ROOT), **watch.environment}
        with Job(n, argv, timeout=DEADLY_S, env=variables, options=options, cwd=ROOT) as job:
            outcome = job.wait()
        result.seconds = result.slowest[fault] = outcome.seconds
        if outcome.timed_out:
            result.hung.append(f"the job did not end within {DEADLY_S:.0f} s:\n{outcome.output[-TAIL:]}")
        else:
            found = judge(fault, box, n, seed, rc=outcome.rc, output=outcome.output)
            found += [f"{line} outlived the job" for line in outcome.leftovers]
            result.wrong += [f"{text}\n{outcome.output[-TAIL:]}" for text in found]
        result.again = (
            f"mpirun {' '.join(options)} -np {n} python -m tests.campaign.deadly FOLDER {seed} {fault} {memory}"
        )
    return result


def crowded(seed: int, n: int, seconds: float) -> Result:
    """Run ranks that share GPUs: calls by packets on the transport itself, because a Communicator refuses them."""
    result = Result("crowded", seed, n)
    with _box() as box:
        file = box / "torture.json"
        options = ["--seconds", str(seconds), "--seed", str(seed), "--counts", "63,8192,500009", "--replays", "4"]
        argv = [sys.executable, "-m", "tests.campaign.torture", *options, "-o", str(file)]
        with Job(n, argv, timeout=seconds + CROWDED_LOAD_S, env={"PYTHONPATH": str(ROOT)}, cwd=ROOT) as job:
            outcome = job.wait()
        done: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    result.calls, result.seconds = done.get("calls", 0), outcome.seconds
    result.kinds["crowded"] = {f"{n} ranks": result.calls}
    if outcome.timed_out:
        result.hung.append(outcome.output[-TAIL:])
    elif outcome.rc:  # 1 if an element was wrong
        result.wrong.append(f"{done.get('first_wrong', [])[:8]}\n{outcome.output[-TAIL:]}")
    result.again = f"mpirun -np {n} python -m tests.campaign.torture {' '.join(options)}"
    return result


def small_shm(nodes: int = 1) -> list[str]:
    """The command in which the /dev/shm of some virtual nodes is small."""
    rootless = [] if os.geteuid() == 0 else ["--map-root-user"]
    mount = f'mount -t tmpfs -o size={nodes * SMALL_SHM_MIB}m tmpfs /dev/shm && exec "$@"'
    return ["unshare", *rootless, "--mount", "bash", "-c", mount, "bash"]


def may_mount() -> bool:
    """Whether a small /dev/shm may be made here."""
    return subprocess.run([*small_shm(), "true"], capture_output=True, timeout=20).returncode == 0


@contextmanager
def _box() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="blinkmpi-campaign-") as name:
        yield Path(name)


@contextmanager
def _links(box: Path, link: Callable[[int, str], None]) -> Iterator[None]:
    """Take links down and up as the ranks of a job ask, meanwhile."""
    end = threading.Event()

    def serve() -> None:
        while not end.wait(0.02):
            for request in sorted(box.glob("link-*.request")):
                number, seconds = int(request.stem.partition("-")[2]), float(request.read_text())
                link(number, "down")
                time.sleep(seconds)
                link(number, "up")
                request.unlink()
                request.with_suffix(".done").touch()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _read(result: Result, box: Path, outcome: Outcome, left: list[str]) -> Result:
    """Put together what the ranks wrote and how their job ended."""
    found: list[dict[str, Any]] = []
    for rank in range(result.ranks):
        path = box / f"{rank}.json"
        found.append(json.loads(path.read_text()) if path.exists() else {})
    result.seconds = outcome.seconds
    for one in found:
        result.calls += one.get("calls", 0)
        result.steps = max(result.steps, one.get("steps", 0))
        result.wrong += one.get("wrong", [])
        result.device = result.device or one.get("device", "")
        add(result.faults, one.get("faults", {}))
        for name, counts in one.get("kinds", {}).items():
            add(result.kinds.setdefault(name, {}), counts)
        for name, seconds in one.get("slowest", {}).items():
            result.slowest[name] = max(seconds, result.slowest.get(name, 0.0))
    silent = [rank for rank, one in enumerate(found) if not one.get("done")]
    stacks = {rank: (box / f"{rank}.stacks").read_text(errors="replace") for rank in silent
              if (box / f"{rank}.stacks").exists()}  # fmt: skip
    dumped = "".join(f"--- rank {rank}\n{text[-TAIL:]}" for rank, text in stacks.items() if text)
    if outcome.timed_out or "Timeout (" in dumped:
        at = [one.get("step", -1) for one in found]
        short = "".join(f"rank {rank}\n{short_stacks(text)}" for rank, text in stacks.items())
        result.hung.append(f"the ranks were at steps {at}\n{short}{dumped}\n{outcome.output[-TAIL:]}")
    elif silent and not result.wrong:
        result.wrong.append(f"ranks {silent} ended early:\n{dumped}\n{outcome.output[-TAIL:]}")
    elif outcome.rc and not result.wrong:
        result.wrong.append(f"the job's exit status is {outcome.rc}:\n{outcome.output[-TAIL:]}")
    result.wrong += [f"{line} outlived the job" for line in outcome.leftovers]
    result.wrong += [f"{name} is left in /dev/shm" for name in left]
    return result


def short_stacks(dumped: str) -> str:
    """What faulthandler wrote, a line for each thread: its functions, the innermost first."""
    lines = []
    for thread in re.split(r"^(?=Thread |Current thread )", dumped, flags=re.MULTILINE)[1:]:
        calls = re.findall(r'File ".*?([^/"]+)", line (\d+) in (.+)', thread)
        lines.append("  " + " < ".join(f"{name} ({file}:{line})" for file, line, name in calls[:SHORT]) + "\n")
    return "".join(lines)


def add(total: dict[str, int], more: dict[str, int]) -> None:
    """Add counts to counts."""
    for name, count in more.items():
        total[name] = total.get(name, 0) + count
