"""Measure all collectives on a machine of several GPUs: ``python benchmarks/gpu.py 8 --out results --budget 480``.

Steps run one after another, each an ``mpirun`` of its own with a time limit, so that the whole stays within the
budget; one that fails or runs out of time is named, and the next goes on. Every sweep writes a file of its own into
``--out``. A short table comes last. NVLink multicast is left off for all libraries: on a shared machine it can put the
GPUs out of service, and ours does without.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks import jobs  # noqa: E402
from benchmarks.jobs import LAUNCHER, PLACES, limits, load, python_path, run_job  # noqa: E402

# Without multicast, and without Open MPI's second of looking for networks.
SETTINGS = {
    **jobs.SETTINGS,
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_osc": "^ucx",
}
TABLE_CHARACTERS = 8_000
TAIL_CHARACTERS = 600  # of a failed step's output


@dataclass(frozen=True, slots=True)
class Step:
    """One mpirun: its name, also of its file; the words after ``blinkmpi bench``; its share of the time."""

    name: str
    words: str
    share: float
    writes: bool = True


def steps(n: int, high: str) -> list[Step]:
    """All steps, in the order in which they matter."""
    found = [
        Step(f"sanity-{name}-np{n}", f"{name} -b 1K -e 1M -f 32 -n 2", 0.5, writes=False)
        for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter")
    ]
    sweep = f"-b 1K -e {high} -f 4 --predict"
    found += [
        Step(f"all_reduce-gpu-np{n}", f"all_reduce {sweep} --compare nccl,symm_mem", 3),
        Step(f"all_reduce-gpu-graph-np{n}", f"all_reduce {sweep} --compare nccl,symm_mem -G 4", 3),
    ]
    others = ("all_gather", "reduce_scatter", "broadcast", "reduce")
    found += [Step(f"{name}-gpu-np{n}", f"{name} {sweep} --compare nccl", 2) for name in others]
    found += [Step(f"{name}-gpu-graph-np{n}", f"{name} {sweep} --compare nccl -G 4", 2) for name in others]
    everything, halves = ("all_reduce", *others), f"{sweep} -d bfloat16 --compare nccl"
    found += [Step(f"{name}-bfloat16-gpu-graph-np{n}", f"{name} {halves} -G 4", 2) for name in everything]
    found += [Step(f"{name}-bfloat16-gpu-np{n}", f"{name} {halves}", 2) for name in everything]
    for dtype, kind in (("float", ""), ("bfloat16", "bfloat16-")):  # buffers that peers cannot reach
        plain = f"all_reduce {sweep} -d {dtype} --compare nccl -R 0"
        found.append(Step(f"all_reduce-{kind}plain-gpu-graph-np{n}", f"{plain} -G 4", 2))
        found.append(Step(f"all_reduce-{kind}plain-gpu-np{n}", plain, 2))
    return found


def command(n: int, words: Sequence[str]) -> list[str]:
    """The mpirun of a step."""
    return [*LAUNCHER, "-np", str(n), sys.executable, "-m", "blinkmpi", "bench", *words]


def run(step: Step, n: int, out: Path, seconds: float) -> tuple[str, str]:
    """Run a step; (``ok`` or what went wrong, its output)."""
    words = step.words.split()
    if step.writes:
        words += ["-J", str(out / f"{step.name}.json")]
    why, said = run_job(command(n, words), {**SETTINGS, "PYTHONPATH": python_path()}, seconds)
    return why or "ok", said


def table(documents: Sequence[tuple[str, dict[str, Any]]], most: int = TABLE_CHARACTERS) -> str:
    """Rows out of place and in place: size, ours, and each peer's time and ratio; cut after ``most`` characters."""
    lines = []
    for name, found in documents:
        peers = found["blinkmpi"]["compare"]
        lines += ["", f"{name}: ours us, {', '.join(f'{peer} us, ratio' for peer in peers)}; the same in place; wrong"]
        for row in found["results"]:
            own = row["blinkmpi"]
            cells = [f"{_size(row['size']):>5} {own.get('protocol') or '-':>7} {own.get('ctas') or '-':>3}"]
            for place in PLACES:
                cells.append(f"{row[place]['time']:9.1f}")
                for peer in peers:
                    theirs = own[place]["compare"][peer]
                    cells.append(f"{'N/A':>15}" if theirs is None else f"{theirs['time']:9.1f} {theirs['ratio']:5.2f}")
            wrong = [_wrong(row, place, peers) for place in PLACES]
            lines.append(" ".join(cells) + f" {sum(wrong):4d}")
    text = "\n".join(lines).strip("\n")
    return text if len(text) <= most else f"{text[:most]}\n... cut: the rest is in the files"


def _wrong(row: dict[str, Any], place: str, peers: Sequence[str]) -> int:
    """Wrong elements of ours and of the peers."""
    theirs = [row["blinkmpi"][place]["compare"][peer] for peer in peers]
    return sum(found["nwrong"] or 0 for found in (row[place], *filter(None, theirs)))


def _size(nbytes: int) -> str:
    at = max(0, min(3, (nbytes.bit_length() - 1) // 10))
    return f"{nbytes / (1 << 10 * at):.4g}{' KMG'[at].strip()}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all steps; 0 if all of them ended well."""
    parser = argparse.ArgumentParser(description="Measure all collectives on the GPUs of this machine, beside NCCL.")
    parser.add_argument("np", type=int, help="ranks, one for each GPU: 2, 4, 8")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results' files")
    parser.add_argument("--budget", type=float, default=480, metavar="SECONDS", help="for all steps (default 480)")
    parser.add_argument("--max", default="1G", metavar="SIZE", help="largest size of the sweeps (default 1G)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the steps whose names hold this")
    args = parser.parse_args(argv)
    todo = [step for step in steps(args.np, args.max) if args.only in step.name]
    files = [args.out / f"{step.name}.json" for step in todo if step.writes]
    if any(path.exists() for path in files):
        parser.error(f"{args.out} holds results of an earlier run; give another folder")
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / f"gpu-np{args.np}.log"

    def one(i: int, seconds: float) -> jobs.Outcome:
        outcome, said = run(todo[i], args.np, args.out, seconds)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"==== {todo[i].name}: {outcome}\n{said}\n")
        return None, [] if outcome == "ok" else [f"{todo[i].name}: {outcome}"], said

    def of_files(_: Sequence[dict[str, Any]]) -> str:
        return table([(path.stem, found) for path in files if (found := load(path)) is not None])

    _, failed = jobs.in_turn(
        [step.name for step in todo], args.budget, lambda i, left: limits([step.share for step in todo[i:]], left), one,
        tail=TAIL_CHARACTERS, table=of_files,
    )  # fmt: skip
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
