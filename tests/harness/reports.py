"""What came of a function on ranks: a :class:`Verdict` of each rank, a :class:`Report` of all."""

from dataclasses import dataclass

from tests.harness.jobs import TAIL, Outcome


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
