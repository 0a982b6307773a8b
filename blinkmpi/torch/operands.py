"""What a collective of ours reads and writes, made of torch's tensors: flat views, and temporaries where there is none.

Reductions need the element type; what only moves goes as bytes, so any type does. A tensor in host memory becomes a
NumPy array over the same memory, a tensor on a GPU stays a tensor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import ArgumentError, BufferTypeError
from ..program.reduction import DTYPES, dtype_of

Tensor = Any  # torch.Tensor; torch's own annotations are not followed
After = Callable[[], object] | None

KINDS = dist.ReduceOp.RedOpType if hasattr(dist.ReduceOp, "RedOpType") else dist.ReduceOp
OPS = {
    KINDS.SUM: "sum",
    KINDS.AVG: "avg",
    KINDS.PRODUCT: "prod",
    KINDS.MIN: "min",
    KINDS.MAX: "max",
    KINDS.BAND: "band",
    KINDS.BOR: "bor",
    KINDS.BXOR: "bxor",
}
OF_BOOL = {"sum": "lor", "max": "lor", "bor": "lor", "prod": "land", "min": "land", "band": "land", "bxor": "lxor"}
BYTE = np.dtype(np.uint8)
TYPES = {getattr(torch, name): dtype_of(name) for name in DTYPES if hasattr(torch, name)}


class Reduction:
    """An operation as torch names it.

    Attributes:
        op: ours.
        factor: what each operand is multiplied with first (PREMUL_SUM), or None.
    """

    __slots__ = ("factor", "op")

    def __init__(self, options: Any) -> None:
        given = getattr(options, "reduceOp", options)
        given = KINDS.SUM if given is None else given
        kind = getattr(given, "op", given)
        self.factor = None
        known = OPS.get(kind)
        if known is not None:
            self.op = known
        elif kind == KINDS.PREMUL_SUM:
            self.op, self.factor = "sum", given.__getstate__()[1]
        else:
            names = ", ".join(kind.name for kind in OPS)
            raise ArgumentError(f"reduce op {given!r}: expected one of {names}, PREMUL_SUM; reduce in another way")

    def of(self, dtype: Any) -> str:
        """Our operation for elements of a type: torch counts with bools as if they were bits."""
        return OF_BOOL.get(self.op, self.op) if dtype is torch.bool else self.op

    def scaled(self, tensor: Tensor) -> Tensor:
        """The operand: the tensor itself, or a multiple of it in memory of its own."""
        if self.factor is None:
            return tensor
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise BufferTypeError(
                f"PREMUL_SUM of {tensor.dtype}: expected a type with fractions; convert the tensor first"
            )
        return (tensor * self.factor).to(tensor.dtype)


def only(tensors: Any, what: str) -> Any:
    """The one item of a list (torch's interface is from the time of several devices a process)."""
    if not isinstance(tensors, list | tuple):
        return tensors
    if len(tensors) != 1:
        raise ArgumentError(f"{what}: {len(tensors)} tensors; expected one for each rank, in a list of one")
    return tensors[0]


def is_flat(tensor: Tensor) -> bool:
    """Whether a tensor on a GPU is what a call takes as it is: most are, and asking is quicker than making views."""
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cuda
        and tensor.layout is torch.strided
        and tensor.dim() == 1
        and tensor.is_contiguous()
        and tensor.data_ptr() != 0
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )


def held(tensor: Tensor) -> Tensor:
    """The tensor that has the memory, without gradients: the result itself for one that is under way.

    Raises:
        BufferTypeError: for sparse tensors, those of other devices, and such as only stand for others (DTensor).
    """
    if tensor.layout is not torch.strided:
        raise BufferTypeError(f"a tensor of layout {tensor.layout}: dense ones are reduced and moved; pass .to_dense()")
    if hasattr(tensor, "trigger_wait"):  # what a functional collective returns
        tensor = tensor.trigger_wait()
    tensor = tensor.detach()
    if not (tensor.is_cpu or tensor.is_cuda) or (not tensor.data_ptr() and tensor.numel()):
        raise BufferTypeError(
            f"a {type(tensor).__name__} on {tensor.device.type}: expected memory of its own, in host memory or on a "
            "GPU; pass the tensor that has it, as the to_local() of a DTensor"
        )
    return tensor


def flat(tensor: Tensor) -> Tensor:
    """The elements one after another, as they are shown: a view where that is how they lie, else a copy."""
    if is_flat(tensor):
        return tensor
    tensor = held(tensor)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.reshape(-1).contiguous()  # reshape keeps the steps of a column


def writable(tensor: Tensor) -> tuple[Tensor, After]:
    """Where a result may be written, and what brings it to its place: nothing, if it is written there."""
    if is_flat(tensor):
        return tensor, None
    tensor = held(tensor)
    whole = flat(tensor)
    if whole.data_ptr() == tensor.data_ptr() and tensor.is_contiguous():
        return whole, None
    if any(step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)):
        raise BufferTypeError(
            f"a result of shape {tuple(tensor.shape)} and strides {tensor.stride()}: expected memory for each element; "
            "pass .clone() of an expanded tensor"
        )
    return whole, lambda: put(tensor, whole.view(tensor.shape))


def typed(whole: Tensor) -> Any:
    """A flat tensor for a reduction."""
    if whole.is_cuda:
        return whole
    if whole.dtype not in TYPES:
        raise BufferTypeError(f"element type {whole.dtype} is not reduced; convert the tensor first")
    return _array(whole, TYPES[whole.dtype])


def raw(whole: Tensor) -> Any:
    """A flat tensor as bytes, for what only moves."""
    return whole.view(torch.uint8) if whole.is_cuda else _array(whole, BYTE)


def moved(whole: Tensor, dtype: Any = None) -> Any:
    """A flat tensor for what only moves, with its element type where we know it: ranks with unlike ones are told.

    Args:
        dtype: torch's element type, where the memory is bytes.
    """
    return whole.view(torch.uint8) if whole.is_cuda else _array(whole, TYPES.get(dtype or whole.dtype, BYTE))


def gathered_into(tensors: Sequence[Tensor], what: str) -> Sequence[Tensor]:
    """The results of a gathering, which gloo and NCCL write by ``copy_``: autograd forbids it for leaves.

    Raises:
        BufferTypeError: for a leaf that requires grad, where gradients are recorded.
    """
    for i, tensor in enumerate(tensors if torch.is_grad_enabled() else ()):
        if tensor.requires_grad and tensor.is_leaf:
            raise BufferTypeError(
                f"{what} into tensor {i}, a leaf that requires grad: no gradient would know of the values; call it "
                "within torch.no_grad(), or gather into tensors that require none"
            )
    return tensors


def listed(tensors: Any, n: int, what: str) -> Sequence[Tensor]:
    """A list that has a tensor for each rank."""
    found: Sequence[Tensor] = only(tensors, what)
    if len(found) != n:
        raise ArgumentError(f"{what}: {len(found)} tensors; expected {n}, one for each rank of the group")
    return found


def clear_of(send: Tensor, whole: Tensor) -> Tensor:
    """A flat operand, or a copy of it if it shares memory with the flat result."""
    return send.clone() if overlap(send, whole) else send


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two flat tensors share memory."""
    if not one.numel() or not other.numel():
        return False
    at, there = one.data_ptr(), other.data_ptr()
    return bool(at < there + nbytes(other) and there < at + nbytes(one))


def _array(whole: Tensor, dtype: np.dtype[Any]) -> Any:
    """A view of a tensor's memory that keeps it alive; ``tensor.numpy()`` would also forbid torch to resize it."""
    size = nbytes(whole)
    if not size:
        return np.empty(0, dtype)
    memory: Any = (ctypes.c_char * size).from_address(whole.data_ptr())
    memory.owner = whole
    return np.frombuffer(memory, dtype)


def nbytes(tensor: Tensor) -> int:
    """The bytes of its elements."""
    return int(tensor.numel() * tensor.element_size())


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of some tensors one after another, as a tensor: a view if they lie like that, else a copy."""
    views = [flat(tensor).view(torch.uint8) for tensor in tensors]
    return views[0] if len(views) == 1 else _together(views) if _in_a_row(views) else torch.cat(views)


def unpacking(tensors: Sequence[Tensor]) -> tuple[Tensor, After]:
    """Memory for the bytes of some tensors one after another, and what brings them from there to their places."""
    kept = [held(tensor) for tensor in tensors]
    if all(tensor.is_contiguous() for tensor in kept):
        views = [tensor.reshape(-1).view(torch.uint8) for tensor in kept]
        if _in_a_row(views):
            return _together(views), None
    sizes = [nbytes(tensor) for tensor in kept]
    whole = torch.empty(sum(sizes), dtype=torch.uint8, device=kept[0].device)

    def bring() -> None:
        for tensor, part in zip(kept, whole.split(sizes), strict=True):
            if part.numel():
                put(tensor, _as(part, tensor))

    return whole, bring


def put(tensor: Tensor, value: Tensor) -> None:
    """Write a result into a detached tensor, also one of inference mode, which the thread that waits may have left."""
    with torch.inference_mode():
        tensor.copy_(value)


def _as(part: Tensor, like: Tensor) -> Tensor:
    """Bytes as elements of another tensor's type and shape."""
    if part.storage_offset() % like.element_size():
        part = part.clone()
    return part.view(like.dtype).view(like.shape)


def _in_a_row(views: Sequence[Tensor]) -> bool:
    """Whether tensors of bytes lie one behind the other in one allocation."""
    at, storage = views[0].data_ptr(), views[0].untyped_storage().data_ptr()
    for view in views:
        if view.data_ptr() != at or view.untyped_storage().data_ptr() != storage:
            return False
        at += view.numel()
    return True


def _together(views: Sequence[Tensor]) -> Tensor:
    return views[0].as_strided((sum(view.numel() for view in views),), (1,))


def parts_of(tensor: Tensor, splits: Sequence[int], n: int) -> list[int]:
    """The bytes of each rank's part of a tensor."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if splits and (len(splits) != n or sum(splits) != rows):
        raise ArgumentError(f"splits {list(splits)}: expected {n} numbers of rows, {rows} in all")
    if not splits and rows % n:
        raise ArgumentError(f"{rows} rows are no equal parts for {n} ranks; pass splits")
    row = nbytes(tensor) // rows if rows else 0
    return [int(part) * row for part in splits] or [rows // n * row] * n
