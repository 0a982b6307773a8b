"""What people train with, on backend ``blink``: the same weights as on gloo.

Models and data are on torch's default device, which tests/gpu/streams makes a GPU, and begin with the same
numbers on all devices.
"""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import ArgumentError
from tests.harness import long_but, mpi
from tests.torch.test_backend import job, needs

torch = pytest.importorskip("torch")
dist, nn = torch.distributed, torch.nn
STEPS = 4
Weights = list[Any]


def here(made: Any) -> Any:
    """A tensor or module on the default device."""
    return made.to(torch.get_default_device())


def network(*, normalized: bool = True) -> Any:
    torch.manual_seed(7)
    with torch.device("cpu"):
        middle = [nn.BatchNorm1d(32)] if normalized else []
        made = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), *middle, nn.Linear(32, 8))
    return here(made)


def plain_network() -> Any:
    return network(normalized=False)


def train(model: Any, optimizer: Any, rank: int, steps: int = STEPS) -> None:
    torch.manual_seed(100 + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        given, wanted = (here(torch.randn(6, width, device="cpu")) for width in (16, 8))
        loss = (model(given) - wanted).square().mean()
        loss.backward()
        optimizer.step()


def of(model: Any) -> Weights:
    """All parameters, whole."""
    found = []
    for p in model.parameters():
        whole = p.detach()
        found.append((whole.full_tensor() if hasattr(whole, "full_tensor") else whole).clone())
    return found


def ddp(rank: int) -> Weights:
    model = nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.002)
    train(model, torch.optim.SGD(model.parameters(), 0.1), rank)
    return of(model)


def compiled_ddp(rank: int) -> Weights:
    model = nn.parallel.DistributedDataParallel(plain_network())
    compiled = torch.compile(model, backend="aot_eager")
    train(compiled, torch.optim.SGD(model.parameters(), 0.1), rank)
    return of(model)


def zero(rank: int) -> Weights:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(network())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01), rank)
    return of(model)


def join(rank: int) -> Weights:
    from torch.distributed.algorithms.join import Join

    model = nn.parallel.DistributedDataParallel(plain_network())
    with Join([model]):
        train(model, torch.optim.SGD(model.parameters(), 0.1), rank, STEPS + rank)
    return of(model)


def fsdp2(rank: int) -> Weights:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    model = plain_network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, torch.optim.Adam(model.parameters(), lr=0.01), rank)
    return of(model)


def fsdp1(rank: int) -> Weights:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(plain_network(), device_id=torch.get_default_device())
    train(model, torch.optim.SGD(model.parameters(), 0.1), rank)
    with FullyShardedDataParallel.summon_full_params(model):
        return [p.detach().clone() for p in model.parameters()]


def dtensor(rank: int) -> Weights:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    n = dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh(torch.get_default_device().type, (n,))
    torch.manual_seed(3)
    a, b = (here(torch.randn(shape, device="cpu")) for shape in ((5, 7), (7, 4 * n)))
    left, right = distribute_tensor(a, mesh, [Replicate()]), distribute_tensor(b, mesh, [Shard(0)])
    product = (left.redistribute(mesh, [Shard(1)]) @ right).redistribute(mesh, [Replicate()])
    moved = distribute_tensor(b, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
    assert torch.equal(moved.full_tensor(), b)
    return [product.to_local(), moved.full_tensor()]


def pipeline(schedule: str) -> Callable[[int], Weights]:
    """A pipeline by one of torch's schedules, of two stages a rank where the schedule takes several."""

    def run(rank: int) -> Weights:
        pipelining = pytest.importorskip("torch.distributed.pipelining")
        kind, n = getattr(pipelining, schedule, None), dist.get_world_size()
        if kind is None:
            pytest.skip(f"torch {torch.__version__} has no {schedule}")
        several = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
        stages = n * (2 if several else 1)
        torch.manual_seed(7)
        parts = [nn.Sequential(nn.Linear(16, 16, device="cpu"), nn.Tanh()) for _ in range(stages)]
        given, wanted = (here(torch.randn(8, 16, device="cpu")) for _ in range(2))
        mine = [i for i in range(stages) if i % n == rank]
        device = torch.get_default_device()
        made = [pipelining.PipelineStage(here(parts[i]), i, stages, device) for i in mine]
        step = kind(made if several else made[0], n_microbatches=4, loss_fn=nn.functional.mse_loss)
        losses: list[Any] = []
        for _ in range(STEPS):
            step.step(
                *([given] if rank == 0 else []), **({"target": wanted, "losses": losses} if rank == n - 1 else {})
            )
            for i in mine:
                for p in parts[i].parameters():
                    p.data -= 0.1 * p.grad
                    p.grad = None
        return [p.detach().clone() for i in mine for p in parts[i].parameters()] + [loss.detach() for loss in losses]

    run.__name__ = schedule
    return run


SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
TRAININGS: dict[str, Callable[[int], Weights]] = {
    f.__name__: f for f in (ddp, compiled_ddp, zero, join, fsdp2, fsdp1, dtensor, *map(pipeline, SCHEDULES))
}
MARKS = {
    "fsdp2": needs("torch.distributed.fsdp", "fully_shard"),
    "dtensor": needs("torch.distributed.tensor", "Shard"),
    **dict.fromkeys(("ScheduleGPipe", "ScheduleInterleaved1F1B"), pytest.mark.long),
    **dict.fromkeys(("compiled_ddp", "fsdp1", "join", "zero"), pytest.mark.long),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in sorted(TRAININGS)])
@mpi(ranks=(2,), timeout=180)
def test_the_weights_are_those_of_gloo(comm: MPI.Intracomm, name: str) -> None:
    found = {}
    for backend in ("gloo", "blink"):
        with job(backend):
            found[backend] = TRAININGS[name](comm.rank)
    assert found["gloo"], "weights to compare"
    for one, other in zip(found["gloo"], found["blink"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@mpi(ranks=(2,), timeout=120)
def test_torch_compile_does_not_look_into_ours(comm: MPI.Intracomm) -> None:
    """Also where it comes into use after the group."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    with job():
        dist.barrier()
        torch._logging.set_logs(dynamo=logging.INFO)
        logging.getLogger("torch._dynamo").addHandler(handler)
        compiled_ddp(comm.rank)
    traced = [text for text in said if "start tracing" in text]
    assert traced
    assert not [text for text in traced if str(Path(blinkmpi.__file__).parent) in text]


@pytest.mark.parametrize("level", long_but(("DETAIL",), ("INFO", "DETAIL")))
@mpi(ranks=(2,), timeout=120)
def test_with_torchs_own_debugging(comm: MPI.Intracomm, level: str) -> None:
    """What TORCH_DISTRIBUTED_DEBUG sets: torch then logs more, and with DETAIL would wrap groups of its own."""
    before, found = dist.get_debug_level(), {}
    for wanted in (before, getattr(dist.DebugLevel, level)):
        dist.set_debug_level(wanted)
        try:
            with job() as group:
                assert dist.get_backend(group) == "blink"
                found[wanted] = ddp(comm.rank)
        finally:
            dist.set_debug_level(before)
    for one, other in zip(*found.values(), strict=True):
        assert torch.equal(one, other)


@mpi(ranks=(2,), timeout=120)
def test_a_checkpoint(comm: MPI.Intracomm, tmp_path: Path) -> None:
    from torch.distributed import checkpoint

    with job():
        x, y = torch.full((10,), 3.0), torch.zeros(10)
        checkpoint.save({"x": x}, checkpoint_id=tmp_path / "made")
        checkpoint.load(state := {"x": y}, checkpoint_id=tmp_path / "made")
        assert (state["x"] == 3).all()
        dist.barrier()
        if comm.rank == 0:
            shutil.rmtree(tmp_path / "made")


@mpi(ranks=(2,), timeout=120)
def test_the_hook_beside_gloo(comm: MPI.Intracomm) -> None:
    from blinkmpi.torch import ddp_hook

    weights = {}
    with job("gloo"), blinkmpi.Communicator(comm) as ours, blinkmpi.Communicator(MPI.COMM_SELF) as alone:
        for hooked in (False, True):
            model = nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.002)
            if hooked:
                model.register_comm_hook(None, ddp_hook(ours))
            train(model, torch.optim.SGD(model.parameters(), 0.1), comm.rank)
            weights[hooked] = of(model)
        with pytest.raises(ArgumentError, match="ddp_hook: this group's backend is gloo, not blink"):
            ddp_hook()
        with pytest.raises(ArgumentError, match=rf"ddp_hook: rank {comm.rank} of torch's group of 2 is rank 0 .* of 1"):
            ddp_hook(alone)
    with job():
        model = nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.002)
        model.register_comm_hook(None, ddp_hook())
        train(model, torch.optim.SGD(model.parameters(), 0.1), comm.rank)
        for one, other in zip(weights[False], of(model), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for one, other in zip(weights[False], weights[True], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@mpi(ranks=(2,), long=(3,), timeout=120)
def test_an_error_in_backward_keeps_its_type(comm: MPI.Intracomm) -> None:
    """A rank leaves out its backward pass: the others hear of it there, not as a RuntimeError of torch's."""
    from blinkmpi.errors import BlinkError

    with job():
        model = nn.parallel.DistributedDataParallel(plain_network())
        loss = model(torch.ones(6, 16)).sum()
        with pytest.raises(BlinkError):
            dist.all_reduce(torch.ones(3)) if comm.rank == 1 else loss.backward()


@needs("torch.distributed.fsdp", "FSDPModule.set_custom_all_gather")
@mpi(ranks=(2,), timeout=120)
def test_fsdp2_with_collectives_of_ours_beside_gloo(comm: MPI.Intracomm) -> None:
    from torch.distributed.fsdp import fully_shard

    from blinkmpi.torch import AllGather, ReduceScatter

    weights = {}
    with job("gloo"):
        ours = dist.new_group(backend="blink")
        for custom in (False, True):
            model = fully_shard(plain_network())
            if custom:
                model.set_custom_all_gather(AllGather(ours))
                model.set_custom_reduce_scatter(ReduceScatter(ours))
            train(model, torch.optim.Adam(model.parameters(), lr=0.01), comm.rank)
            weights[custom] = of(model)
        with blinkmpi.Communicator(MPI.COMM_SELF) as alone:
            model = fully_shard(plain_network())
            model.set_custom_all_gather(AllGather(alone))
            with pytest.raises(ArgumentError, match=r"AllGather: .* group of 2 is rank 0 of a Communicator of 1"):
                model(here(torch.ones(6, 16)))
    for one, other in zip(weights[False], weights[True], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
