"""The models that are trained: ResNet-50, GPT-2 of 124 million parameters, transformers of 25 and 267, with data.

Weights and data are random, of a fixed seed; nothing is downloaded. Each model returns its loss.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

SEED = 2020
USUAL = ("resnet50", "gpt2-124m", "transformer-25m")
SHORT = 1, 127  # one text of so many tokens: a step with little to compute


class Workload(NamedTuple):
    """A model to train, and a batch of a rank: ``batch(rank, device, dtype)`` gives the arguments of the model."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int, Any, torch.dtype], tuple[torch.Tensor, ...]]
    about: str


# ---------------------------------------------------------------- ResNet-50 (He et al., 2015)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the stride is in the 3x3 one."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.path = nn.Sequential(
            _convolution(channels, width, 1), nn.ReLU(), _convolution(width, width, 3, stride), nn.ReLU(),
            _convolution(width, out, 1),
        )  # fmt: skip
        straight = stride == 1 and channels == out
        self.shortcut = nn.Identity() if straight else _convolution(channels, out, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        return functional.relu(self.path(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """25.6 million parameters."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        blocks, channels = [], 64
        for stage, depth in enumerate((3, 4, 6, 3)):
            for i in range(depth):
                blocks.append(Bottleneck(channels, 64 << stage, 2 if stage and not i else 1))
                channels = 256 << stage
        self.stem = nn.Sequential(_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross entropy of a batch."""
        return functional.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), labels)


def _convolution(channels: int, out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out))


def images(count: int, pixels: int) -> Callable[[int, Any, torch.dtype], tuple[torch.Tensor, ...]]:
    """Batches of ``count`` square images."""

    def batch(rank: int, device: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        random = torch.Generator().manual_seed(SEED + rank)
        pictures = torch.randn(count, 3, pixels, pixels, generator=random)
        labels = torch.randint(1000, (count,), generator=random)
        return pictures.to(device, dtype), labels.to(device)

    return batch


# ---------------------------------------------------------------- transformers (Radford et al., 2019)


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each behind a normalisation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.forward_layer = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        batch, length, width = x.shape
        parts = self.attend(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.forward_layer(self.after(x))


class Transformer(nn.Module):
    """A language model whose first and last layers share their weights."""

    def __init__(self, tokens: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.last = nn.LayerNorm(width)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Cross entropy of the next tokens."""
        given, wanted = text[:, :-1], text[:, 1:]
        x = self.tokens(given) + self.places.weight[: given.shape[1]]
        logits = functional.linear(self.last(self.blocks(x)), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def gpt2() -> nn.Module:
    """The smallest GPT-2: 124 million parameters."""
    return Transformer(50257, 1024, 768, 12, 12)


def small() -> nn.Module:
    """25 million parameters."""
    return Transformer(16384, 512, 432, 8, 6)


def large() -> nn.Module:
    """267 million parameters."""
    return Transformer(50257, 1024, 1024, 17, 16)


def texts(count: int, length: int, tokens: int) -> Callable[[int, Any, torch.dtype], tuple[torch.Tensor, ...]]:
    """Batches of ``count`` texts."""

    def batch(rank: int, device: Any, _: torch.dtype) -> tuple[torch.Tensor, ...]:
        random = torch.Generator().manual_seed(SEED + rank)
        return (torch.randint(tokens, (count, length + 1), generator=random).to(device),)

    return batch


def workloads(*, gpu: bool) -> dict[str, Workload]:
    """The models with batches that a GPU, or a core, computes in a reasonable time."""
    count, pixels = (64, 224) if gpu else (2, 96)
    found = [Workload("resnet50", ResNet50, images(count, pixels), f"{count} images of {pixels} x {pixels}")]
    for name, model, long, tokens in (
        ("gpt2-124m", gpt2, (8, 1023) if gpu else (1, 64), 50257),
        ("transformer-25m", small, (32, 511) if gpu else (2, 64), 16384),
        ("transformer-267m", large, (4, 1023) if gpu else (1, 64), 50257),
    ):
        found.append(Workload(name, model, texts(*long, tokens), "{} texts of {} tokens".format(*long)))
        found.append(Workload(f"{name}-short", model, texts(*SHORT, tokens), "{} text of {} tokens".format(*SHORT)))
    return {w.name: w for w in found}
