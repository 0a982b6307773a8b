"""Train a small network by Lightning on CPU ranks, with metrics that it reduces over the ranks, and keep what came out.

The backend of the process group is Lightning's own choice on CPUs, gloo, or the one that is named.
"""

import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset


class Net(LightningModule):
    """Two layers, and everything logged with ``sync_dist=True``: sums and means of floats, a mean of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        wrong = (self.layers(x) - y).abs()
        self.log("error", wrong.mean(), sync_dist=True)
        self.log("worst", wrong.max(), sync_dist=True, reduce_fx="max")
        self.log("large", (wrong > 0.5).sum(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train(backend: str | None) -> dict[str, float]:
    """The metrics after some epochs, and the sum of the weights' magnitudes."""
    seed_everything(0)
    x = torch.randn(512, 16)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = Net()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    strategy = DDPStrategy(process_group_backend=backend)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=4, **quiet)
    trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=32))
    found = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
    return {**found, "weights": sum(float(p.detach().abs().sum()) for p in model.parameters())}


if __name__ == "__main__":
    RESULT = train(sys.argv[1] if len(sys.argv) > 1 else None)
    print(RESULT, flush=True)
