"""A function on ranks, and the report of what came of it: :func:`run_ranks`."""

import contextlib
import inspect
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.jobs import GRACE_S, ROOT, TAIL, Outcome, run_command


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the function ended on one rank; ``outcome`` is passed, skipped, failed or silent."""

    outcome: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """How a function ended on all ranks, and how their job ended."""

    verdicts: tuple[Verdict, ...]
    job: Outcome

    @property
    def skipped(self) -> str | None:
        """The reason, when every rank skipped and nothing else is wrong."""
        clean = self.job.rc == 0 and not self.job.timed_out and not self.job.leftovers
        all_skipped = all(v.outcome == "skipped" for v in self.verdicts)
        return self.verdicts[0].detail if clean and all_skipped else None

    @property
    def problem(self) -> str | None:
        """Say what is wrong, or None."""
        job, outcomes = self.job, {v.outcome for v in self.verdicts}
        if outcomes in ({"passed"}, {"skipped"}) and job.rc == 0 and not job.timed_out and not job.leftovers:
            return None
        lines = [f"{len(self.verdicts)} ranks, mpirun exit status {job.rc}, {job.seconds:.1f} s"]
        if job.timed_out:
            lines.append("ended from outside: out of time")
        lines += [f"outlived mpirun: {line}" for line in job.leftovers]
        order = sorted(range(len(self.verdicts)), key=lambda r: (self.verdicts[r].outcome != "failed", r))
        for rank in order:
            verdict = self.verdicts[rank]
            what = (
                "ended without a verdict (killed, hung or crashed)" if verdict.outcome == "silent" else verdict.outcome
            )
            lines.append(f"--- rank {rank}: {what}")
            if verdict.detail:
                lines.append(verdict.detail.rstrip()[-TAIL:])
        return "\n".join([*lines, "--- output of the ranks", job.output[-TAIL:]])


def run_ranks(
    n: int,
    target: Callable[..., object],
    timeout: float,
    *,
    env: Mapping[str, str | None] | None = None,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
) -> Report:
    """Call ``target(comm, *args, **kwargs)`` on ``n`` ranks; ``comm`` is a copy of COMM_WORLD.

    ``target`` is a function at the top of a module; the arguments must pickle.
    """
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as name:
        order = {
            "path": [str(ROOT), *(p for p in sys.path if p)],
            "module": target.__module__,
            "file": inspect.getfile(target),
            "function": target.__name__,
            "timeout": timeout,
        }
        box = Path(name)
        (box / "order.json").write_text(json.dumps(order))
        (box / "arguments").write_bytes(pickle.dumps((tuple(args), dict(kwargs or {}))))
        # Unbuffered, print() writes its newline apart and the ranks' lines mix.
        variables = {"PYTHONUNBUFFERED": None, **(env or {})}
        outcome = run_command(
            n, [sys.executable, str(Path(__file__).parent), name], timeout=timeout + GRACE_S, env=variables
        )
        return Report(tuple(_verdict(box, rank) for rank in range(n)), outcome)


def _verdict(box: Path, rank: int) -> Verdict:
    """Read what a rank wrote; one that wrote nothing is silent, with the stacks that its watchdog left."""
    with contextlib.suppress(OSError):
        return Verdict(**json.loads((box / f"{rank}.json").read_text()))
    stacks = box / f"{rank}.stacks"
    return Verdict("silent", stacks.read_text(errors="replace") if stacks.exists() else "")


def abort(world: Any) -> None:
    """End the job; first leave ranks that fail at the same moment the time to say so."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.3)
    world.Abort(1)
