"""Measure on a machine of several GPUs: ``python benchmarks/gpu.py 8 --part sweeps --out results --budget 480``.

Steps run one after another, each an ``mpirun`` of its own with a time limit, so that the whole stays within the
budget; one that fails or runs out of time is named, and the next goes on. Every step but the first round of all
collectives writes a file of its own into ``--out``; ``--tar`` keeps them in one archive, too, written anew after each
step. A short table comes last. NVLink multicast is left off for all libraries: on a shared machine it can put the GPUs
out of service, and ours does without.

``--part sweeps`` is ``blinkmpi bench``, ``calls`` the host's part of calls, groups, torch's collectives, products
beside AllReduces and chunk programs, ``training`` steps of DDP. ``--dry-run`` prints commands and limits.
"""

import argparse
import shlex
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

from benchmarks import jobs  # noqa: E402
from benchmarks.emulated import SETS  # noqa: E402
from benchmarks.jobs import LAUNCHER, limits, load, python_path, run_job  # noqa: E402
from benchmarks.pages.summary import table  # noqa: E402
from blinkmpi.program.call import collective_named  # noqa: E402
from blinkmpi.topology.importers import parse_gpus  # noqa: E402

# Without multicast, and without Open MPI's second of looking for networks.
SETTINGS = {
    **jobs.SETTINGS,
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_osc": "^ucx",
}
PARTS = ("sweeps", "calls", "training")
MODELS = {"resnet50": 10, "gpt2-124m": 22, "transformer-25m": 14, "transformer-267m": 30}  # with a share of the time
# Chunk programs of the library that are measured.
PROGRAMS = {"all_reduce": ("ring", "all_pairs", "one_step"), "all_gather": ("bruck_allgather",),
            "alltoall": ("all_pairs_alltoall", "bruck_alltoall")}  # fmt: skip
HALVES = {"all_reduce": "hierarchical", "alltoall": "two_step"}  # for two nodes, here two halves of the GPUs
TAIL_CHARACTERS = 600  # of a failed step's output


@dataclass(frozen=True, slots=True)
class Step:
    """One mpirun: its name, also of its file; the words after ``bench`` or a program; its share of the time."""

    name: str
    words: str
    share: float
    writes: bool = True
    program: str = ""  # in this folder; none for blinkmpi bench


def steps(n: int, high: str, part: str = "sweeps") -> list[Step]:
    """The steps of a part, or of ``all``, in the order in which they matter."""
    found = {"sweeps": sweeps(n, high), "calls": calls(n), "training": training(n)}
    return [step for name in PARTS if part in (name, "all") for step in found[name]]


def sweeps(n: int, high: str) -> list[Step]:
    """All collectives, once and then by size; the first step, and the first with torch, may find nothing compiled."""
    others = ("all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall")
    everything = ("all_reduce", *others)
    found = [
        Step(f"sanity-{name}-np{n}", f"{name} -b 1K -e 1M -f 32 -n 2", 0.5 + 2.5 * first, writes=False)
        for first, name in ((name == "all_reduce", name) for name in (*everything, "gather", "scatter"))
    ]
    sweep = f"-b 1K -e {high} -f 4 --predict"
    found += [
        Step(f"all_reduce-gpu-np{n}", f"all_reduce {sweep} --compare nccl,symm_mem", 5),
        Step(f"all_reduce-gpu-graph-np{n}", f"all_reduce {sweep} --compare nccl,symm_mem -G 4", 3),
    ]
    found += [Step(f"{name}-gpu-np{n}", f"{name} {sweep} --compare nccl", 2) for name in others]
    found += [Step(f"{name}-gpu-graph-np{n}", f"{name} {sweep} --compare nccl -G 4", 2) for name in others]
    halves = f"{sweep} -d bfloat16 --compare nccl"
    for how, more in (("graph-", " -G 4"), ("", "")):
        found.append(Step(f"all_reduce-bfloat16-gpu-{how}np{n}", f"all_reduce {halves},symm_mem{more}", 3))
        found += [Step(f"{name}-bfloat16-gpu-{how}np{n}", f"{name} {halves}{more}", 2) for name in others]
    for name in ("all_reduce", "reduce") if n > 2 else ():  # partial results rounded on each hop, as NCCL does
        for how, more in (("graph-", " -G 4"), ("", "")):
            step = f"{name}-bfloat16-operand-gpu-{how}np{n}"
            found.append(Step(step, f"{name} {halves} --wire operand{more}", 2))
    for dtype, kind in (("float", ""), ("bfloat16", "bfloat16-")):  # buffers that peers cannot reach
        plain = f"all_reduce {sweep} -d {dtype} --compare nccl -R 0"
        found.append(Step(f"all_reduce-{kind}plain-gpu-graph-np{n}", f"{plain} -G 4", 2))
        found.append(Step(f"all_reduce-{kind}plain-gpu-np{n}", plain, 2))
    return found


def calls(n: int) -> list[Step]:
    """What surrounds a call: the host, groups, torch, a model's kernels; and what an algorithm of one's own costs."""
    beside = "beside_compute/measure.py"
    programs = [
        (name, collective, f"--algo {collective_named(collective)}:lang:{name}")
        for collective, names in PROGRAMS.items()
        for name in names
    ]
    halves = ROOT / "benchmarks" / "lang" / "halves.py"
    for collective, name in HALVES.items() if n > 2 else ():
        programs.append((name, collective, f"--algorithm {shlex.quote(f'{halves}:{name}')}"))
    sweep = "-b 16K -e 256M -f 4 --compare nccl -G 4"
    return [
        Step(f"host-time-gpu-np{n}", "", 16, program="host_time.py"),
        Step(f"messages-gpu-np{n}", "", 8, program="gpu_messages.py"),
        Step(f"beside-compute-gpu-np{n}", "", 20, program=beside),
        Step(f"groups-gpu-np{n}", "--gpu", 8, program="groups.py"),
        Step(f"torch-gpu-np{n}", "--gpu", 16, program="torch_group.py"),
        Step(f"torch-host-time-gpu-np{n}", "", 16, program="torch_host_time.py"),
        Step(f"beside-compute-high-priority-gpu-np{n}", "--high-priority", 20, program=beside),
        *([Step(f"message-cost-gpu-np{n}", "--gpus", 8, program="message_cost.py")] if n == 2 else []),
        *(Step(f"lang-{name}-gpu-graph-np{n}", f"{collective} {sweep} {how}", 3) for name, collective, how in programs),
    ]  # fmt: skip


def training(n: int) -> list[Step]:
    """Steps of DDP, a job for each model; then on paced links, a job for each set of so many GPUs of a DGX-1V."""
    words, program = "--gpu --gradients --seconds 10 --dtypes float32 bfloat16 --models", "training/measure.py"
    found = []
    for name, share in MODELS.items():
        short = f" {name}-short" if name != "resnet50" else ""
        found.append(Step(f"training-{name}-gpu-np{n}", f"{words} {name}{short}", share, program=program))
    for gpus in SETS:
        if len(parse_gpus(gpus)) == n:
            name = f"training-emulated-{gpus.replace(',', '-')}-gpu-np{n}"
            found.append(Step(name, f"--gpu --repeats 5 --emulated {gpus}", 12, program=program))
    return found


def command(n: int, step: Step, out: Path) -> list[str]:
    """The mpirun of a step."""
    what = [str(ROOT / "benchmarks" / step.program)] if step.program else ["-m", "blinkmpi", "bench"]
    file = ["-o" if step.program else "-J", str(out / f"{step.name}.json")] if step.writes else []
    return [*LAUNCHER, "-np", str(n), sys.executable, *what, *shlex.split(step.words), *file]


def run(step: Step, n: int, out: Path, seconds: float) -> tuple[str, str]:
    """Run a step; (``ok`` or what went wrong, its output)."""
    why, said = run_job(command(n, step, out), {**SETTINGS, "PYTHONPATH": python_path()}, seconds)
    return why or "ok", said


def bundle(out: Path, archive: Path) -> None:
    """Keep all files of a folder in one archive, in place of what it held."""
    new = archive.with_name(f"{archive.name}.new")
    with tarfile.open(new, "w:gz") as found:
        for path in sorted(out.iterdir()):
            found.add(path, arcname=path.name)
    new.replace(archive)


def dry_run(todo: Sequence[Step], n: int, out: Path, budget: float) -> str:
    """Each step with its limit, if those before it take what is theirs, and its command."""
    shares, lines = [step.share for step in todo], []
    for i, step in enumerate(todo):
        limit = limits(shares[i:], budget * sum(shares[i:]) / sum(shares))
        lines.append(f"{step.name}, at most {limit:.0f} s: {shlex.join(command(n, step, out))}")
    return "\n".join([*lines, f"{len(todo)} steps, {budget:.0f} s"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run all steps; 0 if all of them ended well."""
    parser = argparse.ArgumentParser(description="Measure on the GPUs of this machine, beside NCCL.")
    parser.add_argument("np", type=int, help="ranks, one for each GPU: 2, 4, 8")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results' files")
    parser.add_argument("--budget", type=float, default=480, metavar="SECONDS", help="for all steps (default 480)")
    parser.add_argument("--max", default="1G", metavar="SIZE", help="largest size of the sweeps (default 1G)")
    parser.add_argument("--part", choices=(*PARTS, "all"), default="sweeps", help="what to measure (default sweeps)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the steps whose names hold this")
    parser.add_argument("--tar", type=Path, metavar="FILE", help="also keep all files of --out in this tar.gz")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and their limits")
    args = parser.parse_args(argv)
    todo = [step for step in steps(args.np, args.max, args.part) if args.only in step.name]
    if args.dry_run:
        print(dry_run(todo, args.np, args.out, args.budget))
        return 0
    files = [args.out / f"{step.name}.json" for step in todo if step.writes]
    if any(path.exists() for path in files):
        parser.error(f"{args.out} holds results of an earlier run; give another folder")
    if args.tar is not None and args.tar.resolve().parent == args.out.resolve():
        parser.error(f"--tar {args.tar}: it would hold itself; give another folder than --out")
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / f"gpu-{args.part}-np{args.np}.log"

    def one(i: int, seconds: float) -> jobs.Outcome:
        outcome, said = run(todo[i], args.np, args.out, seconds)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"==== {todo[i].name}: {outcome}\n{said}\n")
        if args.tar is not None:
            bundle(args.out, args.tar)
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
