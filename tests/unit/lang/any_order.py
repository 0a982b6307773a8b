"""Run a program chunk by chunk in an order drawn by chance, on the buffers of calls in place: what slots allow."""

import random
from collections import defaultdict

import numpy as np

from blinkmpi.program.ir import Program, Stage
from blinkmpi.program.reduction import Array


def run_in_place(program: Program, buffers: list[Array], rng: random.Random) -> None:
    """An allreduce of sums in place; whoever is ready may be next, and some ranks and stages are slow for long."""
    slots: dict[tuple[int, int], Array] = {}
    done = [0] * len(program.stages)
    reader: dict[int, list[int]] = defaultdict(list)
    writer: dict[int, int] = {}
    for i, stage in enumerate(program.stages):
        writer |= dict.fromkeys(stage.outs, i)
        for c in stage.ins:
            reader[c].append(i)
    speed = [rng.random() ** 4 for _ in program.stages]

    def ready(i: int, stage: Stage) -> bool:
        k = done[i]
        return (
            k * program.chunk_of(stage) < stage.count
            and all(done[writer[c]] > k for c in stage.ins)
            and all(done[j] > k - program.depth for c in stage.outs for j in reader[c])
        )

    while able := [i for i, stage in enumerate(program.stages) if ready(i, stage)]:
        i = rng.choices(able, [speed[i] for i in able])[0]
        stage, k = program.stages[i], done[i]
        first = k * program.chunk_of(stage)
        size = min(program.chunk_of(stage), stage.count - first)

        def place(at: int, stage: Stage = stage, first: int = first, size: int = size) -> Array:
            return buffers[stage.rank][at + first : at + first + size]

        operands = [slots[stage.ins[x], k] if x >= 0 else place(stage.local or 0) for x in stage.fold]
        value = np.sum(operands, axis=0)
        for c in stage.outs:
            slots[c, k] = value
        if stage.store is not None:
            place(stage.store)[:] = value
        done[i] += 1
    assert all(k * program.chunk_of(s) >= s.count for k, s in zip(done, program.stages, strict=True)), "it is stuck"
