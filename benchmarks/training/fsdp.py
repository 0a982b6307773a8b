"""Steps of FSDP2 over each library in turn: ``torchrun --nproc-per-node 2 benchmarks/training/fsdp.py --gpu -o NAME``.

Copies of one transformer are trained side by side, each sharded by ``fully_shard`` (or, with ``--ddp``, in torch's
``DistributedDataParallel``) over a process group of its own: NCCL's, and groups of backend blink whose long calls have
no gate, or one from so many MiB on (``--gates``, ``BLINKMPI_GATE_FROM``), by default and with other limits of CTAs
(``--ctas``, ``BLINKMPI_MAX_CTAS``). Without ``--gpu`` the copies are small, on CPU ranks, beside gloo: nothing there is
about gates.

All copies begin with the same weights and see the same texts. They take turns of some steps that nothing waits for in
between, each round in another order. A turn takes as long as on the slowest rank: by CUDA's events on the stream of the
model, and by the host's clock. A way's ratio is the median over the rounds of the first library's turn by its own, with
a 95 % interval, so above 1 ours is faster. Behind the rounds, one turn of each is profiled: time of matrix products,
of kernels that communicate, and of gates. The losses of all steps are compared with the first library's.
"""

import argparse
import math
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import jobs

MILLI = 1e3
WARMUP, REPEATS = 3, 21
STEPS = 3  # of a turn, on GPUs
RATE = 1e-3  # of learning
CLOSE = 2e-2  # losses apart, at most, as a part of the loss
GATES, CTAS = (1, 8), (0,)  # MiB; 0: the default
# 939.5 million parameters: layers of 38.5, and 90 million of 50257 tokens
LARGE = {"width": 1792, "depth": 22, "heads": 14, "tokens": 50257, "length": 1023, "batch": 2}
SMALL = {"width": 64, "depth": 2, "heads": 2, "tokens": 512, "length": 32, "batch": 2}
ATEN = ("aten::mm", "aten::addmm", "aten::bmm")  # on CPU ranks
KINDS = {  # of kernels, by their names; the first that fits
    "gates": re.compile(r"^gate$"),
    "communication": re.compile(r"^(stages|direct|packets|gather|scatter)$|nccl", re.IGNORECASE),
    "attention": re.compile(r"flash|fmha|sdpa", re.IGNORECASE),
    "products": re.compile(r"gemm|nvjet|cutlass|xmma", re.IGNORECASE),
}


class Way(NamedTuple):
    """A library that communicates: what it is called, its group, and what was set for it."""

    name: str
    group: Any
    about: Mapping[str, Any]


@contextmanager
def variables(**wanted: str) -> Iterator[None]:
    """``BLINKMPI_`` variables for what is opened within."""
    with mock.patch.dict(os.environ, {f"BLINKMPI_{name}": value for name, value in wanted.items()}):
        yield


def ways_of(dist: Any, other: str, gates: Sequence[int], limits: Sequence[int]) -> list[Way]:
    """The groups, of all ranks each; the other library's is first."""
    found = [Way(other, dist.group.WORLD, {})]
    for ctas in limits:
        for mib in (None, *gates):
            gate = "off" if mib is None else str(mib << 20)
            name = "blink" if mib is None else f"blink, gate from {mib} MiB"
            with variables(GATE_FROM=gate, **({"MAX_CTAS": str(ctas)} if ctas else {})):
                group = dist.new_group(backend="blink")
                settings = group.comm.context.settings  # of a communicator that is opened now, when the variables hold
            about = {"gate_from": settings.gate_from, "max_ctas": settings.max_ctas or None}
            found.append(Way(f"{name}, {ctas} CTAs" if ctas else name, group, about))
    return found


class Copy:
    """A model, trained over a group."""

    def __init__(self, torch: Any, way: Way, options: argparse.Namespace, device: Any) -> None:
        from benchmarks.training.models import SEED, Transformer, texts

        self.way, self.losses = way, list[Any]()
        reduced = getattr(torch, options.reduce)
        torch.manual_seed(SEED)
        with torch.device(device):
            model = Transformer(options.tokens, options.length, options.width, options.depth, options.heads)
        self.parameters = sum(p.numel() for p in model.parameters())
        self._within: Callable[[], Any] = nullcontext
        if options.ddp:
            model = torch.nn.parallel.DistributedDataParallel(
                model.to(reduced), process_group=way.group, gradient_as_bucket_view=True
            )
            if reduced != torch.bfloat16:
                self._within = lambda: torch.autocast(device.type, torch.bfloat16)
        else:
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            mesh = DeviceMesh.from_group(way.group, device.type)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
            for block in model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), RATE)
        self.batch = texts(options.batch, options.length, options.tokens)(
            torch.distributed.get_rank(), device, torch.bfloat16
        )

    def step(self) -> None:
        """One step; nothing waits for it."""
        with self._within():
            loss = self.model(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def turn(self, steps: int) -> None:
        """Some of them."""
        for _ in range(steps):
            self.step()


class Clock:
    """Turns of the slowest rank; with ``events``, by CUDA's, too."""

    def __init__(self, torch: Any, control: Any, *, events: bool) -> None:
        self._torch, self._control, self._events = torch, control, events

    def wait(self) -> None:
        """For this rank's GPU."""
        if self._events:
            self._torch.cuda.synchronize()

    def told(self, mine: Sequence[float]) -> Iterator[tuple[float, ...]]:
        """Each number of all ranks."""
        found: list[Any] = [None] * self._torch.distributed.get_world_size()
        self._torch.distributed.all_gather_object(found, list(mine), group=self._control)
        return zip(*found, strict=True)

    def turn(self, work: Callable[[], None], steps: int) -> tuple[float, float]:
        """Milliseconds of one of so many steps: on the GPU (on CPU ranks, the host's again), and on the host."""
        self.wait()
        self._torch.distributed.barrier(group=self._control)
        marks = [self._torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._events else []
        begin = time.perf_counter()
        for mark in marks[:1]:
            mark.record()
        work()
        for mark in marks[1:]:
            mark.record()
        self.wait()
        took = (time.perf_counter() - begin) * MILLI
        on_gpu = float(marks[0].elapsed_time(marks[1])) if marks else took
        on_slowest, longest = (max(some) for some in self.told((on_gpu / steps, took / steps)))
        return on_slowest, longest


def interval(ratios: Sequence[float]) -> dict[str, float | None]:
    """The median of ratios, and its 95 % confidence interval; no ends where they are too few for one."""
    from scipy.stats import quantile_test

    median = statistics.median(ratios)
    low, high = quantile_test(list(ratios), q=median, p=0.5).confidence_interval(0.95)
    ends = {"low": float(low), "high": float(high)}
    return {"median": median, **{name: None if math.isnan(end) else end for name, end in ends.items()}}


def kind_of(kernel: str) -> str:
    """What a kernel is for."""
    return next((kind for kind, names in KINDS.items() if names.search(kernel)), "other")


def profiled(torch: Any, clock: Clock, copy: Copy, steps: int, *, gpu: bool) -> dict[str, float]:
    """Milliseconds of a step that kernels of each kind took on this rank; on CPU ranks, matrix products alone."""
    from torch.profiler import ProfilerActivity, profile

    clock.wait()
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as seen:
        copy.turn(steps)
        clock.wait()
    found: dict[str, float] = {}
    if not gpu:
        us = sum(row.self_cpu_time_total for row in seen.key_averages() if row.key in ATEN)
        return {"products": us / MILLI / steps}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = kind_of(event.name)
            found[kind] = found.get(kind, 0.0) + event.time_range.elapsed_us() / MILLI / steps
    return found


def losses_of(torch: Any, clock: Clock, copy: Copy) -> list[float]:
    """The mean over all ranks of each step's loss."""
    return [statistics.mean(some) for some in clock.told(torch.stack([loss.float() for loss in copy.losses]).tolist())]


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """How far the losses of two ways are apart, at most, as a part of the loss."""
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def measured(torch: Any, ways: Sequence[Way], options: argparse.Namespace, device: Any, clock: Clock) -> dict[str, Any]:
    """The row of the model."""
    gpu = device.type == "cuda"
    copies = {way.name: Copy(torch, way, options, device) for way in ways}
    draw = random.Random(0)  # the same on all ranks
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in copies}
    for _ in range(WARMUP + options.repeats):
        for name in draw.sample(list(copies), len(copies)):
            turns[name].append(clock.turn(lambda copy=copies[name]: copy.turn(options.steps), options.steps))
    kernels = {name: profiled(torch, clock, copy, options.steps, gpu=gpu) for name, copy in copies.items()}
    losses = {name: losses_of(torch, clock, copy) for name, copy in copies.items()}
    first = ways[0].name
    row: dict[str, Any] = {
        "model": "transformer", "how": "ddp" if options.ddp else "fully_shard", "reduce": options.reduce,
        "parameters": copies[first].parameters, "libraries": {},
        **{name: getattr(options, name) for name in LARGE},
    }  # fmt: skip
    for way in ways:
        kept = turns[way.name][WARMUP:]
        pairs = list(zip(turns[first][WARMUP:], kept, strict=True))
        row["libraries"][way.name] = {
            **way.about,
            "step_ms": statistics.median(ms for ms, _ in kept), "wall_ms": statistics.median(ms for _, ms in kept),
            "ratio": interval([theirs[0] / own[0] for theirs, own in pairs]),
            "wall_ratio": interval([theirs[1] / own[1] for theirs, own in pairs]),
            "kernels_ms": kernels[way.name], "losses_apart": apart(losses[first], losses[way.name]),
            "first_loss": losses[way.name][0], "last_loss": losses[way.name][-1],
            "turns_ms": [round(ms, 4) for ms, _ in kept], "wall_turns_ms": [round(ms, 4) for _, ms in kept],
        }  # fmt: skip
    return row


def shown(row: Mapping[str, Any]) -> str:
    """A row as lines: one for each library."""
    lines = [f"{row['how']}, {row['parameters'] / 1e6:.1f} M parameters, reduced in {row['reduce']}:"]
    for name, one in row["libraries"].items():
        ratio, ends = one["ratio"]["median"], [one["ratio"][end] for end in ("low", "high")]
        between = "" if None in ends else f" ({ends[0]:.3f} to {ends[1]:.3f})"
        kernels = ", ".join(f"{kind} {ms:.1f}" for kind, ms in sorted(one["kernels_ms"].items()))
        lines.append(
            f"  {name:32} {one['step_ms']:8.2f} ms (host {one['wall_ms']:.2f}), "
            f"ratio {ratio:.3f}{between}; losses apart {one['losses_apart']:.0e}; {kernels}"
        )
    return "\n".join(lines)


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with the size of the model where none is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="on GPUs, beside NCCL")
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel in place of fully_shard")
    parser.add_argument("--reduce", choices=("bfloat16", "float32"), default="bfloat16", help="type of gradients' sums")
    parser.add_argument("--gates", type=int, nargs="*", default=GATES, metavar="MIB", help="gates from so many MiB on")
    parser.add_argument("--ctas", type=int, nargs="+", default=CTAS, metavar="N", help="of our kernels; 0: the default")
    for name, large in LARGE.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"of the model; {large} on GPUs")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--steps", type=int, help="of a turn")
    parser.add_argument("-o", "--output", help="write the result as JSON under this name, or one beside it if taken")
    options = parser.parse_args(argv)
    for name, size in (LARGE if options.gpu else SMALL).items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    options.steps = options.steps or (STEPS if options.gpu else 1)
    return options


def main() -> None:
    """Measure, and let rank 0 write."""
    options, began = parsed(), datetime.now().astimezone()
    if "RANK" not in os.environ:
        raise SystemExit("start it by torchrun, as its first line says")
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    import blinkmpi.torch  # noqa: F401
    from blinkmpi.torch import torch_extension

    torch.set_num_threads(1)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if options.gpu else torch.device("cpu")
    if options.gpu:
        torch.cuda.set_device(device)
    other = "nccl" if options.gpu else "gloo"
    dist.init_process_group(other)
    control = dist.new_group(backend="gloo")
    ways = ways_of(dist, other, options.gates, options.ctas)
    compiled = options.gpu and torch_extension.wait() is not None
    row = measured(torch, ways, options, device, Clock(torch, control, events=options.gpu))
    comm = ways[1].group.comm
    facts = {"torch": torch.__version__, **jobs.rank_facts(MPI, comm)}
    if options.gpu:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        facts |= {"torch_extension": compiled, "gpu": {"name": comm.gpu.name, **comm.gpu.versions, "NCCL": nccl}}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(shown(row), flush=True)
    wrong = [name for name, one in row["libraries"].items() if not one["losses_apart"] < CLOSE]
    if rank == 0 and options.output:
        how = {"repeats": options.repeats, "steps": options.steps, "threads": 1}
        statistic = "median over turns of the slowest rank's time of a step"
        jobs.write(options.output, jobs.document(
            {"fsdp": how, "env": facts["env"]}, [row], [f"{name}: losses are apart" for name in wrong], began,
            ranks=ranks, statistic=statistic, memory="gpu" if options.gpu else "host", **facts,
        ))  # fmt: skip
    dist.barrier(group=control)
    dist.destroy_process_group()
    if wrong:
        raise SystemExit(f"losses are apart: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
