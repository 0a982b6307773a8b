"""Apply each fault of the list to a copy of the tree, and see whether its test fails.

    python -m tests.mutants              # all of them, some minutes
    python -m tests.mutants --only 7 12  # two of them, and what pytest says
    python -m tests.mutants --list       # no run

First the tests run on the tree as it is, where all must pass. Then a fault is caught if its test comes to an end and
fails; one that has to be ended from outside is not. The exit code is 0 if all are caught.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.copies import Copy, Run
from tests.mutants.records import Mutant, mutants, why_not

UNSPOILT_S, MUTANT_S = 900, 200  # that pytest may take


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", type=int, metavar="N", help="some of the list, by their numbers")
    parser.add_argument("--list", action="store_true", help="print the list")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many at a time (default 1)")
    options = parser.parse_args(words)
    every = {mutant.number: mutant for mutant in mutants()}
    if unknown := set(options.only or ()) - set(every):
        parser.error(f"--only {min(unknown)}: the list has numbers 1 to {len(every)}")
    chosen = [every[number] for number in options.only or every]
    if unfit := [f"mutant {mutant.number}: {why}" for mutant in chosen if (why := why_not(mutant))]:
        print(*unfit, sep="\n")
        return 1
    if options.list:
        print(*(row(mutant, frozenset(), "") for mutant in chosen), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="blinkmpi-mutants-") as folder:
        copies = [Copy(Path(folder) / str(i), Path(folder) / "cache") for i in range(min(options.jobs, len(chosen)))]
        return 0 if all_caught(chosen, copies, show=options.only is not None) else 1


def all_caught(chosen: Sequence[Mutant], copies: Sequence[Copy], *, show: bool) -> bool:
    """Try each mutant, as many at a time as there are copies; print the table.

    Args:
        show: whether to print what pytest said of each.
    """
    long = unspoilt(copies[0], list(dict.fromkeys(mutant.test for mutant in chosen)))
    if long is None:
        return False
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def tried(mutant: Mutant) -> Run:
        copy = free.get()
        try:
            with copy.spoilt(mutant):
                return copy.run([mutant.test], MUTANT_S)
        finally:
            free.put(copy)

    caught, pool = 0, ThreadPoolExecutor(len(copies))
    try:
        for mutant, run in zip(chosen, pool.map(tried, chosen), strict=True):
            outcome = run.outcomes.get(mutant.test, "no end")
            caught += outcome == "failed"
            missed = "" if outcome == "failed" else f", NOT CAUGHT: {outcome}"
            print(row(mutant, long, f"{run.seconds:.1f} s{missed}"), flush=True)
            if show or missed:
                print(run.output, flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    print(f"{len(chosen)} mutants: {caught} caught")
    return caught == len(chosen)


def unspoilt(copy: Copy, tests: Sequence[str]) -> frozenset[str] | None:
    """Run the tests on the tree as it is: those of them that are long; None, unless all pass."""
    run = copy.run(tests, UNSPOILT_S)
    wrong = {test: outcome for test in tests if (outcome := run.outcomes.get(test, "not found")) != "passed"}
    print(f"{len(tests)} tests of the tree as it is: {len(tests) - len(wrong)} passed, {run.seconds:.1f} s", flush=True)
    if not wrong:
        return run.long
    print(run.output, *(f"{test}: {outcome}" for test, outcome in wrong.items()), sep="\n")
    return None


def row(mutant: Mutant, long: frozenset[str], said: str) -> str:
    """A line of the table."""
    name = mutant.test.removeprefix("tests/") + (" (long)" if mutant.test in long else "")
    return f"{mutant.number:2}  {mutant.file:42}  {mutant.fault:75}  {name}  {said}".rstrip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
