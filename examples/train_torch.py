"""Data-parallel training with PyTorch's DDP over blinkmpi, the same file for both ways to start it.

``mpirun -np 4 python examples/train_torch.py`` or ``torchrun --nproc-per-node 4 examples/train_torch.py``.

Every rank holds the network and a share of each batch; DDP averages the gradients through the backend ``blink``. The
data are scikit-learn's handwritten digits. It runs on the GPUs where there is one for each rank, else on CPUs.
"""

import argparse
import hashlib
import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import blinkmpi.torch

ENOUGH = 0.95  # test accuracy below this is a failure


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits with DDP.")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the training data (%(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="samples in a step, of all ranks together (%(default)s)")
    parser.add_argument("--backend", default="blink", help="blink, or gloo or nccl to compare (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, split and order (%(default)s)")
    return parser.parse_args()


def digits_split(device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give training inputs and digits, test inputs and digits: four fifths and one fifth."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    x = (torch.tensor(data.data, dtype=torch.float32) / 16)[order].to(device)
    y = torch.tensor(data.target)[order].to(device)
    cut = len(y) * 4 // 5
    return x[:cut], y[:cut], x[cut:], y[cut:]


def main() -> int:
    args = arguments()
    blinkmpi.torch.setenv()  # under mpirun and srun: what torchrun would have set
    local = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpus:
        torch.cuda.set_device(local)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    network = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y, test_x, test_y = digits_split(device, args.seed)
    order = torch.Generator().manual_seed(args.seed)
    for epoch in range(1, args.epochs + 1):
        shuffled = torch.randperm(len(y), generator=order)
        for batch in shuffled.split(args.batch)[: len(y) // args.batch]:
            mine = batch[rank::size].to(device)
            loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0 and epoch % max(1, args.epochs // 3) == 0:
            print(f"epoch {epoch} of {args.epochs}, loss on rank 0 {loss.item():.4f}")

    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
    hashes: list[str] = [""] * size
    dist.all_gather_object(hashes, hashlib.sha256(weights.numpy().tobytes()).hexdigest())
    same = len(set(hashes)) == 1
    accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean().item()
    passed = same and accuracy >= ENOUGH
    if rank == 0:
        if args.backend == "blink":
            print(blinkmpi.torch.explain(nbytes=weights.numel() * 4))
        print(f"weights     {'bit-identical' if same else 'NOT EQUAL'} on {size} ranks ({hashes[0][:16]})")
        print(f"accuracy    {accuracy:.1%} of {len(test_y)} test digits, {ENOUGH:.0%} wanted")
        print(f"result      {'passed' if passed else 'FAILED'}")
    dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
