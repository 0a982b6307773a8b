"""A campaign draws the same steps from the same seed, sees what is wrong, tells what hangs; and half a minute of it."""

import faulthandler
import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blinkmpi.program.reduction import DTYPES, OPS, dtype_of
from tests.campaign import jobs
from tests.campaign.deadly import DEADLY, judge
from tests.campaign.jobs import Result
from tests.campaign.kinds import KINDS
from tests.campaign.memory import HostBuffer
from tests.campaign.record import Record
from tests.campaign.reference import PERIOD, changed, fill, length, prepare, wrong
from tests.campaign.steps import FAULTS, FULL, LINK, MOST_BYTES, Mix, Step, steps
from tests.conformance import COLLECTIVES, Case
from tests.harness import ROOT, Outcome
from tests.hosts.world import forbidden, missing

EVERYTHING = Mix(3, 0.2, memories=("numpy", "spec", "dlpack", "cupy", "registered"), small_shm=True, hosts=True)


def some(seed: int, mix: Mix, number: int = 3000) -> list[Step]:
    """The first steps of a seed."""
    return list(itertools.islice(steps(seed, mix), number))


def test_a_seed_says_everything() -> None:
    assert some(7, EVERYTHING) == some(7, EVERYTHING)
    assert some(7, EVERYTHING) != some(8, EVERYTHING)


@pytest.mark.parametrize("mix", [Mix(1), Mix(4, 0.1), EVERYTHING], ids=["alone", "cpu", "everything"])
def test_everything_is_drawn_and_can_be_done(mix: Mix) -> None:
    seen: dict[str, Counter[Any]] = {}
    for step in some(1, mix, 6000):
        seen.setdefault("what", Counter())[step.what] += 1
        seen.setdefault("fault", Counter())[step.fault] += 1
        assert 0 <= step.victim < mix.n
        for call in itertools.chain(*step.groups):
            case, kind = call.case, KINDS[call.case.collective]
            for name in ("collective", "dtype", "op", "in_place"):
                seen.setdefault(name, Counter())[getattr(case, name)] += 1
            seen.setdefault("how", Counter())[call.how] += 1
            seen.setdefault("memory", Counter())[call.memory] += 1
            assert 0 <= case.root < case.n <= mix.n
            assert not (case.in_place and not kind.in_place)
            longest = max(max(kind.sends(case, r), kind.receives(case, r)) for r in range(case.n))
            assert longest * dtype_of(case.dtype).itemsize <= MOST_BYTES + (1 << 14)
    assert set(seen["collective"]) == set(KINDS) == set(COLLECTIVES)
    assert set(seen["dtype"]) == set(DTYPES)
    assert set(seen["op"]) == {"", *OPS}
    assert set(seen["memory"]) == set(mix.memories)
    assert {"blocking", "request", "persistent", "joined"} <= set(seen["how"])
    faults = {*FAULTS, *([FULL] if mix.small_shm else []), *([LINK] if mix.hosts else [])}
    assert set(seen["fault"]) == {"", *(faults if mix.faults else ())}
    always = ("calls", "requests", "joined", "children", "graph" if mix.gpus else "threads")
    whats = {*always, *(["fault"] if mix.faults else [])}
    assert set(seen["what"]) == whats


@pytest.mark.parametrize("count", [1, 40, PERIOD + 100])
@pytest.mark.parametrize("collective", sorted(KINDS))
def test_one_wrong_byte_is_seen(collective: str, count: int) -> None:
    """Of what arrives, and of what lies behind it."""
    rng = random.Random(count)
    kind = KINDS[collective]
    for in_place in (False, True) if kind.in_place else (False,):
        case = Case(collective, 3, "int16", "sum" if kind.reduces else "", count, in_place, 1 if kind.rooted else 0, 5)
        sends = [np.empty(length(case), np.int16) for _ in range(case.n)]
        for rank, send in enumerate(sends):
            fill(case, rank, send)
        for rank in range(case.n):
            recv = np.empty(kind.receives(case, rank), np.int16)
            prepare(case, rank, recv)
            at = 0
            for part in kind.parts(case, rank):  # as a right implementation does
                stop = part.start + part.count
                folded = sends[: {"scan": rank + 1, "exscan": rank}.get(collective, case.n)]
                total = sum(send[part.start : stop] for send in folded)
                recv[at : at + part.count] = total if part.source < 0 else sends[part.source][part.start : stop]
                at += part.count
            assert not wrong(case, rank, recv), f"{case}, rank {rank}"
            for element in {0, at - 1, rng.randrange(recv.size), recv.size - 1} if recv.size else ():
                recv[element] ^= 1
                assert wrong(case, rank, recv), f"{case}, rank {rank}: element {element} of {recv.size}"
                recv[element] ^= 1
            mine = sends[rank][: kind.sends(case, rank)]
            assert not changed(case, rank, mine)
            if mine.size:
                mine[-1] ^= 1
                assert changed(case, rank, mine)
                mine[-1] ^= 1


def test_data_of_another_call_or_place_are_wrong() -> None:
    one, two = (Case("broadcast", 2, "int8", "", 3 * PERIOD, False, 0, salt) for salt in (1, 2))
    got = np.empty(3 * PERIOD, np.int8)
    fill(one, 0, got)
    assert not wrong(one, 1, got)
    assert wrong(two, 1, got)
    assert wrong(one, 1, np.roll(got, 1 << 15))


@pytest.mark.parametrize("at", [0, -1])
def test_a_byte_beside_a_buffer_is_seen(at: int) -> None:
    buffer = HostBuffer(10, "float32", 3, "numpy")
    buffer.array[:] = 1
    assert buffer.intact()
    buffer._whole[at] ^= 1
    assert not buffer.intact()


# ---------------------------------------------------------------- what is told of a job


def outcome(**facts: Any) -> Outcome:
    return Outcome(**{"rc": 0, "output": "", "seconds": 1.0, "timed_out": False, "leftovers": (), **facts})


def told(box: Path, how: Outcome, left: tuple[str, ...] = ()) -> Result:
    return jobs._read(Result("calls", 1, 2), box, how, list(left))


def test_what_is_told_of_a_job(tmp_path: Path) -> None:
    records = [Record(tmp_path, rank) for rank in range(2)]
    for record in records:
        record.write(done=True)
    good = told(tmp_path, outcome())
    assert (good.wrong, good.hung) == ([], [])
    assert told(tmp_path, outcome(rc=1)).wrong
    assert told(tmp_path, outcome(leftovers=("7: sleep",))).wrong == ["7: sleep outlived the job"]
    assert told(tmp_path, outcome(), ("arena",)).wrong == ["arena is left in /dev/shm"]
    records[1].write()
    assert "ranks [1] ended early" in told(tmp_path, outcome(rc=1)).wrong[0]
    with (tmp_path / "1.stacks").open("w") as stacks:
        faulthandler.dump_traceback(stacks)
    hung = told(tmp_path, outcome(timed_out=True))
    short, _, whole = hung.hung[0].partition("---")
    assert "\nrank 1\n" in short
    assert "\n  test_what_is_told_of_a_job (test_campaign.py:" in short
    assert "in test_what_is_told_of_a_job\n" in whole
    assert hung.wrong == []
    records[0].mistake("7 is not 8")
    records[0].write()
    assert told(tmp_path, outcome(rc=1)).wrong == ["step -1, rank 0: 7 is not 8"]


@pytest.mark.parametrize("fault", sorted(DEADLY))
def test_what_must_come_of_a_fault_that_ends_its_job(fault: str, tmp_path: Path) -> None:
    deadly, shown = DEADLY[fault], "ValueError: seven is not eight"

    def found(**facts: Any) -> list[str]:
        return judge(fault, tmp_path, 2, 3, **{"rc": 1, "output": shown, **facts})

    assert bool(found()) == bool(deadly.errors), "nobody has raised anything"
    for error, seconds, wanted in ((*deadly.errors, "none")[0], 0.5, 0), ("KeyError", 0.5, 1), (None, 99.0, 1):
        for rank in range(2):
            said: dict[str, Any] = {"error": error or (*deadly.errors, "none")[0], "text": "", "seconds": seconds}
            said |= {"shrunk": [0.1], "grown": 2}
            (tmp_path / f"{rank}.json").write_text(json.dumps(said))
        assert len(found()) == (wanted if deadly.errors else 0)
    assert "a call was wrong" in found(output=f"AssertionError {shown}")
    assert ("the job's exit status is 0" in found(rc=0)) == deadly.fails


# ---------------------------------------------------------------- the campaign itself


@pytest.mark.long
def test_half_a_minute_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.campaign", "--seconds", "40", "--ranks", "2,3,4", "--faults"]
    done = subprocess.run([*command, "-o", str(tmp_path / "made.json")], cwd=ROOT, capture_output=True, text=True,
                          timeout=200)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "made.json").read_text())
    assert (made["wrong"], made["hung"]) == ([], [])
    assert made["calls"] > 0, done.stdout
    assert made["faults"] > 0, done.stdout
    assert sum(made["kinds"]["collective"].values()) == made["calls"]
    assert f"seed {made['seed']}\n" in done.stdout


@pytest.mark.hosts
@pytest.mark.long
def test_two_hosts_whose_links_go_down_and_up() -> None:
    if reason := missing() or forbidden():
        pytest.skip(reason)
    seed, mix = random.SystemRandom().randrange(1 << 30), Mix(3, 0.1, hosts=True, most_bytes=1 << 20)
    links = (step.number for step in steps(seed, mix) if step.fault == LINK)
    second = next(itertools.islice(links, 1, None))  # however fast this machine is
    made = jobs.hosts(seed, 120.0, (2, 1), mix, steps=second + 1)
    if found := made.wrong + made.hung:  # told without pytest's comparison, which puts the stacks last
        pytest.fail(f"seed {seed}: {found[0]}", pytrace=False)
    assert (made.steps, made.faults[LINK]) == (second + 1, 2), f"seed {seed}: {made.faults}"
