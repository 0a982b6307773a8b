"""nccl-tests' names of types, operations and collectives, and how it rounds a size to a call."""

from ..errors import BufferTypeError
from ..program.call import Call, call_of_bytes
from ..trees.tree import Collective
from ..util.text import quoted

# nccl-tests' name of each element type, in its order.
_SAME = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
TYPE_NAMES: dict[str, str] = {
    **{name: name for name in _SAME}, "half": "float16", "float": "float32", "double": "float64", "bfloat16": "bfloat16"
}  # fmt: skip
OP_NAMES = ("sum", "prod", "max", "min", "avg")
TEST_NAMES: dict[Collective, str] = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reduce_scatter": "reduce_scatter", "broadcast": "broadcast",
    "reduce": "reduce", "gather": "gather", "scatter": "scatter", "alltoall": "alltoall", "scan": "scan",
    "exscan": "exscan",
}  # fmt: skip


def call_of_size(collective: Collective, n: int, nbytes: int, dtype: str, op: str, root: int) -> Call:
    """The call of ``n`` ranks whose largest buffer has ``nbytes``, rounded down as nccl-tests does it."""
    aligned = 16 if collective in ("allgather", "reduce_scatter") else 1
    return call_of_bytes(collective, n, nbytes, dtype=dtype, op=op, root=root, aligned=aligned)


def type_name(dtype: str) -> str:
    """nccl-tests' name of an element type."""
    return next(name for name, ours in TYPE_NAMES.items() if ours == dtype)


def dtype_named(name: str) -> str:
    """Our name of an element type from nccl-tests' or ours.

    Raises:
        BufferTypeError: for the 8-bit floating types and unknown names.
    """
    if name in TYPE_NAMES or name in TYPE_NAMES.values():
        return TYPE_NAMES.get(name, name)
    why = ": 8-bit floating types have no reduction here" if name.startswith("f8") else " is unknown"
    raise BufferTypeError(f"datatype {quoted(name)}{why}; use one of {', '.join(TYPE_NAMES)}")
