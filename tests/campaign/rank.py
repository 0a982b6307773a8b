"""The program of a rank of a campaign's job: ``python -m tests.campaign.rank BOX ORDER``, ORDER as JSON.

It draws the steps of its seed, does them, and writes into BOX what it did (``record.py``), and its stacks if it has to
be ended.
"""

import faulthandler
import json
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI

import blinkmpi
from blinkmpi.topology import machine, modify
from tests.campaign.doer import Doer
from tests.campaign.faults import Faults
from tests.campaign.record import Record
from tests.campaign.steps import Mix, steps
from tests.conformance import COLLECTIVES, PLANNED

LOOK = 16  # steps between two looks at the clock
TIMEOUT_S = 30.0  # of the job's communicators
AFTER_S = 75.0  # that the last steps and the end of a job may take: more than two deadlines
OURS = ";".join(f"{name}:^mpi" for name in sorted({PLANNED.get(name, name) for name in COLLECTIVES}))
DGX1 = {2: "0,3", 3: "0,3,4", 4: "1,4,5,6", 5: "0-4", 6: "0-5", 7: "0-6", 8: "0-7"}  # parts of a DGX-1V, by ranks


@dataclass(frozen=True, slots=True)
class Order:
    """A job: the steps of a seed, for some seconds or up to a number of steps."""

    seed: int
    seconds: float
    mix: Mix
    steps: int = 1 << 60


def communicators(world: MPI.Intracomm, order: Order) -> list[blinkmpi.Communicator]:
    """Make a job's communicators: by default choice, and three of other kinds; the last two are for threads.

    On GPUs all are by default choice, and registered memory is each one's own.
    """
    make = partial(blinkmpi.Communicator, world, timeout=TIMEOUT_S)
    if order.mix.gpus:
        return [make() for _ in range(4)]
    emulated = modify(machine("dgx-1v"), gpus=DGX1[world.size]) if world.size > 1 else None
    kinds: list[dict[str, Any]] = [
        {"algo": OURS}, {"algo": OURS, "executor": "numpy"}, {"deterministic": True}, {"topology": emulated},
        {"strict": True},
    ]  # fmt: skip
    first, *others = [make(), *(make(**kind) for kind in random.Random(order.seed).sample(kinds, 3))]
    return [first, first.Dup(), *others, first.Dup(), others[0].Dup()]


def work(world: MPI.Intracomm, box: Path, order: Order, record: Record) -> None:
    """Do the steps."""
    comms = communicators(world, order)
    record.device = comms[0].executor if not order.mix.gpus else getattr(comms[0].gpu, "name", "no GPU")
    doer = Doer(world, comms, order.mix, record)
    faults = Faults(doer, box)
    until = time.monotonic() + order.seconds
    for step in steps(order.seed, order.mix):
        if step.number % LOOK == 0:
            record.write()
            if world.bcast(time.monotonic() > until or record.wrong_count > 0):
                break
        if step.number >= order.steps:
            break
        record.step = step.number
        if step.what == "fault":
            faults.do(step)
        else:
            doer.do(step)
        record.steps += 1
    for comm in comms:
        comm.Free()


def main(folder: str, text: str) -> None:
    """Be a rank; any exception is recorded and ends the job."""
    box, raw = Path(folder), json.loads(text)
    order = Order(raw["seed"], raw["seconds"], Mix(**{**raw["mix"], "memories": tuple(raw["mix"]["memories"])}),
                  raw["steps"])  # fmt: skip
    world = MPI.COMM_WORLD
    with (box / f"{world.rank}.stacks").open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGTERM, stacks, all_threads=True, chain=True)
        faulthandler.dump_traceback_later(order.seconds + AFTER_S, exit=True, file=stacks)
        record = Record(box, world.rank)
        try:
            work(world, box, order, record)
        except BaseException:
            record.mistake(f"this came:\n{traceback.format_exc()[-3000:]}")
            record.write()
            sys.stdout.flush()
            time.sleep(1.0)  # others that fail at the same time say so, too
            os._exit(1)
        record.write(done=True)
        faulthandler.dump_traceback_later(AFTER_S, exit=True, file=stacks)
        MPI.Finalize()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGTERM)
        faulthandler.disable()


if __name__ == "__main__":
    main(*sys.argv[1:])
