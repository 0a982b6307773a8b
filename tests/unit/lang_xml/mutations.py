"""Spoil MSCCL's XML at random and see whether the checker is right about each: proved, or refused for a true reason.

Proved files must give right results on the :mod:`.machine`, in every order that is drawn. Refused ones must be wrong
there: a deadlock stops it in every order, a race can be run both ways, a wrong result is wrong, and what is said to be
read before it is written is. Only refusals for structure are taken as they are.

    python -m tests.unit.lang_xml.mutations --count 10000 -o benchmarks/results/lang-mutations.json
"""

import argparse
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from msgspec.structs import replace

from blinkmpi.lang.flow import Flow, Goal
from blinkmpi.lang.xml.check import XmlReport, judge
from blinkmpi.lang.xml.export import export
from blinkmpi.lang.xml.file import SLOTS, XmlAlgorithm, XmlBlock, XmlStep, parse_xml, write_xml
from tests.unit.lang_xml.flows import MAKERS
from tests.unit.lang_xml.machine import Machine

ORDERS = 12  # in which a proved file is run
PLACE = re.compile(r"gpu (\d+) tb (\d+) step (\d+)")
Position = tuple[int, int, int]  # GPU, thread block, step
Steps = list[list[list[XmlStep]]]
Edit = Callable[[random.Random, XmlAlgorithm, Steps, Position], None]


def bases() -> list[tuple[str, XmlAlgorithm]]:
    """Right files: each algorithm in place and not, on several channels and instances, and for several slots."""
    shapes = [(False, 1, 1, "Simple"), (True, 1, 1, "Simple"), (True, 2, 1, "LL"), (False, 1, 2, "Simple")]
    return [
        (f"{name}, {'in place, ' if here else ''}{channels} x {instances}",
         export(make(), name=name, in_place=here, channels=channels, instances=instances, protocol=protocol))
        for name, make in MAKERS.items()
        for here, channels, instances, protocol in shapes
    ]  # fmt: skip


# ---------------------------------------------------------------- mutations


def drop(rng: random.Random, algorithm: XmlAlgorithm, steps: Steps, at: Position) -> None:
    """A step is missing; what is waited for keeps its step or its number."""
    g, b, s = at
    del steps[g][b][s]
    if rng.random() < 0.7:
        for block in steps[g]:
            for i, step in enumerate(block):
                if step.depid == b and step.deps > s:
                    block[i] = replace(step, deps=step.deps - 1)


def drop_message(rng: random.Random, algorithm: XmlAlgorithm, steps: Steps, at: Position) -> None:
    """A message is missing on both sides, where neither side does anything else."""
    pairs = list(messages(algorithm, steps))
    found = [
        (one, other) for one, other in pairs if type_at(steps, one) == "s" and type_at(steps, other) in ("r", "rrc")
    ]
    for place in sorted(rng.choice(found), key=lambda p: -p[2]) if found else ():
        drop(random.Random(1), algorithm, steps, place)


def drop_wait(rng: random.Random, algorithm: XmlAlgorithm, steps: Steps, at: Position) -> None:
    """A step waits for one fewer."""
    waiting = [p for p in positions(steps) if steps[p[0]][p[1]][p[2]].depid >= 0]
    if not waiting:
        return drop(rng, algorithm, steps, at)
    g, b, s = rng.choice(waiting)
    if steps[g][b][s].type == "nop":
        return drop(random.Random(1), algorithm, steps, (g, b, s))
    before = steps[g][b][s - 1] if s else None
    if before is not None and before.type == "nop":
        steps[g][b][s] = replace(steps[g][b][s], depid=before.depid, deps=before.deps)
        return drop(random.Random(1), algorithm, steps, (g, b, s - 1))
    steps[g][b][s] = replace(steps[g][b][s], depid=-1, deps=-1)
    return None


def move_wait(rng: random.Random, algorithm: XmlAlgorithm, steps: Steps, at: Position) -> None:
    """A step waits for another one than it should."""
    waiting = [p for p in positions(steps) if steps[p[0]][p[1]][p[2]].depid >= 0] or [at]
    g, b, s = rng.choice(waiting)
    depid = rng.choice([steps[g][b][s].depid, rng.randrange(len(steps[g]))])
    deps = rng.randrange(max(1, len(steps[g][depid])))
    steps[g][b][s] = replace(steps[g][b][s], depid=depid, deps=deps)


def shift(rng: random.Random, algorithm: XmlAlgorithm, steps: Steps, at: Position) -> None:
    """A place is another one."""
    g, b, s = at
    step = steps[g][b][s]
    sides = [side for side in ("src", "dst") if getattr(step, side) is not None]
    if not sides:
        return drop(rng, algorithm, steps, at)
    side = rng.choice(sides)
    buffer, chunk = getattr(step, side)
    gpu = algorithm.gpus[g]
    sizes = {"i": gpu.inputs, "o": gpu.outputs, "s": gpu.scratch}
    if rng.random() < 0.4:
        buffer = rng.choice([name for name, size in sizes.items() if size])
        chunk = rng.randrange(sizes[buffer])
    else:
        chunk = max(0, chunk + rng.choice((-1, 1, 2)))
    steps[g][b][s] = replace(step, **{side: (buffer, chunk)})
    return None


def swap(rng: random.Random, algorithm: XmlAlgorithm, steps: Steps, at: Position) -> None:
    """Two steps of a thread block have changed places."""
    g, b, s = at
    block = steps[g][b]
    other = rng.choice([min(s + 1, len(block) - 1), rng.randrange(len(block))])
    block[s], block[other] = block[other], block[s]


def resize(rng: random.Random, algorithm: XmlAlgorithm, steps: Steps, at: Position) -> None:
    """A cnt is another one, on one side of a message or on both."""
    pairs = [pair for pair in messages(algorithm, steps) if at in pair]
    by = rng.choice((-1, 1))
    for g, b, s in pairs[0] if pairs and rng.random() < 0.7 else (at,):
        if type_at(steps, at) == "nop":
            return drop(rng, algorithm, steps, at)
        steps[g][b][s] = replace(steps[g][b][s], count=max(1, steps[g][b][s].count + by))
    return None


def retype(rng: random.Random, algorithm: XmlAlgorithm, steps: Steps, at: Position) -> None:
    """A step does something else with the same places."""
    g, b, s = at
    step = steps[g][b][s]
    others = {"rrc": ["r"], "r": ["rrc"], "rcs": ["rrcs"], "rrcs": ["rcs", "rrs"], "rrs": ["rrcs"], "cpy": ["re"],
              "re": ["cpy"], "s": ["cpy"], "nop": ["cpy"]}  # fmt: skip
    kind = rng.choice(others[step.type])
    place = step.dst or step.src or ("i", 0)
    src = None if kind in ("r", "rcs") else step.src or place
    dst = None if kind in ("s", "rrs") else step.dst or place
    steps[g][b][s] = replace(step, type=kind, src=src, dst=dst)


MUTATIONS: dict[str, Edit] = {
    "a step dropped": drop,
    "a message dropped": drop_message,
    "a dependency removed": drop_wait,
    "a dependency moved": move_wait,
    "an index off": shift,
    "two steps swapped": swap,
    "cnt off": resize,
    "another type": retype,
}
PEER = "another peer or channel"


def mutate(rng: random.Random, algorithm: XmlAlgorithm, kind: str) -> XmlAlgorithm:
    """A copy of a file with one thing spoiled; what is waited for mostly says so."""
    steps: Steps = [[list(block.steps) for block in gpu.blocks] for gpu in algorithm.gpus]
    ends = {(g, b): block for g, gpu in enumerate(algorithm.gpus) for b, block in enumerate(gpu.blocks)}
    at = rng.choice(list(positions(steps)))
    if kind == PEER:
        block = ends[at[:2]]
        side = rng.choice(["send", "recv", "channel", "swap"])
        if side == "swap":  # two thread blocks of a GPU have each other's peers
            other = rng.randrange(len(steps[at[0]]))
            there = ends[at[0], other]
            ends[at[:2]], ends[at[0], other] = there, block
        else:
            most = algorithm.channels if side == "channel" else len(steps)
            ends[at[:2]] = replace(block, **{side: rng.randrange(most)})
    else:
        MUTATIONS[kind](rng, algorithm, steps, at)
    if rng.random() < 0.9:
        _say_awaited(steps)
    gpus = tuple(
        replace(gpu, blocks=tuple(
            XmlBlock(ends[g, b].send, ends[g, b].recv, ends[g, b].channel, tuple(block))
            for b, block in enumerate(steps[g])
        ))
        for g, gpu in enumerate(algorithm.gpus)
    )  # fmt: skip
    return replace(algorithm, gpus=gpus)


def _say_awaited(steps: Steps) -> None:
    for blocks in steps:
        awaited = {(step.depid, step.deps) for block in blocks for step in block}
        for b, block in enumerate(blocks):
            block[:] = [replace(step, awaited=(b, s) in awaited) for s, step in enumerate(block)]


def positions(steps: Steps) -> Iterator[Position]:
    """Where every step is."""
    for g, blocks in enumerate(steps):
        for b, block in enumerate(blocks):
            for s in range(len(block)):
                yield g, b, s


def type_at(steps: Steps, at: Position) -> str:
    """The type of a step."""
    return steps[at[0]][at[1]][at[2]].type


def messages(algorithm: XmlAlgorithm, steps: Steps) -> Iterator[tuple[Position, Position]]:
    """Where every message is sent, and where it is received."""
    out: dict[tuple[int, int, int], list[Position]] = {}
    into: dict[tuple[int, int, int], list[Position]] = {}
    for g, b, s in positions(steps):
        block, kind = algorithm.gpus[g].blocks[b], steps[g][b][s].type
        if kind in ("s", "rcs", "rrs", "rrcs"):
            out.setdefault((g, block.send, block.channel), []).append((g, b, s))
        if kind in ("r", "rcs", "rrc", "rrs", "rrcs"):
            into.setdefault((block.recv, g, block.channel), []).append((g, b, s))
    for connection, sent in out.items():
        yield from zip(sent, into.get(connection, []), strict=False)


# ---------------------------------------------------------------- the truth


def untrue(algorithm: XmlAlgorithm, report: XmlReport, goal: Goal, seed: int) -> str:
    """What the checker says that the machine does not bear out; nothing if it is right."""
    kinds = {fault.kind for fault in report.faults}
    if report.proved:
        return _not_right(algorithm, goal, seed)
    if "structure" in kinds:
        return ""
    for fault in report.faults:
        places = [tuple(map(int, found)) for found in PLACE.findall(" ".join(fault.steps))]
        if fault.kind == "deadlock":
            slots = SLOTS[algorithm.protocol]
            if any(Machine(algorithm, goal, in_place=algorithm.in_place, slots=slots, seed=seed + k).run()
                   for k in range(3)):  # fmt: skip
                return f"no deadlock: {fault.text}"
            enough = report.slots_needed
            if enough and not Machine(algorithm, goal, in_place=algorithm.in_place, slots=enough, seed=seed).run():
                return f"still a deadlock with {enough} slots"
        if fault.kind == "race" and places[0] != places[1]:
            for one, other in (places, places[::-1]):
                machine = Machine(algorithm, goal, in_place=algorithm.in_place, seed=seed)
                machine.delay(*one)
                if machine.done[other[0]][other[1]] <= other[2]:
                    return f"ordered after all: {fault.text}"
    if kinds & {"deadlock", "race"}:
        return ""
    machine = Machine(algorithm, goal, in_place=algorithm.in_place, seed=seed)
    if not machine.run():
        return "a deadlock that was not found"
    if ("read" in kinds) > machine.noise_read:
        return "nothing unwritten was read"
    return "the results are right" if "result" in kinds and machine.right() else ""


def _not_right(algorithm: XmlAlgorithm, goal: Goal, seed: int) -> str:
    for k in range(ORDERS):
        slots = SLOTS[algorithm.protocol] if k % 2 else None
        machine = Machine(algorithm, goal, in_place=algorithm.in_place, slots=slots, seed=seed + k)
        if not machine.run():
            return f"proved, and stops with {slots} slots"
        if not machine.right():
            return "proved, and wrong"
        if machine.noise_read:
            return "proved, and reads what was never written"
    return ""


def outcome(report: XmlReport) -> str:
    """``proved``, or the first kind of fault."""
    return "proved" if report.proved else report.faults[0].kind


def campaign(count: int, seed: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Judge ``count`` mutants; (how many of each kind had each outcome, and what the checker was wrong about)."""
    files = bases()
    goals: dict[str, Goal] = {}
    for name, algorithm in files:
        flow: Flow | None = judge(algorithm)[1]
        assert flow is not None, f"{name}: the exporter's file is not proved"
        goals[name] = flow.goal
    found: Counter[tuple[str, str]] = Counter()
    wrong = []
    kinds = [*MUTATIONS, PEER]
    for number in range(count):
        rng = random.Random(seed * 1_000_003 + number)
        (name, algorithm), kind = rng.choice(files), kinds[number % len(kinds)]
        mutant = mutate(rng, algorithm, kind)
        assert parse_xml(write_xml(mutant)) == mutant, "the text is not the file"
        report, _ = judge(mutant)
        found[kind, "unchanged" if mutant == algorithm else outcome(report)] += 1
        why = untrue(mutant, report, goals[name], number)
        if why:
            wrong.append(f"seed {seed}, mutant {number} ({kind}) of {name}: {why}")
    return found, wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign, print a table and write its file; 1 if the checker was wrong about a mutant."""
    from benchmarks import jobs

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=10000, help="mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", metavar="FILE", help="write what was found as JSON")
    args = parser.parse_args(argv)
    began, start = datetime.now(UTC), time.monotonic()
    found, wrong = campaign(args.count, args.seed)
    outcomes = ["proved", "structure", "deadlock", "race", "read", "result", "unchanged"]
    rows = [{"mutation": kind, **{o: found[kind, o] for o in outcomes}} for kind in [*MUTATIONS, PEER]]
    print(f"{'mutation':24}" + "".join(f"{o:>11}" for o in outcomes))
    for row in rows:
        print(f"{row['mutation']:24}" + "".join(f"{row[o]:11}" for o in outcomes))
    print("\n".join([*wrong, f"{args.count} mutants, {len(wrong)} on which checker and machine disagree"]))
    if args.o:
        head = {"mutants": args.count, "seed": args.seed, "orders": ORDERS, "seconds": time.monotonic() - start,
                "bases": [name for name, _ in bases()]}  # fmt: skip
        jobs.write(Path(args.o), jobs.document(head, rows, wrong, began))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
