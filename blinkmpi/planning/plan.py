"""A plan: every packing that a job may need, and the table that says when to use which.

A plan depends on no message size and holds no timings: the same machine gives the same bytes. Rank 0 makes it
(:func:`.planner.make_plan`), and all ranks check it against their topology. Pure data.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar, Literal, Self

import msgspec
from msgspec.structs import replace

from ..errors import PlanError
from ..lang.algorithms import SCHEME, Algorithm
from ..program.call import Call
from ..program.ir import Wire
from ..topology.model import MOST_DEVICES, MOST_MBPS, Topology
from ..trees.bounds.verify import verify
from ..trees.graph.automorphism import is_symmetry, packing_moved_by
from ..trees.tree import MAY_BE_CARRIED, Collective, Packing, carried, packed_as
from ..util.codec import MOST_VALUES, Document, Value
from ..util.text import brief, quoted

ProtocolName = Literal[
    "slots", "cma", "one_shot", "one_shot_cma",
    "ll16_one_shot", "ll16_two_shot", "ll128_one_shot", "ll128_two_shot", "direct", "rs_ag",
]  # fmt: skip
ONE_SHOTS = ("one_shot", "one_shot_cma")  # whole vectors, and the announcement with them
PACKETS = ("ll16_one_shot", "ll16_two_shot", "ll128_one_shot", "ll128_two_shot")  # data and flags in one
FORMAT_VERSION = 2
MOST_RATE = MOST_MBPS * MOST_DEVICES  # MB/s, of all links together
MIN_CHUNK_BYTES = 4096
VALUES_OF_CUBE = 16  # of a document for each three ranks, twice as many as one of shared memory has
CHUNKS_PER_SPAN = 8


class Rule(Value, frozen=True, omit_defaults=True):
    """From ``min_bytes`` of the call's vector on, use ``scheme``; ``mpi`` is MPI's own collective. No scheme, which
    only tables in files may have, leaves what is longer to the plan's own rows.

    ``chunk_bytes`` is the largest slot, ``depth`` the slots of a channel; short vectors have smaller chunks, but none
    below ``least_chunk_bytes`` (0: :data:`MIN_CHUNK_BYTES`). ``protocol`` is how a chunk travels: through
    ``slots``; between processes of a node by ``cma``, one copy out of the sender's buffer, or whole in the ``one_shot``
    in which each rank announces the call, or whole by cma (``one_shot_cma``); between GPUs one hop apart as packets of
    16 (``ll16``) or 128 bytes (``ll128``) in one or two shots, ``direct`` between registered buffers, or as a
    reduce-scatter and an allgather (``rs_ag``). ``ctas`` is the number of thread groups of a GPU (0: the protocol's
    default). Rows for ``registered`` buffers stand beside those for any, and rows for one ``root``, for which another
    scheme is the best, beside those for all (-1). Rows for calls whose partial results travel ``widened``, in a type of
    more bytes than their elements have, stand beside those for all types: another scheme may send fewer of them.
    """

    collective: Collective
    min_bytes: int
    scheme: str
    chunk_bytes: int = 0
    depth: int = 0
    reason: str = ""
    protocol: ProtocolName = "slots"
    ctas: int = 0
    registered: bool = False
    root: int = -1
    least_chunk_bytes: int = 0
    widened: bool = False

    @property
    def kind(self) -> tuple[Collective, int, bool, bool]:
        """The calls that it is for, of whatever size: of a collective, root, buffers and types."""
        return self.collective, self.root, self.registered, self.widened


class PassedOver(Value, frozen=True):
    """A method that has no packing here, and why."""

    collective: Collective
    root: int
    method: str
    why: str


class Turn(Value, frozen=True):
    """A symmetry of the machine that moves each vertex v to ``image[v]``: ``root`` is planned for as ``like`` is."""

    root: int
    like: int
    image: tuple[int, ...]


class _Ranks(msgspec.Struct):
    """The number of ranks in a plan's document; the rest is not looked at."""

    n: int = 0


class Plan(Document, frozen=True, dict=True, omit_defaults=True):
    """All packings of a job and the selection table; what was ``passed_over`` is for people.

    ``algorithms`` are those that users wrote; a row of the scheme ``lang:NAME`` takes one. A root that a symmetry makes
    of another one (``turns``) has that one's packings, turned, and that one's rows. ``wire`` is the type in which
    partial results travel along trees.
    """

    KIND: ClassVar = "plan"
    VERSION: ClassVar = FORMAT_VERSION
    machine: str
    fingerprint: str
    n: int
    packings: tuple[Packing, ...]
    rules: tuple[Rule, ...]
    passed_over: tuple[PassedOver, ...] = ()
    turns: tuple[Turn, ...] = ()
    algorithms: tuple[Algorithm, ...] = ()
    wire: Wire = "accumulator"

    @classmethod
    def most_values(cls, text: str | bytes) -> int:
        """As many as a plan of so many ranks has: trees of as many edges, for each pair of ranks."""
        try:
            ranks = msgspec.json.decode(text, type=_Ranks).n
        except (msgspec.ValidationError, msgspec.DecodeError, RecursionError):
            ranks = 0
        return max(MOST_VALUES, VALUES_OF_CUBE * ranks**3)

    def algorithm(self, collective: str, root: int, scheme: str) -> Algorithm | None:
        """The algorithm that a scheme is; None for a scheme of packings.

        Raises:
            PlanError: for one that the plan has not.
        """
        if not scheme.startswith(SCHEME):
            return None
        for one in self.algorithms:
            if (one.collective, one.scheme) == (collective, scheme) and one.root in (-1, root):
                return one
        have = sorted(one.scheme for one in self.algorithms if one.collective == collective)
        raise PlanError(
            f"the plan for {self.machine} has no {scheme!r} for {collective}, root {root}; it has "
            f"{', '.join(have) or 'none'}: choose one of these or pass algorithms=[...]"
        )

    def written(self, collective: str, root: int = -1) -> tuple[str, ...]:
        """The schemes that are algorithms for a collective."""
        some = (one for one in self.algorithms if one.collective == collective and one.root in (-1, root))
        return tuple(one.scheme for one in some)

    def packing(self, collective: str, root: int, scheme: str) -> Packing:
        """The packing for a collective (``root`` counts for rooted ones alone) and scheme.

        Raises:
            PlanError: if the plan has none, naming what it has.
        """
        if collective in MAY_BE_CARRIED and self.packed_as(collective) == "scatter":
            of_root = [self.schemes("scatter", r) for r in range(self.n)]
            names = [scheme if scheme in some or not some else some[0] for some in of_root]
            return carried(collective, [self.packing("scatter", r, name) for r, name in enumerate(names)])
        if (collective, root, scheme) in self._turned:
            return self._turned[collective, root, scheme]
        turn = self._turns.get(root)
        for p in self.packings:
            if p.collective == collective and p.scheme == scheme:
                if p.root in (-1, root):
                    return p
                if turn and p.root == turn.like:
                    self._turned[collective, root, scheme] = found = packing_moved_by(p, turn.image)
                    return found
        have = sorted({f"{p.scheme} (root {p.root})" if p.root >= 0 else p.scheme for p in self.packings
                       if p.collective == collective})  # fmt: skip
        raise PlanError(
            f"the plan for {self.machine} has no {scheme!r} packing for {collective}, root {root}; "
            f"it has {', '.join(have) or 'none'}: choose one of these or plan again"
        )

    def schemes(self, collective: str, root: int = -1) -> tuple[str, ...]:
        """Schemes that this plan can run for a collective, in the plan's order."""
        if collective in MAY_BE_CARRIED and self.packed_as(collective) == "scatter":
            rooted = [self.schemes("scatter", r) for r in range(self.n)]
            return tuple(s for s in rooted[0] if all(s in schemes for schemes in rooted)) or rooted[0][:1]
        able = (p.scheme for p in self.packings if p.collective == collective and p.root in (-1, self.planned_as(root)))
        return tuple(dict.fromkeys(able))

    def packed_as(self, collective: str) -> str:
        """The collective along whose trees another one goes here; mostly itself.

        An alltoall of many ranks goes along the scatters of all roots, as a scan always does.
        """
        if collective == "alltoall" and not any(p.collective == "alltoall" for p in self.packings):
            return "scatter"
        return packed_as(collective)

    def joined(self, part: Plan, collective: Collective, root: int) -> Plan:
        """With a plan for one more collective and root (-1: it has none), whose rows are that root's from then on."""
        have = {(p.collective, p.root, p.scheme) for p in self.packings}
        rules = [row for row in part.rules if row.collective not in {r.collective for r in self.rules}]
        if not any(row.collective == collective for row in rules) and root >= 0:
            rows = [replace(row, root=root) for kind in part.kinds(collective, root).values() for row in kind]
            known = [replace(row, root=root) for kind in self.kinds(collective, root).values() for row in kind]
            rules += rows if rows != known else []
        return replace(
            self,
            packings=(*self.packings, *(p for p in part.packings if (p.collective, p.root, p.scheme) not in have)),
            rules=(*self.rules, *rules),
            passed_over=tuple(dict.fromkeys((*self.passed_over, *part.passed_over))),
            turns=tuple(dict.fromkeys((*self.turns, *part.turns))),
            algorithms=tuple(dict.fromkeys((*self.algorithms, *part.algorithms))),
        )

    def passed_over_for(self, collective: Collective, root: int = -1) -> tuple[PassedOver, ...]:
        """The methods without a packing for a collective and root."""
        packed = self.packed_as(collective)
        roots = -1, self.planned_as(root)
        return tuple(one for one in self.passed_over if one.collective == packed and one.root in roots)

    def planned_as(self, root: int) -> int:
        """The root whose packings serve this one."""
        return self._turns[root].like if root in self._turns else root

    @cached_property
    def _turns(self) -> dict[int, Turn]:
        return {turn.root: turn for turn in self.turns}

    @cached_property
    def _turned(self) -> dict[tuple[str, int, str], Packing]:
        return {}

    def rule(
        self, collective: str, nbytes: int, *, root: int = -1, registered: bool = False, widened: bool = False
    ) -> Rule:
        """The row of the selection table for a vector of ``nbytes``; those for registered buffers come first there."""
        rows = self.rows(collective, root, widened=widened)
        return self.rule_of(rows, collective, nbytes, registered=registered)

    def rule_of(self, rows: dict[bool, list[Rule]], collective: str, nbytes: int, *, registered: bool = False) -> Rule:
        """The one for a vector of ``nbytes`` of the rows that :meth:`rows` gives."""
        for row in rows.get(registered) or rows.get(False, []):
            if row.min_bytes <= nbytes:
                return row
        raise PlanError(f"the plan for {self.machine} has no rule for {collective} of {nbytes} bytes; plan again")

    def rows(self, collective: str, root: int = -1, *, widened: bool = False) -> dict[bool, list[Rule]]:
        """The rows for a collective and root by ``registered``, the largest ``min_bytes`` first."""
        kinds = self.kinds(collective, root)
        return {registered: kinds.get((registered, widened)) or rows
                for (registered, own), rows in kinds.items() if not own}  # fmt: skip

    def kinds(self, collective: str, root: int = -1) -> dict[tuple[bool, bool], list[Rule]]:
        """The rows for a collective and root by ``registered`` and ``widened``, the largest ``min_bytes`` first.

        If there are rows for this root, they are all that it has.
        """
        own = self._rows.get((collective, root)) or self._rows.get((collective, self.planned_as(root)))
        return own or self._rows.get((collective, -1), {})

    @cached_property
    def _rows(self) -> dict[tuple[str, int], dict[tuple[bool, bool], list[Rule]]]:
        rows: dict[tuple[str, int], dict[tuple[bool, bool], list[Rule]]] = {}
        for rule in sorted(self.rules, key=lambda r: -r.min_bytes):
            kinds = rows.setdefault((rule.collective, rule.root), {})
            kinds.setdefault((rule.registered, rule.widened), []).append(rule)
        return rows

    def _consistent(self) -> Self:
        """Return self if ranks, trees and rates are possible on some machine; :meth:`check` proves them for one."""
        if not 1 <= self.n <= MOST_DEVICES:
            raise PlanError(f"{self.n} ranks; expected 1..{MOST_DEVICES}, plan again")
        for i, p in enumerate(self.packings):
            where = f"packings[{i}], {p.collective}"
            if p.n != self.n or not -1 <= p.root < self.n:
                raise PlanError(f"{where}: {p.n} ranks, root {p.root}, in a plan of {self.n} ranks; plan again")
            if not 0 < p.rate <= p.bound <= MOST_RATE or p.certificate.divisor <= 0:
                said = f"rate {brief(str(p.rate), 40)} of {brief(str(p.bound), 40)} MB/s"
                raise PlanError(f"{where}: {said}; expected more than 0 and at most its bound, plan again")
            for j, tree in enumerate(p.trees):
                if not 0 < tree.weight <= p.rate or not 0 <= tree.root < self.n:
                    said = f"root {tree.root}, weight {brief(str(tree.weight), 40)}"
                    raise PlanError(f"{where}: trees[{j}]: {said}; expected a rank, and more than 0, plan again")
                down, up = ([(e.src, e.dst, e) for e in tree.edges], [(e.dst, e.src, e) for e in reversed(tree.up)])
                for way, hops in (("", down), (".up", up)):
                    reached = {tree.root}
                    for parent, child, e in hops:
                        if parent not in reached or child in reached or not 0 <= child < self.n or len(e.path) < 2:
                            said = f"trees[{j}]{way}: {e.src}->{e.dst} by {quoted(e.path)}"
                            raise PlanError(f"{where}: {said} is no edge to a rank that the tree does not have yet, "
                                            "parents first; plan again")  # fmt: skip
                        reached.add(child)
        for i, turn in enumerate(self.turns):
            planned = turn.like not in self._turns and 0 <= turn.like < self.n <= len(turn.image)
            if not planned or turn.image[turn.like] != turn.root or sorted(turn.image) != list(range(len(turn.image))):
                raise PlanError(f"turns[{i}]: rank {turn.like} does not become rank {turn.root}; plan again")
        for i, one in enumerate(self.algorithms):
            if one.check().n != self.n:
                raise PlanError(f"algorithms[{i}], {one.name}: {one.n} ranks, in a plan of {self.n} ranks; plan again")
        for i, r in enumerate(self.rules):
            if min(r.min_bytes, r.chunk_bytes, r.depth, r.ctas, r.least_chunk_bytes) < 0:
                raise PlanError(f"rules[{i}], {r.collective}: a number below 0; plan again")
            if not -1 <= r.root < self.n:
                raise PlanError(f"rules[{i}], {r.collective}: root {r.root} in a plan of {self.n} ranks; plan again")
        return self

    def check(self, topology: Topology) -> Plan:
        """Prove every packing against ``topology`` and return self.

        Raises:
            PlanError: if the plan is for another machine or one of its packings is wrong.
        """
        if (self.fingerprint, self.n) != (topology.fingerprint, topology.n):
            raise PlanError(
                f"plan for {brief(self.machine)} ({self.n} ranks, fingerprint {brief(self.fingerprint, 40)}) "
                f"does not fit {topology.name} ({topology.n} ranks, fingerprint {topology.fingerprint}); "
                "plan again for this machine"
            )
        for turn in self.turns:
            if not is_symmetry(topology, turn.image):
                raise PlanError(f"turns: what moves rank {turn.like} to {turn.root} is no symmetry; plan again")
        for p in self.packings:
            verify(p, topology)
        for r in self.rules:
            packed = self.packed_as(r.collective)
            roots = (-1, self.planned_as(r.root)) if r.root >= 0 else None  # None: any
            there = (p for p in self.packings if p.collective == packed and (roots is None or p.root in roots))
            named = self.algorithm(r.collective, r.root, r.scheme)
            if named is not None and r.protocol != "slots":
                raise PlanError(f"rule for {r.collective} from {r.min_bytes} bytes: {r.scheme} by {r.protocol}; "
                                "algorithms go by slots")  # fmt: skip
            if named is None and r.scheme != "mpi" and r.scheme not in {p.scheme for p in there}:
                raise PlanError(
                    f"rule for {r.collective} from {r.min_bytes} bytes names scheme {r.scheme!r}, "
                    "which has no packing; plan again"
                )
            if r.scheme != "mpi" and (r.chunk_bytes < 1 or r.depth < 1):
                raise PlanError(f"rule for {r.collective} from {r.min_bytes} bytes: chunk {r.chunk_bytes} and depth "
                                f"{r.depth} must be at least 1")  # fmt: skip
        return self


def chunk_for(packing: Packing, call: Call, rule: Rule) -> int:
    """The slot size for a call: at most the rule's, and small enough that a span has several chunks."""
    if packing.multicast:
        return rule.chunk_bytes  # ranks take turns on cores: longer steps win over finer pipelines
    spans = max(1, len(packing.trees) // (call.n if call.collective == "alltoall" else 1))
    want = call.nbytes // (spans * CHUNKS_PER_SPAN)
    return min(rule.chunk_bytes, max(rule.least_chunk_bytes or MIN_CHUNK_BYTES, 1 << max(0, want.bit_length())))
