"""What a rank did and what was wrong, kept while a job runs so that a killed one tells it, too."""

import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.campaign.steps import Call

MOST_WRONG = 20  # texts that are kept; what is beyond is counted


class Record:
    """Counts and mistakes of one rank, in a file of its box."""

    def __init__(self, box: Path, rank: int) -> None:
        self._path = box / f"{rank}.json"
        self.rank, self.steps, self.step = rank, 0, -1
        self.calls = 0
        self.kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.faults: Counter[str] = Counter()
        self.slowest: dict[str, float] = {}
        self.wrong: list[str] = []
        self.wrong_count = 0
        self.device = ""

    def made(self, call: Call, comm_rank: int, comm_size: int) -> None:
        """Count a call, once for its communicator."""
        if comm_rank:
            return
        self.calls += 1
        case = call.case
        facts = {
            "collective": case.collective, "how": call.how, "memory": call.memory, "type": case.dtype,
            "operation": case.op, "ranks": str(comm_size), "in place": str(case.in_place).lower(),
        }  # fmt: skip
        for name, value in facts.items():
            if value:
                self.kinds[name][value] += 1

    def fault(self, name: str, seconds: float) -> None:
        """Count a fault and how long this rank's part in it took."""
        self.faults[name] += not self.rank
        self.slowest[name] = max(self.slowest.get(name, 0.0), seconds)

    def mistake(self, text: str) -> None:
        """Keep what was wrong."""
        self.wrong_count += 1
        if len(self.wrong) < MOST_WRONG:
            self.wrong.append(f"step {self.step}, rank {self.rank}: {text}")

    def write(self, *, done: bool = False) -> None:
        """Write all of it; a reader finds a whole file always."""
        document: dict[str, Any] = {
            "done": done, "steps": self.steps, "step": self.step, "calls": self.calls,
            "kinds": {name: dict(sorted(found.items())) for name, found in sorted(self.kinds.items())},
            "faults": dict(sorted(self.faults.items())), "slowest": self.slowest,
            "wrong": self.wrong, "wrong_count": self.wrong_count, "device": self.device,
        }  # fmt: skip
        draft = self._path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(document))
        draft.rename(self._path)
