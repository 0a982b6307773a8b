"""Collectives in torch's profiler: ``blink:all_reduce``, as other backends name theirs, for the host's part of a call.

The kernels have rows of their own there, as all have.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from .torch_extension import extension

Class = TypeVar("Class", bound=type)
Method = TypeVar("Method", bound=Callable[..., Any])
profiling: Callable[[], bool] = torch.autograd._profiler_enabled
NAMES = {  # by method of a process group
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "reduce": "reduce", "broadcast": "broadcast",
    "reduce_scatter": "reduce_scatter", "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor", "allgather": "all_gather",
    "allgather_coalesced": "all_gather", "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor", "gather": "gather", "scatter": "scatter",
    "alltoall": "all_to_all", "all_to_all_single": "all_to_all_single", "barrier": "barrier",
}  # fmt: skip


def shown(cls: Class) -> Class:
    """A class whose collectives torch's profiler shows, under all names that they have there."""
    wrapped = {vars(cls)[method]: profiled(name)(vars(cls)[method]) for method, name in NAMES.items()}
    for method, function in list(vars(cls).items()):
        if callable(function) and function in wrapped:
            setattr(cls, method, wrapped[function])
    return cls


def profiled(name: str) -> Callable[[Method], Method]:
    """Show what a function does under this name."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def wrapped(*args: Any, **keywords: Any) -> Any:
            if not profiling():
                return method(*args, **keywords)
            with _span(f"blink:{name}"):
                return method(*args, **keywords)

        return cast(Method, wrapped)

    return decorate


def _span(name: str) -> AbstractContextManager[Any]:
    """What the profiler shows; where there is C++, as an asynchronous call, which torch expects of a collective."""
    quick = extension()
    span: AbstractContextManager[Any] = quick.Span(name) if quick else torch.profiler.record_function(name)
    return span
