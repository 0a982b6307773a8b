"""The slots of channels, and the CTAs of kernels, that a row of the selection table has by default."""

from typing import Literal, NamedTuple

KIB = 1 << 10
Gpus = Literal["", "onehop", "slots", "nodes"]  # how GPUs reach each other: see make_plan; none where CPU ranks call
# (largest slot in bytes, slots of a channel), from trials on one machine: docs/cpu_internals.md.
# Of links, the fewest slots.
LINK_SLOTS = (128 * KIB, 4)
GPU_SLOTS = (32 * KIB, 4)
PAIR_SLOTS = (64 * KIB, 4)  # between 2 GPUs; from runs on two H100
NODE_SLOTS, NODE_CTAS = (512 * KIB, 2), 16  # of channels between nodes: a chunk is a message, and few threads keep up
FEW_CTAS, BESIDE_CTAS = 64, 32  # that a kernel shall have: below the first, few; beside a model's kernels


class Choice(NamedTuple):
    """From so many bytes on, the scheme, and the bytes and number of its slots; chunks of at least so many bytes."""

    min_bytes: int
    scheme: str
    chunk_bytes: int
    depth: int
    least_chunk_bytes: int = 0


def slots_of(gpus: Gpus, n: int) -> tuple[int, int]:
    """The largest slot in bytes between n GPUs, and the slots of a channel."""
    return NODE_SLOTS if gpus == "nodes" else PAIR_SLOTS if gpus == "onehop" and n == 2 else GPU_SLOTS


def ctas_of(gpus: Gpus, n: int, max_ctas: int = 0) -> int:
    """The CTAs of a kernel ``slots`` between n GPUs; 0 for as many as there may be.

    Args:
        max_ctas: that a kernel shall have; 0: as many as there may be.
    """
    few = gpus == "onehop" and n == 2 and 0 < max_ctas < FEW_CTAS
    return NODE_CTAS if gpus == "nodes" else FEW_CTAS if few else 0
