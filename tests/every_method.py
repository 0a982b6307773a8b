"""Every public method of mpi4py that takes buffers, found in mpi4py itself, and calls of each with GPU memory."""

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

KINDS: tuple[type, ...] = (MPI.Intracomm, MPI.Cartcomm, MPI.Graphcomm, MPI.Distgraphcomm, MPI.Intercomm, MPI.Message)
FAR = 1 << 60  # added to an address, it is nobody's: who follows it dies
COUNT = 4


def public(kind: type) -> Iterator[tuple[str, inspect.Signature]]:
    """Give the methods of a type that mpi4py documents, and their signatures."""
    for name in dir(kind):
        if not name.startswith("_") and callable(getattr(kind, name)):
            try:
                yield name, inspect.signature(getattr(kind, name))
            except (TypeError, ValueError):  # a static function of C without one: it takes no buffer
                continue


def buffers_of(signature: inspect.Signature) -> dict[str, str]:
    """Map the parameters that are buffers to their annotations."""
    return {p.name: str(p.annotation) for p in signature.parameters.values() if "Buf" in str(p.annotation)}


def taking_buffers(kind: type) -> dict[str, inspect.Signature]:
    """Map the names of the methods that take buffers to their signatures."""
    return {name: signature for name, signature in public(kind) if buffers_of(signature)}


def making_objects(kind: type) -> set[str]:
    """Name the methods of an object that give a communicator or a message."""
    made = {"Comm", "Intracomm", "Intercomm", "Cartcomm", "Graphcomm", "Distgraphcomm", "Message", "Message | None"}
    return {
        name
        for name, signature in public(kind)
        if str(signature.return_annotation).strip("'") in made and "self" in signature.parameters
    }


class Fake:
    """An array that claims to lie on a GPU; its memory is ``array``, as far away as ``distance``."""

    def __init__(self, array: np.ndarray[Any, Any], distance: int = FAR) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "version": 3, "strides": None, "stream": None,
            "data": (array.ctypes.data + distance, not array.flags.writeable),
        }  # fmt: skip


class ByDLPack:
    """An array of which DLPack alone is seen, and that says that it lies on a CUDA device."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        return self.array.__dlpack__(**({} if isinstance(self.array, np.ndarray) else {"stream": stream}))


def forms(buffer: Any, annotation: str, n: int) -> list[Any]:
    """Specifications of one buffer of ``n`` times COUNT floats, as the annotation allows."""
    counts, places = [COUNT] * n, [COUNT * i for i in range(n)]
    if "BufSpecW" in annotation:
        bytes_ = [4 * place for place in places]
        return [[buffer, (counts, bytes_), [MPI.FLOAT] * n], (buffer, counts, bytes_, [MPI.FLOAT] * n)]
    if "BufSpecV" in annotation:
        return [[buffer, counts, places, MPI.FLOAT], (buffer, (counts, places), MPI.FLOAT), [buffer, counts]]
    if "BufSpec" in annotation:
        return [buffer, [buffer, MPI.FLOAT], (buffer, COUNT, MPI.FLOAT)]
    return [buffer]


def calls(signature: inspect.Signature, n: int, on_gpu: Any, on_host: Any) -> Iterator[dict[str, Any]]:
    """Arguments of a method with GPU memory in one, or all, of its buffers, in all forms."""
    rest: dict[str, Any] = {"dest": MPI.PROC_NULL, "source": MPI.PROC_NULL, "partitions": 1, "sendobj": None}
    rest = {name: value for name, value in rest.items() if name in signature.parameters}
    buffers = buffers_of(signature)
    for chosen in (*([name] for name in buffers), list(buffers)):
        for form in range(3):
            arguments = dict(rest)
            for name, annotation in buffers.items():
                given = forms(on_gpu if name in chosen else on_host, annotation, n)
                arguments[name] = given[form % len(given)]
            yield arguments
