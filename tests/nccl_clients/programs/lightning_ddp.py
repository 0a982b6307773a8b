"""Train a small network by Lightning's DDP, and reduce its metrics over the ranks."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from steps import BACKEND, Steps, asked, prepare, sum_in_order
from torch.utils.data import DataLoader, TensorDataset

options = asked(__doc__)
prepare()
steps = Steps()
losses: list[float] = []


class Net(LightningModule):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 512),
            torch.nn.GELU(),
            torch.nn.Linear(512, 512),
            torch.nn.GELU(),
            torch.nn.Linear(512, 1),
        )

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Told(Callback):
    """Keeps losses and times."""

    def on_fit_start(self, *_: Any) -> None:
        sum_in_order()

    def on_train_batch_start(self, *_: Any) -> None:
        steps.begin()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        steps.end()
        losses.append(float(trainer.callback_metrics["loss"]))


seed_everything(4, verbose=False)
x = torch.randn(1024, 64)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
trainer = Trainer(
    accelerator="auto", devices=2, strategy=DDPStrategy(process_group_backend=BACKEND), max_steps=options.steps,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Told()],
)  # fmt: skip
trainer.fit(Net(), loader)
steps.tell(losses)
