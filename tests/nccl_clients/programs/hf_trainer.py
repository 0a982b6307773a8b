"""Train a small GPT-2, made from a configuration, by Hugging Face's Trainer."""

import tempfile
from typing import Any

import torch
from steps import BACKEND, ON_GPU, Steps, asked, leave, prepare, sum_in_order
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

WORDS, LENGTH, EXAMPLES = 512, 64, 512
options = asked(__doc__)
prepare()
steps = Steps()


class Told(TrainerCallback):
    """Keeps losses and times."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        sum_in_order()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        steps.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        steps.end()

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


config = GPT2Config(
    vocab_size=WORDS, n_positions=LENGTH, n_embd=256, n_layer=4, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0,
    resid_pdrop=0.0, attn_implementation="eager", use_cache=False, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
draw = torch.Generator().manual_seed(2)
data = [{"input_ids": row, "labels": row} for row in torch.randint(WORDS, (EXAMPLES, LENGTH), generator=draw)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=8, max_steps=options.steps, logging_steps=1, save_strategy="no",
        report_to=[], ddp_backend=BACKEND, ddp_bucket_cap_mb=1, disable_tqdm=True, use_cpu=not ON_GPU,
        dataloader_pin_memory=False, seed=3,
    )  # fmt: skip
    told = Told()
    Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[told]).train()
steps.tell(told.losses)
leave()
