"""Training with PyTorch's FSDP2 over blinkmpi: each rank keeps a part of every weight.

``mpirun -np 4 python examples/train_fsdp.py`` or ``torchrun --nproc-per-node 4 examples/train_fsdp.py``.

The weights are gathered before a layer computes and its gradients are summed and scattered behind it, both through the
backend ``blink``. Each rank learns a function of its own random inputs; no data are needed.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import blinkmpi.torch

STEPS, WIDTH, BATCH = 100, 256, 64
ENOUGH = 0.5  # of the first loss


def main() -> int:
    blinkmpi.torch.setenv()  # under mpirun and srun: what torchrun would have set
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if torch.cuda.device_count() >= here else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    dist.init_process_group("blink")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)), nn.Linear(WIDTH, 1))
    model.to(device)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    torch.manual_seed(rank + 1)
    first = last = torch.zeros((), device=device)
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH, device=device)
        loss = (model(x) - x[:, :8].sin().sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = loss.detach()
        first = last.clone() if step == 0 else first
    both = torch.stack([first, last])
    dist.all_reduce(both, dist.ReduceOp.AVG)
    passed = bool(both[1] < ENOUGH * both[0])
    if rank == 0:
        kept = sum(p.to_local().numel() for p in model.parameters())
        whole = sum(p.numel() for p in model.parameters())
        print(f"weights     {kept:,} of {whole:,} on each of {dist.get_world_size()} ranks")
        print(f"loss        {both[0]:.3f} at first, {both[1]:.3f} after {STEPS} steps")
        print(f"result      {'passed' if passed else 'FAILED'}")
    dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
