"""Train a small network by accelerate, which gathers and reduces metrics in each step."""

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from steps import BACKEND, Steps, asked, prepare, sum_in_order
from torch.utils.data import DataLoader, TensorDataset

options = asked(__doc__)
prepare()
steps = Steps()
accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend=BACKEND)])
sum_in_order()
set_seed(5)
layers = (
    torch.nn.Linear(64, 512),
    torch.nn.GELU(),
    torch.nn.Linear(512, 512),
    torch.nn.GELU(),
    torch.nn.Linear(512, 1),
)
model = torch.nn.Sequential(*layers)
x = torch.randn(1024, 64)
loader = DataLoader(TensorDataset(x, x.tanh().sum(1, keepdim=True)), batch_size=16)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
losses: list[float] = []
while len(steps.seconds) < options.steps:
    for features, wanted in loader:
        steps.begin()
        found = model(features)
        loss = torch.nn.functional.mse_loss(found, wanted)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        everything = accelerator.gather_for_metrics((found - wanted).detach())
        mean = accelerator.reduce(loss.detach(), "mean")
        steps.end()
        losses += [float(mean), float(everything.abs().sum())]
steps.tell(losses)
accelerator.end_training()  # and the group's end
