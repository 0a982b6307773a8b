"""A collective call as all ranks must agree on it: which collective, how many elements of what type, by which root."""

from ..errors import SettingsError
from ..trees.tree import CARRIED, COLLECTIVES, ROOTED, Collective
from ..util.codec import Value
from ..util.text import quoted
from .reduction import NARROW, dtype_of

REDUCTIONS: frozenset[str] = frozenset({"reduce", "allreduce", "reduce_scatter", "scan", "exscan"})
BLOCKED: frozenset[str] = frozenset({"allgather", "gather", "scatter", "reduce_scatter", "alltoall"})


class Call(Value, frozen=True):
    """What was called, as all ranks must agree on it.

    ``counts`` holds one number, the elements of the vector (broadcast, reduce, allreduce, scan, exscan) or of each
    block (allgather, gather, scatter, alltoall). Where blocks differ it holds every rank's, as it always does for
    reduce_scatter; in an alltoall, the blocks of rank 0 for each rank, then those of rank 1, and so on.

    A ``custom`` collective is what the algorithm ``name`` says. Its counts are the elements of a chunk, then the chunks
    that each rank gives, then those that each rank gets.

    ``in_place`` is said of an alltoall alone, whose stages wait for one another then (in_place.py).
    """

    collective: Collective
    n: int
    counts: tuple[int, ...]
    dtype: str
    op: str = ""
    root: int = -1
    name: str = ""
    in_place: bool = False

    @property
    def reduces(self) -> bool:
        """Whether elements of several ranks are folded."""
        return self.collective in REDUCTIONS or bool(self.op)

    @property
    def widened(self) -> bool:
        """Whether partial results have more bytes than elements: those of 8- and 16-bit floats are in float32."""
        return self.dtype in NARROW and self.reduces

    @property
    def text(self) -> str:
        """The call as people read it."""
        count = self.counts[0] if len(self.counts) == 1 or self.even else list(self.counts)
        what = f"{count} x {self.dtype}" if self.dtype else ""
        if self.name:
            what = f"{self.name}, chunks of {self.counts[0]} x {self.dtype}"
        op, root = f", op {self.op}" if self.op else "", f", root {self.root}" if self.root >= 0 else ""
        return f"{self.collective}({what}{op}{root}{', in place' if self.in_place else ''})"

    def block(self, rank: int) -> tuple[int, int]:
        """(start, length) of ``rank``'s block in the vector of all blocks; the whole vector if not blocked."""
        if self.collective not in BLOCKED:
            return 0, self.counts[0]
        if self.even:
            return rank * self.counts[0], self.counts[0]
        return sum(self.counts[:rank]), self.counts[rank]

    def piece(self, source: int, target: int) -> tuple[int, int, int]:
        """Of an alltoall's block: where it lies in the send buffer, where in the receive buffer, and its length."""
        if self.even:
            return target * self.counts[0], source * self.counts[0], self.counts[0]
        row = self.counts[source * self.n : (source + 1) * self.n]
        return sum(row[:target]), sum(self.counts[target :: self.n][:source]), row[target]

    @property
    def even(self) -> bool:
        """Whether all blocks have the same length."""
        return len(set(self.counts)) == 1

    @property
    def total(self) -> int:
        """Elements of the call's largest buffer: what algorithm bandwidth is counted in."""
        if self.collective == "barrier":
            return 0
        if self.collective == "custom":
            return self.counts[0] * max(self.counts[1:])
        if self.collective not in BLOCKED:
            return self.counts[0]
        if self.collective == "alltoall":
            return max(max(self.send_length(r), self.recv_count(r)) for r in ((0,) if self.even else range(self.n)))
        return sum(self.counts) if len(self.counts) > 1 else self.counts[0] * self.n

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtype_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the call's largest buffer: what the selection table is indexed by, nccl-tests' ``size``."""
        total = self.total
        return total * dtype_of(self.dtype).itemsize if total else 0

    @property
    def bus_factor(self) -> float:
        """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it."""
        if self.collective == "allreduce":
            return 2 * (self.n - 1) / self.n
        return (self.n - 1) / self.n if self.collective in BLOCKED else 1.0

    @property
    def send_count(self) -> int:
        """Elements that a rank that sends everything it can has in its send buffer."""
        return max(self.counts) if self.collective in ("allgather", "gather") else self.total

    def send_length(self, rank: int) -> int:
        """Elements of the send buffer of ``rank``, if it has one."""
        if self.collective == "custom":
            return self.counts[0] * self.counts[1 + rank]
        if self.collective == "alltoall":
            return self.n * self.counts[0] if self.even else sum(self.counts[rank * self.n : (rank + 1) * self.n])
        return self.block(rank)[1] if self.collective in ("allgather", "gather") else self.total

    def recv_count(self, rank: int) -> int:
        """Elements of the receive buffer of ``rank``, if it has one."""
        if self.collective == "custom":
            return self.counts[0] * self.counts[1 + self.n + rank]
        if self.collective == "alltoall":
            return self.n * self.counts[0] if self.even else sum(self.counts[rank :: self.n])
        if self.collective in ("scatter", "reduce_scatter"):
            return self.block(rank)[1]
        return self.total

    def sends(self, rank: int) -> bool:
        """Whether ``rank`` has a send buffer."""
        if self.collective == "custom":
            return self.send_length(rank) > 0
        return self.collective != "barrier" and (self.collective not in ("broadcast", "scatter") or rank == self.root)

    def receives(self, rank: int) -> bool:
        """Whether ``rank`` has a receive buffer of its own (a broadcast's root has not, nor an exscan's rank 0)."""
        if self.collective == "custom":
            return self.recv_count(rank) > 0
        if self.collective == "exscan":
            return rank > 0
        if self.collective in ("reduce", "gather"):
            return rank == self.root
        return self.collective != "barrier" and (self.collective != "broadcast" or rank != self.root)


def call_of_bytes(
    collective: Collective, n: int, nbytes: int, *, dtype: str = "float32", op: str = "sum", root: int = 0,
    aligned: int = 1,
) -> Call:  # fmt: skip
    """The call of ``n`` ranks whose largest buffer has ``nbytes``, in blocks that ``aligned`` bytes divide."""
    itemsize = dtype_of(dtype).itemsize
    count = nbytes // itemsize // (n if collective in BLOCKED else 1)
    count -= count % max(1, aligned // itemsize)
    counts = (count,) * (n if collective == "reduce_scatter" else 1)
    return Call(
        collective, n, counts, dtype, op if collective in REDUCTIONS else "", root if collective in ROOTED else -1
    )


def collective_named(name: str) -> Collective:
    """Our name of a collective, from MPI's or nccl-tests': ``all_reduce``, ``Allreduce``, ``bcast``.

    Raises:
        SettingsError: for an unknown name.
    """
    plain = name.strip().lower().removesuffix("_perf").replace("_", "").replace("-", "").replace("block", "")
    plain = "broadcast" if plain == "bcast" else plain
    for collective in (*COLLECTIVES, *CARRIED):
        if collective.replace("_", "") == plain:
            return collective
    raise SettingsError(f"collective {quoted(name)} is unknown; use one of {', '.join((*COLLECTIVES, *CARRIED))}")
