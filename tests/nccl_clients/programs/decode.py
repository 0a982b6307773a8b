"""Decode token after token by a network whose layers are split over the ranks, as servers of language models do.

Each layer ends in two AllReduces of a few KiB. After some steps one by one, the step is captured in a CUDA graph.
"""

import os

import torch
import torch.distributed as dist
from steps import BACKEND, ON_GPU, Steps, asked, leave, prepare, sum_in_order

options = asked(__doc__)
prepare()
steps = Steps()
local = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local) if ON_GPU else torch.device("cpu")
if ON_GPU:
    torch.cuda.set_device(device)
dist.init_process_group(BACKEND, device_id=device if ON_GPU else None)
sum_in_order()
WIDTH, LAYERS, WORDS, BATCH = 1024, 8, 2048, 4
TYPE = torch.bfloat16 if ON_GPU else torch.float32
n, rank = dist.get_world_size(), dist.get_rank()


class Layer(torch.nn.Module):
    """Attention's and the MLP's outer products, each split over the ranks, whose sums are AllReduces."""

    def __init__(self) -> None:
        super().__init__()
        make = {"bias": False, "dtype": TYPE, "device": device}
        part, wide = WIDTH // n, 4 * WIDTH // n
        self.into = torch.nn.ModuleList([torch.nn.Linear(WIDTH, size, **make) for size in (part, wide)])
        self.out = torch.nn.ModuleList([torch.nn.Linear(size, WIDTH, **make) for size in (part, wide)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for into, out in zip(self.into, self.out, strict=True):
            y = out(torch.nn.functional.gelu(into(torch.nn.functional.layer_norm(x, (WIDTH,)))))
            dist.all_reduce(y)
            x = x + y
        return x


torch.manual_seed(6)
words, answers = (torch.randn(WORDS, WIDTH, dtype=TYPE, device=device) for _ in range(2))
torch.manual_seed(7 + rank)
network = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))
tokens = torch.arange(BATCH, device=device)


@torch.no_grad()
def step() -> None:
    """The next token of each sequence, in place."""
    tokens.copy_((network(words[tokens]) @ answers.T).argmax(-1))


warmup = options.steps
for _ in range(warmup):
    step()
tokens.copy_(torch.arange(BATCH, device=device))
run = step
if ON_GPU:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    run = graph.replay
values: list[float] = []
for _ in range(options.steps):
    steps.begin()
    run()
    steps.end()
    values += tokens.tolist()
steps.tell(values)
leave()
