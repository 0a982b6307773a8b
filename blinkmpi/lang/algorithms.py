"""``Algorithm``: a proved program over chunks, as a value with a file of its own, and what can be asked of it.

A plan has algorithms, so every rank of a job loads this module. What a question needs is imported where it is asked.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from ..errors import ArgumentError, FormatError, PlanError
from ..program.call import BLOCKED, Call, call_of_bytes, collective_named
from ..program.ir import Program
from ..program.reduction import Array, dtype_of
from ..topology.model import Topology
from ..util.codec import MOST_VALUES, Document
from ..util.files import read_file
from ..util.text import brief, plural, quoted, size_text
from .flow import Contribution, Flow, Goal, Node, check_size, custom_call, goal_of

if TYPE_CHECKING:
    from ..program.cost_model import Price
    from .lower import Lowering

FORMAT_VERSION = 1
SCHEME = "lang:"  # in front of an algorithm's name, where it stands beside the schemes of a plan


class Algorithm(Document, frozen=True, dict=True, omit_defaults=True):
    """How a collective of so many ranks is done, proved: every result is what the collective says.

    Its chunks, values and outputs are those of its flow (:class:`.flow.Flow`); ``given`` and ``wanted`` are those of a
    custom collective's goal, and follow from the others for all else. ``inplace`` says for which kind of calls it was
    written; it does the same in both. It is meant for calls whose vector has at least ``min_bytes`` and at most
    ``max_bytes`` (0: any number).
    """

    KIND: ClassVar = "algorithm"
    VERSION: ClassVar = FORMAT_VERSION
    name: str
    collective: str
    n: int
    chunks: int
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[int | None, ...], ...]
    root: int = -1
    given: tuple[int, ...] = ()
    wanted: tuple[tuple[tuple[Contribution, ...], ...], ...] = ()
    inplace: bool = False
    min_bytes: int = 0
    max_bytes: int = 0

    @classmethod
    def most_values(cls, text: str | bytes) -> int:
        """As many as the library's longest for 256 ranks."""
        return 2 * MOST_VALUES

    @classmethod
    def of(cls, name: str, flow: Flow, *, inplace: bool = False, min_bytes: int = 0, max_bytes: int = 0) -> Self:
        """The algorithm of a flow, proved.

        Raises:
            PlanError: if the flow is wrong.
        """
        goal = flow.goal
        own = (goal.given, goal.wanted) if goal.collective == "custom" else ((), ())
        made = cls(
            name, goal.collective, goal.n, goal.chunks, flow.nodes, flow.outputs, goal.root, *own, inplace, min_bytes,
            max_bytes,
        )  # fmt: skip
        return made.check()

    @cached_property
    def flow(self) -> Flow:
        """What it computes."""
        if self.collective == "custom":
            goal = Goal("custom", self.n, self.chunks, self.root, self.given, self.wanted)
        else:
            goal = goal_of(self.collective, self.n, self.chunks, self.root)
        return Flow(goal, self.nodes, self.outputs)

    @cached_property
    def identity(self) -> str:
        """Its name, and a few characters that differ if two algorithms do."""
        return f"{self.name}#{hashlib.blake2b(self.to_json().encode(), digest_size=6).hexdigest()}"

    @property
    def scheme(self) -> str:
        """What a plan calls it."""
        return SCHEME + self.name

    def check(self) -> Self:
        """Prove it and return self; PlanError if it is wrong."""
        if not self.name or min(self.min_bytes, self.max_bytes) < 0:
            raise PlanError(f"name {quoted(self.name)}, {self.min_bytes} to {self.max_bytes} bytes: expected a name, "
                            "and numbers from 0 on")  # fmt: skip
        where = brief(self.name)
        if (self.collective == "custom") != bool(self.given or self.wanted):
            raise PlanError(f"{where}: a custom collective says what is given and wanted, and no other; got "
                            f"{quoted(self.collective)}")  # fmt: skip
        try:
            check_size(self.n, self.chunks)
            self._check_outputs()
            self.flow.prove()
        except PlanError as error:
            raise PlanError(f"{where}: {error}") from error
        return self

    _consistent = check

    def _check_outputs(self) -> None:
        """Raise PlanError, before anything is made of so many chunks, if those of the outputs cannot be all."""
        if self.collective == "custom":
            return
        each = self.chunks * (self.n if self.collective in ("allgather", "gather", "alltoall") else 1)
        there = [len(outputs) for outputs in self.outputs]
        if there != [each] * self.n:
            raise PlanError(f"outputs of {there} chunks; expected {each} on each of {self.n} ranks")
        taken = sum(o is not None and o < 0 for outputs in self.outputs for o in outputs)
        taken += sum(o < 0 for node in self.nodes for o in node.operands)
        if self.collective == "reduce_scatter" and taken < self.n * each * self.n:
            raise PlanError(f"{taken} chunks of inputs are used; expected {self.n * each * self.n}, all of them")

    @cached_property
    def _lowering(self) -> Lowering:
        from .lower import Lowering

        return Lowering(self.flow)

    def program(self, call: Call, *, chunk_bytes: int = 128 << 10, depth: int = 4, multicast: bool = False) -> Program:
        """The proved program of a call.

        Args:
            chunk_bytes, depth: of slots.
            multicast: whether all readers of a value read one slot, as ranks can that share a memory.

        Raises:
            PlanError: for a call of another collective, root or number of ranks.
        """
        return self._lowering.program(
            call, scheme=self.scheme, chunk_bytes=chunk_bytes, depth=depth, multicast=multicast
        )

    def simulate(
        self, topology: Topology, nbytes: int, *, dtype: str = "float32", chunk_bytes: int = 128 << 10, depth: int = 4
    ) -> Price:
        """Predict the time of a call whose largest buffer has ``nbytes``; chunks go by the cheapest routes.

        Raises:
            PlanError: if the machine has other ranks, or no way between two that send to each other.
        """
        call = self.call_of_bytes(nbytes, dtype=dtype)
        return self.price(call, topology, chunk_bytes=chunk_bytes, depth=depth)

    def call_of_bytes(self, nbytes: int, *, dtype: str = "float32", op: str = "sum") -> Call:
        """The call whose largest buffer has ``nbytes``, or a little less where chunks do not divide them."""
        goal = self.flow.goal
        if goal.collective != "custom":
            kind = collective_named(goal.collective)
            return call_of_bytes(kind, goal.n, nbytes, dtype=dtype, op=op, root=max(goal.root, 0))
        most = max(1, *goal.given, *map(len, goal.wanted))
        return custom_call(goal, self.identity, nbytes // dtype_of(dtype).itemsize // most, dtype, op)

    def price(self, call: Call, topology: Topology, *, chunk_bytes: int, depth: int) -> Price:
        """Predict the time of a call; see :meth:`simulate`."""
        from ..program.cost_model import price
        from ..program.routes import cheapest_routes

        if topology.n != self.n:
            raise PlanError(f"{self.name} is for {self.n} ranks, {topology.name} has {topology.n}; make it for these")
        multicast = shares_memory(topology)
        program = self.program(call, chunk_bytes=chunk_bytes, depth=depth, multicast=multicast)
        return price(program, cheapest_routes(program.channels, topology, multicast=multicast), topology)

    def summary(self) -> str:
        """Its messages in a few words."""
        sent, _, longest = self._traffic()
        return f"an algorithm of {sent.total()} messages of a chunk, {longest} after one another"

    def explain(self) -> str:
        """What it is and does, for a terminal: messages, bytes and steps."""
        goal = self.flow.goal
        way = "from" if goal.collective in ("broadcast", "scatter") else "to"
        where = f" {way} rank {goal.root}" if goal.root >= 0 else ""
        lines = [f"{self.name}: {goal.collective}{where} of {plural(goal.n, 'rank')}, {self._pieces()}, proved"]
        if self.min_bytes or self.max_bytes:
            most = f"at most {size_text(self.max_bytes)}" if self.max_bytes else "any length above"
            lines.append(f"  for        vectors of at least {size_text(self.min_bytes)}, {most}")
        sent, folds, longest = self._traffic()
        each = Fraction(1, goal.chunks * (goal.n if goal.collective in BLOCKED else 1))
        most_sent = max(sent.values(), default=0)
        lines.append(f"  messages   {sent.total()} of a chunk, {most_sent} from the rank that sends the most")
        if goal.collective != "custom":
            lines.append(f"  bytes      that rank sends {most_sent * each} of the vector")
        lines.append(f"  steps      {plural(longest, 'message')}{' follow one another' if longest > 1 else ''}")
        if folds:
            lines.append(f"  folds      {folds} of two operands")
        live = {*self.flow.live}
        unused = [node.where for i, node in enumerate(self.flow.nodes) if i not in live and max(node.operands) >= 0]
        if unused:
            where = f", the first of {unused[0]}" if unused[0] else ""
            lines.append(f"  unused     {plural(len(unused), 'value')} that no result needs{where}; none is sent")
        return "\n".join(lines)

    def _pieces(self) -> str:
        goal = self.flow.goal
        if goal.collective == "custom":
            given, wanted = goal.given, [sum(map(bool, outputs)) for outputs in goal.wanted]
            return f"{_between(given)} given and {_between(wanted)} wanted by each"
        return plural(goal.chunks, "chunk") + (" a block" if goal.collective in BLOCKED else "")

    def _traffic(self) -> tuple[Counter[int], int, int]:
        """Messages by the rank that sends, folds of two, and the longest chain of messages, of values that are used."""
        flow = self.flow
        sent: Counter[int] = Counter()
        steps: dict[int, int] = {}
        for i in flow.live:
            node = flow.nodes[i]
            far = [o for o in node.operands if o >= 0 and flow.nodes[o].rank != node.rank]
            sent.update(flow.nodes[o].rank for o in far)
            steps[i] = max((steps[o] + (o in far) for o in node.operands if o >= 0), default=0)
        for rank, outputs in enumerate(flow.outputs):  # results may lie elsewhere
            sent.update(flow.nodes[o].rank for o in outputs if o is not None and o >= 0 and flow.nodes[o].rank != rank)
        return sent, sum(len(flow.nodes[i].operands) - 1 for i in flow.live), max(steps.values(), default=0)

    def interpret(self, sends: Sequence[Array | None], op: str = "sum") -> list[list[Array | None]]:
        """Run it on NumPy arrays, one for each rank, in as many equal parts as its input has chunks.

        Returns:
            For each rank the chunks of its output, None where nothing is written.
        """
        from .interpreter import interpret

        return interpret(self.flow, sends, op)

    def plot(self, path: str, *, chunk: int | None = None) -> None:
        """Draw its messages, ranks one above another and steps to the right, a colour for each chunk.

        Args:
            path: of the picture: .svg, .png or .pdf.
            chunk: of the input, to draw its way alone.

        Raises:
            ArgumentError: for a file that cannot be written, no such chunk, too many messages, or without matplotlib
                (``pip install 'blinkmpi[plot]'``).
        """
        from .picture import draw_flow

        draw_flow(self.name, self.flow, path, chunk=chunk)

    def to_xml(self, *, protocol: str = "Simple", channels: int = 1, instances: int = 1) -> str:
        """MSCCL's XML of it, for calls in place or not, as it was written; proved once more as a file.

        Args:
            protocol: Simple, LL or LL128.
            channels: among which parts that have nothing to do with each other are dealt out.
            instances: pieces into which each chunk is cut; each goes its way on channels of its own.

        Raises:
            PlanError: if MSCCL has no such collective or protocol.
        """
        from .xml.check import flow_of
        from .xml.export import export
        from .xml.file import write_xml

        made = export(
            self.flow, name=self.name, protocol=protocol, in_place=self.inplace, channels=channels,
            instances=instances, min_bytes=self.min_bytes, max_bytes=self.max_bytes,
        )  # fmt: skip
        flow_of(made, source=self.name)
        return write_xml(made)

    def save(self, path: str | Path) -> None:
        """Write its file, which :func:`load` reads.

        Raises:
            ArgumentError: if it cannot be written.
        """
        try:
            Path(path).write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"cannot write {quoted(str(path))}: {error.strerror}; correct the path") from error


def _between(counts: Sequence[int]) -> str:
    """How many chunks ranks have: ``2 chunks``, ``0-2 chunks``."""
    least, most = min(counts), max(counts)
    return plural(most, "chunk") if least == most else f"{least}-{plural(most, 'chunk')}"


def shares_memory(topology: Topology) -> bool:
    """Whether all ranks share one memory, in which a slot may have several readers."""
    return len(topology.nodes) == 1 and topology.memory_of(topology.nodes[0]) is not None


def read_algorithm(path: str | Path) -> Algorithm:
    """Read what :meth:`Algorithm.save` wrote, and prove it.

    Raises:
        FormatError: if it cannot be read, or is no such file. PlanError: for one that is wrong.
    """
    try:
        text = read_file(path)
    except OSError as error:
        raise FormatError(f"cannot read {quoted(str(path))}: {error.strerror}; correct the path") from error
    return Algorithm.from_json(text, source=brief(str(path)))


def read_xml(path: str | Path) -> Algorithm:
    """Read MSCCL's XML, and prove it.

    Raises:
        FormatError: if it cannot be read, or is no such file. PlanError: for one that is wrong.
    """
    from .xml.check import flow_of
    from .xml.file import load_xml

    found = load_xml(path)
    return Algorithm.of(
        found.name, flow_of(found, source=brief(str(path))), inplace=not found.out_of_place, min_bytes=found.min_bytes,
        max_bytes=found.max_bytes,
    )  # fmt: skip
