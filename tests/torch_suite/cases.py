"""torch's test cases with our backend; imported by the program that starts them and by every process that they start.

``TestBlink`` are torch's tests as they are. Of FSDP and DTensor the wheel of torch has the bases, with what they
compare, but not the tests; so these are ours on those bases. They run on GPUs where there are some. ``BACKEND``,
``WORLD_SIZE`` and ``TEMP_DIR`` must be set before. Many tests are for the backends that they name; with ``TAKEN_FOR``
torch's tests are told that name, and start groups of ours by it.
"""

import itertools
import os
import unittest
from collections.abc import Iterator
from multiprocessing import set_forkserver_preload
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close
from torch.testing._internal import common_fsdp
from torch.testing._internal.common_distributed import DistTestCases, MultiProcessTestCase
from torch.testing._internal.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTestMixin,
    FSDPTestModel,
    NestedWrappedModule,
    TransformerWithSharedParams,
    check_sharded_parity,
)
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, MLPModule

import blinkmpi.torch
import blinkmpi.trees  # noqa: F401  what takes long to import, but starts no MPI: ranks are forked

for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
    DistTestCases.backend_feature[feature].add("blink")

BACKEND, RANKS = os.environ["BACKEND"], int(os.environ["WORLD_SIZE"])
DEVICE = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"

common_fsdp.DISTRIBUTED_BACKEND = BACKEND
os.environ["BACKEND"] = TOLD = os.environ.get("TAKEN_FOR", BACKEND)
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402

os.environ["BACKEND"] = BACKEND


def own_device(rank: int) -> torch.device:
    """What this rank computes on."""
    return torch.device(DEVICE, rank) if DEVICE == "cuda" else torch.device("cpu")


def take_device(rank: int) -> None:
    """Compute there from now on."""
    if DEVICE == "cuda":
        torch.cuda.set_device(own_device(rank))


class Forked(ForkServerProcess):
    """A rank, with the environment that the test has by now: each has a folder of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.environment = dict(os.environ)

    def run(self) -> None:
        os.environ.update(self.environment)
        super().run()


class FromServer:
    """Ranks are forked from a process that has imported what takes longer than a test.

    On GPUs not this module: what it imports of torch's looks for GPUs, and who has done so cannot fork ranks for them.
    """

    def _spawn_processes(self) -> None:
        set_forkserver_preload([__name__] if DEVICE == "cpu" else ["torch.distributed", "blinkmpi.trees"])
        self._start_processes(Forked)


class TestBlink(FromServer, TestDistBackend, DistributedTest._DistTestBase):
    """What torch asks of any backend: collectives, messages, groups, objects, DDP."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        start = dist.init_process_group

        def ours(*words: Any, backend: str, **more: Any) -> None:
            start(*words, backend=BACKEND if backend == TOLD else backend, **more)

        dist.init_process_group = ours
        super()._run(*args, **kwargs)


class TestFSDP(FromServer, FSDPTestMixin, MultiProcessTestCase):
    """FSDP against DDP by torch's own comparison, and FSDP2 against gradients that are averaged one by one."""

    @property
    def world_size(self) -> int:
        return RANKS

    @property
    def init_method(self) -> str:
        return f"file://{self.file_name}"

    @property
    def destroy_pg_upon_exit(self) -> bool:
        return False

    @property
    def process_group(self) -> dist.ProcessGroup:
        return dist.distributed_c10d._get_default_group()

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def run_test(self, *args: Any) -> None:
        take_device(self.rank)
        super().run_test(*args)

    def _parity(self, model: type[FSDPTestModel], strategy: ShardingStrategy, **options: object) -> None:
        self._test_fsdp_parity(
            model, FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_BEFORE, sharding_strategy=strategy,
            device_id=own_device(self.rank), **options,
        )  # fmt: skip

    def test_fsdp_full_shard(self) -> None:
        self._parity(NestedWrappedModule, ShardingStrategy.FULL_SHARD)

    def test_fsdp_full_shard_orig_params(self) -> None:
        self._parity(NestedWrappedModule, ShardingStrategy.FULL_SHARD, use_orig_params=True)

    def test_fsdp_shard_grad_op(self) -> None:
        self._parity(NestedWrappedModule, ShardingStrategy.SHARD_GRAD_OP)

    def test_fsdp_no_shard(self) -> None:
        self._parity(NestedWrappedModule, ShardingStrategy.NO_SHARD)

    def test_fsdp_transformer(self) -> None:
        self._parity(TransformerWithSharedParams, ShardingStrategy.FULL_SHARD)

    def _fully_sharded(self, steps: int = 3, **options: object) -> None:
        torch.set_default_device(DEVICE)
        torch.manual_seed(42)
        reference = torch.nn.Sequential(*(common_fsdp.MLP(16) for _ in range(3)))
        model = torch.nn.Sequential(*(common_fsdp.MLP(16) for _ in range(3)))
        model.load_state_dict(reference.state_dict())
        for layer in model:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (reference, model)]
        torch.manual_seed(42 + self.rank)
        for _ in range(steps):
            x = torch.randn(4, 16)
            losses = [m(x).sum() for m in (reference, model)]
            for loss in losses:
                loss.backward()
            for p in reference.parameters():
                dist.all_reduce(p.grad)
                p.grad.div_(self.world_size)
            check_sharded_parity(self, reference, model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_close(losses[0], losses[1])
        check_sharded_parity(self, reference, model)

    def test_fully_shard(self) -> None:
        self._fully_sharded()

    def test_fully_shard_keeps_parameters(self) -> None:
        self._fully_sharded(reshard_after_forward=False)

    def test_fully_shard_mixed_precision(self) -> None:
        torch.set_default_device(DEVICE)
        torch.manual_seed(1)
        model = common_fsdp.MLP(16)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        model(torch.randn(4, 16)).sum().backward()
        for p in model.parameters():
            assert bool(p.grad.full_tensor().isfinite().all())


class TestDTensor(FromServer, DTensorTestBase):
    """Tensors spread over ranks, by torch's own comparison."""

    @property
    def world_size(self) -> int:
        return RANKS

    @property
    def device_type(self) -> str:
        return DEVICE

    def init_pg(self, eager_init: bool, backend: str | None = None) -> None:
        dist.init_process_group(
            BACKEND, world_size=self.world_size, rank=self.rank, init_method=f"file://{self.file_name}"
        )

    def _meshes(self) -> Iterator[dist.DeviceMesh]:
        take_device(self.rank)
        torch.set_default_device(DEVICE)
        self.init_pg(eager_init=False)
        yield self.build_device_mesh()
        self.destroy_pg()

    def test_redistribute(self) -> None:
        for mesh in self._meshes():
            for shape in ((8, 12), (5, 7), (1, 3)):
                whole = torch.arange(float(shape[0] * shape[1])).view(shape)
                for src, dst in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2):
                    there = distribute_tensor(whole, mesh, [src]).redistribute(mesh, [dst])
                    assert_close(there.full_tensor(), whole)
                    assert_close(there.to_local(), distribute_tensor(whole, mesh, [dst]).to_local())

    def test_partial(self) -> None:
        for mesh in self._meshes():
            for shape, dst in itertools.product(((8, 12), (5, 7)), (Shard(0), Shard(1), Replicate())):
                mine = torch.full(shape, float(self.rank + 1))
                there = DTensor.from_local(mine, mesh, [Partial()]).redistribute(mesh, [dst])
                total = self.world_size * (self.world_size + 1) / 2
                assert_close(there.full_tensor(), torch.full(shape, total))

    def test_partial_reductions(self) -> None:
        for mesh in self._meshes():
            ranks = torch.arange(1.0, self.world_size + 1)
            for name, total in (("max", ranks.max()), ("min", ranks.min()), ("avg", ranks.mean())):
                mine = torch.full((4,), float(self.rank + 1))
                there = DTensor.from_local(mine, mesh, [Partial(name)]).redistribute(mesh, [Replicate()])
                assert_close(there.to_local(), total.expand(4))

    def test_operators(self) -> None:
        for mesh in self._meshes():
            torch.manual_seed(3)
            a, b = torch.randn(12, 8), torch.randn(8, 16)
            self._test_op(mesh, torch.mm, a, b)
            self._test_op(mesh, torch.add, a, torch.randn(12, 8))
            self._test_op(mesh, torch.nn.functional.softmax, a, dim=1)
            self._test_op(mesh, torch.sum, a)
            self._test_op(mesh, torch.transpose, a, 0, 1)

    def test_tensor_parallel(self) -> None:
        for mesh in self._meshes():
            torch.manual_seed(5)
            alone, spread = MLPModule(DEVICE), MLPModule(DEVICE)
            spread.load_state_dict(alone.state_dict())
            parallelize_module(spread, mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, spread)]
            for _ in range(3):
                x = torch.randn(6, 10)
                outputs = [m(x) for m in (alone, spread)]
                assert_close(outputs[0], outputs[1])
                for out, optimizer in zip(outputs, optimizers, strict=True):
                    out.sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            for one, other in zip(alone.parameters(), spread.parameters(), strict=True):
                assert_close(one, other.full_tensor() if isinstance(other, DTensor) else other)


del TestDistBackend, DTensorTestBase  # cases without tests of their own
ALL: tuple[type[unittest.TestCase], ...] = (TestBlink, TestFSDP, TestDTensor)
torch.set_num_threads(1)
