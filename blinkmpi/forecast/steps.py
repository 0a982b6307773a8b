"""What the C executor does in each step of a program, by kind: pure.

A kind says how many operands come from where, whether they are folded, and where the value goes. All steps of a kind
pass the same code over the same sorts of memory, so they cost about the same for each byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..program.ir import Program, Stage
from ..program.reduction import dtype_of
from ..transport.host.host_program import past_caches, resolve
from ..transport.host.native_rows import row_order
from ..transport.host.outlook import HostOutlook
from ..transport.host.single_copy import ExportedChunks

SHARED_BYTES = 3 << 19  # as in single_copy.h: chunks from here on are read by two threads, where there is a second one
TWO_THREADS = ", two threads"


@dataclass(frozen=True)
class HostSteps:
    """A program as the ranks of one node execute it.

    ``stream``: whether results are written past the caches. ``threads``: how many read a long chunk of another process.
    """

    program: Program
    exported: Mapping[int, ExportedChunks]
    stream: bool
    threads: int

    def rows(self, rank: int) -> list[tuple[Stage, bool]]:
        """The rows of a rank in their order: stage, and whether it only waits for readers."""
        return list(row_order(self.program, rank, self.exported))

    def kind(self, stage: Stage) -> str:
        """The kind of a stage's steps, as ``own+3cma > result``; of folds, with operation and type before it."""
        names = Counter("own" if i < 0 else "cma" if stage.ins[i] in self.exported else "slot" for i in stage.fold)
        operands = "+".join(f"{many if many > 1 else ''}{name}" for name, many in sorted(names.items()))
        slots = sum(c not in self.exported for c in stage.outs)
        result = "result past the caches" if self.stream else "result"
        targets = "+".join(filter(None, (result if stage.store is not None else "", "slot" if slots else "")))
        call = self.program.call
        fold = f"{call.op} of {call.dtype}: " if len(stage.fold) > 1 or (stage.final and call.op == "avg") else ""
        chunk = self.program.chunk_of(stage) * call.itemsize
        shared = self.threads > 1 and "cma" in names and chunk >= SHARED_BYTES
        readers = TWO_THREADS if shared else ""
        return f"{fold}{operands} > {targets}{readers}"

    def levels(self) -> dict[int, int]:
        """How many stages lie before each stage, by its place in the program: those of one level can run at once."""
        writer = {c: i for i, stage in enumerate(self.program.stages) for c in stage.outs}
        found: dict[int, int] = {}

        def level(i: int) -> int:
            if i not in found:
                found[i] = 1 + max((level(writer[c]) for c in self.program.stages[i].ins), default=-1)
            return found[i]

        for i in range(len(self.program.stages)):
            level(i)
        return found

    def mib(self, stage: Stage) -> float:
        """The span of a stage in MiB."""
        return stage.count * dtype_of(self.program.call.dtype).itemsize / (1 << 20)


def host_steps(host: HostOutlook, program: Program, protocol: str) -> HostSteps:
    """The steps that the ranks of a transport make of a program; the same on every rank."""
    cma = protocol in ("cma", "one_shot_cma") and not host.no_cma
    resolved = resolve(program, host.window, host.native, cma=cma)
    threads = 2 if host.helper.serves(resolved.program, resolved.exported) else 1
    return HostSteps(resolved.program, resolved.exported, past_caches(program.call), threads)
