"""An unchanged torch program with its calls of NCCL made by the door, beside plain NCCL: needs GPUs and torch.

``python benchmarks/nccl_door.py -n 2 -o results-gpu/nccl-door-gpu-np2.json`` starts a plain torch program twice by
``torchrun``: as it is, and under ``blinkmpi nccl run``. It makes the door's collectives on float32, bfloat16 and
float16, plain and in CUDA graphs, and compares every element with the expected one, which is exact; trains a small
network by DDP; and says how many of its calls were the door's.

Times are microseconds a call: the host's to put it on a stream, the device's where calls follow each other, and in a
graph of them. A row's time is that of its slowest rank.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this checkout, also where nothing is installed

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all")
DTYPES = ("float32", "bfloat16", "float16")
SIZES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)  # bytes of the longer buffer
ROUND, ROUNDS, FIRST_ROUNDS = 8, 1500, 6000  # calls between two looks, and looks until a kind must be settled
PAUSE_S = 0.01
TIMED, IN_GRAPH, REPEATS, CHECKS = 100, 20, 5, 4
STEPS = 40
NEARLY = 1e-3
MICRO = 1e6
Call = Callable[[], object]


# ---------------------------------------------------------------- the torch program


class Case:
    """A collective on buffers of its own: how it is called, and what it must give."""

    def __init__(self, torch: Any, name: str, dtype: str, nbytes: int, device: str = "cuda") -> None:
        self.torch, dist = torch, torch.distributed
        self.n, self.rank = dist.get_world_size(), dist.get_rank()
        kind = getattr(torch, dtype)
        count = max(nbytes // kind.itemsize // self.n, 1) * self.n
        part = count // self.n
        blocks = {"all_gather": (part, count), "reduce_scatter": (count, part)}
        sent, received = blocks.get(name, (count, count))
        self.send = torch.zeros(sent, dtype=kind, device=device)
        self.recv = torch.zeros(received, dtype=kind, device=device)
        self.name, self.root = name, self.n - 1
        send, recv, root = self.send, self.recv, self.root
        self.call: Call = {
            "all_reduce": lambda: dist.all_reduce(recv),
            "all_gather": lambda: dist.all_gather_into_tensor(recv, send),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(recv, send),
            "broadcast": lambda: dist.broadcast(recv, root),
            "reduce": lambda: dist.reduce(recv, root),
            "all_to_all": lambda: dist.all_to_all_single(recv, send),
        }[name]
        self.in_place = name in ("all_reduce", "broadcast", "reduce")

    def values(self, rank: int, salt: int) -> Any:
        """What a rank sends: small whole numbers, whose sums are exact in every type."""
        own = self.recv if self.in_place else self.send
        at = self.torch.arange(len(own), device=own.device)
        return (at * (rank + 3) + salt + rank) % 8

    def fill(self, salt: int) -> None:
        """Put this rank's values in place."""
        (self.recv if self.in_place else self.send).copy_(self.values(self.rank, salt))
        if not self.in_place:
            self.recv.fill_(-1)

    def wanted(self, salt: int) -> Any:
        """What this rank must have behind the call; None: nothing in particular."""
        torch, all_of = self.torch, [self.values(r, salt) for r in range(self.n)]
        part = len(all_of[0]) // self.n
        mine = slice(self.rank * part, (self.rank + 1) * part)
        if self.name == "reduce" and self.rank != self.root:
            return None
        if self.name in ("all_reduce", "reduce"):
            return sum(all_of[1:], all_of[0])
        if self.name == "reduce_scatter":
            return sum(all_of[1:], all_of[0])[mine]
        if self.name == "broadcast":
            return all_of[self.root]
        return torch.cat(all_of if self.name == "all_gather" else [values[mine] for values in all_of])

    def wrong(self, salt: int) -> int:
        """How many elements are not what they must be."""
        if self.recv.is_cuda:
            self.torch.cuda.synchronize()
        wanted = self.wanted(salt)
        return 0 if wanted is None else int((self.recv != wanted.to(self.recv.dtype)).sum())


class Program:
    """The program's process."""

    def __init__(self) -> None:
        import torch

        from blinkmpi.nccl.status import of_process

        self.torch, self.dist, self.status = torch, torch.distributed, of_process
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        self.dist.init_process_group("nccl", device_id=torch.device("cuda", local))
        self.beside = self.dist.new_group(backend="gloo")
        self.has_door = bool(os.environ.get("LD_PRELOAD"))

    def ours(self) -> int:
        """How many calls the door has made here."""
        found = self.status(os.getpid()) if self.has_door else None
        return sum(c.ours for c in found.communicators) if found else 0

    def open_kinds(self) -> int:
        """Of how many kinds it is not known yet whose they are."""
        found = self.status(os.getpid()) if self.has_door else None
        if found is None:
            return 0
        opening = sum(c.state == "opening" for c in found.communicators)
        return opening + sum(k.whose == "not settled" for c in found.communicators for k in c.kinds)

    def agreed(self, number: int, op: str = "MAX") -> int:
        """The largest number of all ranks, or what ``op`` makes of them; beside NCCL."""
        found = self.torch.tensor([number])
        self.dist.all_reduce(found, getattr(self.dist.ReduceOp, op), group=self.beside)
        return int(found)

    def settle(self, call: Call, rounds: int) -> bool:
        """Make calls until they are the door's; False if they stay NCCL's. The same on all ranks."""
        for _ in range(rounds if self.has_door else 1):
            before = self.ours()
            for _ in range(ROUND):
                call()
            self.torch.cuda.synchronize()
            if self.agreed(self.ours() - before, "MIN") == ROUND:
                return True
            if not self.agreed(self.open_kinds()) and not self.agreed(self.ours() - before):
                return False
            time.sleep(PAUSE_S)
        return False

    def times(self, call: Call) -> tuple[float, float]:
        """Host's and device's microseconds of a call."""
        torch, hosts, devices = self.torch, [], []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()
            torch.cuda.synchronize()
            self.dist.barrier(group=self.beside)
            call()
            begin.record()
            start = time.perf_counter()
            for _ in range(TIMED):
                call()
            hosts.append((time.perf_counter() - start) / TIMED * MICRO)
            end.record()
            torch.cuda.synchronize()
            devices.append(begin.elapsed_time(end) / TIMED * 1e3)
        return self.slowest(sorted(hosts)[REPEATS // 2]), self.slowest(sorted(devices)[REPEATS // 2])

    def graph(self, call: Call, calls: int) -> Any:
        """A graph of calls."""
        torch = self.torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
        return graph

    def graph_time(self, graph: Any, calls: int) -> float:
        """The device's microseconds of a call in a graph."""
        torch, found = self.torch, []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            torch.cuda.synchronize()
            self.dist.barrier(group=self.beside)
            begin.record()
            for _ in range(5):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / 5 / calls * 1e3)
        return self.slowest(sorted(found)[REPEATS // 2])

    def slowest(self, number: float) -> float:
        """The largest of all ranks' numbers."""
        found = self.torch.tensor([number], dtype=self.torch.float64)
        self.dist.all_reduce(found, self.dist.ReduceOp.MAX, group=self.beside)
        return round(float(found), 2)

    def row(self, name: str, dtype: str, nbytes: int, rounds: int) -> dict[str, Any]:
        """All about one collective, type and size."""
        case = Case(self.torch, name, dtype, nbytes)
        settled = self.settle(case.call, rounds)
        before, wrong = self.ours(), 0
        for salt in range(CHECKS):
            case.fill(salt)
            case.call()
            wrong += case.wrong(salt)
        ours = self.ours() - before
        one = self.graph(case.call, 1)
        graph_wrong = 0
        for salt in range(CHECKS, 2 * CHECKS):
            case.fill(salt)
            one.replay()
            graph_wrong += case.wrong(salt)
        case.fill(0)
        case.recv.zero_()  # repeated sums stay as they are
        host_us, device_us = self.times(case.call)
        graph_us = self.graph_time(self.graph(case.call, IN_GRAPH), IN_GRAPH)
        return {
            "collective": name, "dtype": dtype, "bytes": nbytes, "settled": settled,
            "wrong": self.agreed(wrong, "SUM"), "graph_wrong": self.agreed(graph_wrong, "SUM"), "checked": CHECKS,
            "ours": self.agreed(ours, "MIN"), "host_us": host_us, "device_us": device_us, "graph_us": graph_us,
        }  # fmt: skip

    def train(self) -> list[float]:
        """The losses of a small network."""
        torch = self.torch
        torch.manual_seed(1)
        torch.use_deterministic_algorithms(True, warn_only=True)
        layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.GELU()]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 8)).cuda()
        ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
        draw = torch.Generator().manual_seed(2 + self.dist.get_rank())
        losses = []
        for step in range(STEPS):
            x = torch.randn(32, 64, generator=draw).cuda()
            loss = (ddp(x) - x[:, :8].tanh()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
            if self.has_door and step == STEPS // 2:
                time.sleep(3)  # so that the kinds of the gradients are settled for the second half
        return losses


def worker(output: str, budget: float, *, quick: bool) -> None:
    """Run the program; rank 0 writes what it found.

    Args:
        quick: a few types and sizes alone.
    """
    end = time.monotonic() + budget
    program = Program()
    torch, dist = program.torch, program.dist
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    case = Case(torch, "all_reduce", "float32", SIZES[0])
    first = program.settle(case.call, FIRST_ROUNDS)
    opened_s = time.monotonic() - begin
    before = program.ours()
    losses = program.train()
    trained = program.ours() - before
    skipped = 0
    for name in COLLECTIVES:
        for dtype in DTYPES[: 2 if quick else None]:
            for nbytes in SIZES[1:5:3] if quick else SIZES:
                if program.agreed(int(time.monotonic() > end)):
                    skipped += 1
                    continue
                rows.append(program.row(name, dtype, nbytes, ROUNDS))
    status = program.status(os.getpid()) if program.has_door else None
    everything = [[c.state, c.why, c.ours, c.nccls] for c in status.communicators] if status else []
    kinds = [[k.call, k.dtype, k.op, k.most_bytes, k.whose, k.why] for c in (status.communicators if status else ())
             for k in c.kinds if k.whose != "ours"]  # fmt: skip
    if dist.get_rank() == 0:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        facts = {"torch": torch.__version__, "nccl": nccl, "gpu": torch.cuda.get_device_name()}
        found = {"facts": facts, "first_ours": first, "opened_s": round(opened_s, 1), "losses": losses,
                 "ours_in_training": trained, "skipped": skipped, "rows": rows, "communicators": everything,
                 "not_ours": kinds}  # fmt: skip
        Path(output).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------- who starts it


@contextlib.contextmanager
def output_file() -> Iterator[Path]:
    """Where a program writes."""
    with tempfile.TemporaryDirectory(prefix="blinkmpi-") as folder:
        yield Path(folder) / "found.json"


def started(n: int, budget: float, *, with_door: bool, quick: bool = False) -> tuple[dict[str, Any], str]:
    """What the program found, and why it did not end well."""
    from benchmarks.jobs import python_path, run_job

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    door = [sys.executable, "-m", "blinkmpi", "nccl", "run"] if with_door else []
    variables = {"PYTHONPATH": python_path(), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    for name, value in (("NCCL_NVLS_ENABLE", "0"), ("BLINKMPI_NCCL", "all"), ("OMP_NUM_THREADS", "1")):
        variables[name] = os.environ.get(name, value)
    with output_file() as path:
        words = [*door, *torchrun, str(Path(__file__).resolve()), "--worker", str(path), "--budget", str(budget)]
        words += ["--quick"] if quick else []
        why, said = run_job(words, variables, 1.2 * budget + 60)
        found = json.loads(path.read_text()) if path.exists() else {}
    if why or not found:
        print(said[-6000:])
    return found, why


def joined(plain: dict[str, Any], door: dict[str, Any]) -> list[dict[str, Any]]:
    """The door's rows, each with NCCL's times beside it."""
    times = ("host_us", "device_us", "graph_us")
    key = ("collective", "dtype", "bytes")
    beside = {tuple(r[k] for k in key): {t: r[t] for t in times} for r in plain.get("rows", ())}
    return [{**row, "nccl": beside.get(tuple(row[k] for k in key), {})} for row in door.get("rows", ())]


def alike(plain: list[float], ours: list[float], n: int) -> bool:
    """Whether losses are those of NCCL: all bits of two ranks', whose sums have no order; nearly, of more ranks'."""
    if not plain or len(plain) != len(ours):
        return False
    return plain == ours if n == 2 else all(abs(a - b) <= NEARLY * abs(a) for a, b in zip(plain, ours, strict=True))


def main() -> int:
    """Run both and write one file; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2, help="GPUs, one for each process (default 2)")
    parser.add_argument("-o", default="results-gpu/nccl-door.json", metavar="FILE", help="where the result goes")
    parser.add_argument("--budget", type=float, default=200, metavar="SECONDS", help="of each of the two (default 200)")
    parser.add_argument("--quick", action="store_true", help="a few types and sizes alone")
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.budget, quick=args.quick)
        return 0
    from benchmarks.jobs import document, write

    began = datetime.now().astimezone()
    failed = []
    found = {}
    for name in ("plain", "door"):
        found[name], why = started(args.n, args.budget, with_door=name == "door", quick=args.quick)
        failed += [f"{name}: {why}"] if why else []
    rows = joined(found["plain"], found["door"])
    losses = [found[name].get("losses", []) for name in ("plain", "door")]
    training = {
        "losses": losses[1],
        "nccl": losses[0],
        "equal": alike(*losses, args.n),
        "ours": found["door"].get("ours_in_training", 0),
    }
    wrong = sum(row["wrong"] + row["graph_wrong"] for row in rows)
    head = {"format": "blinkmpi.nccl-door", "version": 1, "n": args.n, "facts": found["door"].get("facts", {})}
    own = {key: found["door"].get(key) for key in ("first_ours", "opened_s", "skipped", "communicators", "not_ours")}
    write(args.o, document({**head, **own, "wrong": wrong, "training": training}, rows, failed, began))
    for row in rows:
        nccl = row["nccl"] or dict.fromkeys(("host_us", "device_us", "graph_us"), float("nan"))
        print(f"{row['collective']:14} {row['dtype']:9} {row['bytes']:8} wrong {row['wrong']}+{row['graph_wrong']} "
              f"ours {row['ours']}/{row['checked']}  host {row['host_us']:6.1f} ({nccl['host_us']:6.1f})  "
              f"device {row['device_us']:6.1f} ({nccl['device_us']:6.1f})  "
              f"graph {row['graph_us']:6.1f} ({nccl['graph_us']:6.1f}) us (NCCL's)")  # fmt: skip
    print(f"wrong {wrong}, losses equal: {training['equal']}, {training['ours']} calls of the training ours, "
          f"{sum(bool(r['ours']) for r in rows)} of {len(rows)} rows ours; failed: {failed}")  # fmt: skip
    return int(bool(wrong or failed or not training["equal"]))


if __name__ == "__main__":
    sys.exit(main())
