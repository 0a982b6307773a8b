"""Algorithms that users write in a plan: which calls take them (``lang:NAME`` in the selection table). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from msgspec.structs import replace

from ..errors import ArgumentError, PlanError, SettingsError
from ..lang.algorithms import SCHEME, Algorithm
from ..program.call import Call, call_of_bytes, collective_named
from ..topology.model import Topology
from ..trees.tree import Collective
from ..util.text import quoted
from .memory_rows import SLOTS as MEMORY_SLOTS
from .plan import CHUNKS_PER_SPAN, MIN_CHUNK_BYTES, Plan, Rule
from .slots import LINK_SLOTS, Gpus, ctas_of, slots_of


class Named(NamedTuple):
    """An ``algo`` text without its entries for algorithms, and these by collective."""

    rest: str
    asked: dict[str, Algorithm]


def named_in(algo: str, algorithms: Sequence[Algorithm], n: int) -> Named:
    """Read ``allreduce:lang:ring;broadcast:^mpi``: algorithms by name, among those given or those of the library.

    Raises:
        SettingsError: for a name that there is not, is for another collective, or is not alone.
    """
    rest, asked = [], dict[str, Algorithm]()
    for entry in filter(None, (part.strip() for part in algo.split(";"))):
        name, _, schemes = entry.partition(":")
        if SCHEME not in schemes:
            rest.append(entry)
            continue
        scheme = schemes.strip()
        if "," in scheme or not scheme.startswith(SCHEME):
            raise SettingsError(f"BLINKMPI_ALGO entry {quoted(entry)}: an algorithm stands alone, as in "
                                f"allreduce:{SCHEME}ring")  # fmt: skip
        found = _of_name(scheme.removeprefix(SCHEME), algorithms, n)
        kind = collective_named(name)
        if found.collective != kind:
            raise SettingsError(f"BLINKMPI_ALGO entry {quoted(entry)}: {found.name} is for {found.collective}; name "
                                f"one for {kind}")  # fmt: skip
        asked[kind] = found
    return Named(";".join(rest), asked)


def for_part(algo: str, algorithms: Sequence[Algorithm], n: int) -> tuple[str, tuple[Algorithm, ...]]:
    """What of both is for a communicator of ``n`` ranks that is made of a larger one's: others plan as usual there."""
    fitting = tuple(one for one in algorithms if one.n == n)
    kept = []
    for entry in filter(None, algo.split(";")):
        try:
            named_in(entry, fitting, n)
        except SettingsError:
            if SCHEME in entry:
                continue
        kept.append(entry)
    return ";".join(kept), fitting


def check_algorithms(algorithms: Sequence[Algorithm], n: int) -> None:
    """Raise ArgumentError for what a communicator of ``n`` ranks cannot take."""
    names = set()
    for one in algorithms:
        if not isinstance(one, Algorithm):
            raise ArgumentError(f"algorithms: {one!r} is none; pass what a function with @lang.algorithm gives for "
                                "your number of ranks, such as ring(8)")  # fmt: skip
        if one.collective == "custom":
            raise ArgumentError(f"algorithms: {one.name} is for a collective of its own, which no method of MPI's "
                                "calls; leave it out, and call comm.Custom(algorithm, sendbuf, recvbuf)")  # fmt: skip
        if one.n != n:
            raise ArgumentError(f"algorithms: {one.name} is for {one.collective} of {one.n} ranks, the job has {n}; "
                                "make it for these")  # fmt: skip
        key = one.collective, one.root, one.name
        if key in names:
            raise ArgumentError(f"algorithms: two are called {one.name}; name= one of them otherwise")
        names.add(key)


def with_algorithms(
    plan: Plan,
    algorithms: Sequence[Algorithm],
    asked: Mapping[str, Algorithm],
    gpus: Gpus = "",
    *,
    why: str = "BLINKMPI_ALGO",
) -> Plan:
    """The plan with algorithms; calls of their sizes take them, and all calls of a collective those that are asked for.

    Only collectives that the plan has rows for get new ones: for any buffers, and for registered ones, where these have
    rows of their own.

    Args:
        gpus: as for :func:`.planner.make_plan`.
        why: what asked for those that are asked for.
    """
    everyone = tuple(dict.fromkeys((*plan.algorithms, *algorithms, *asked.values())))
    on_host = MEMORY_SLOTS if any(p.multicast for p in plan.packings) else LINK_SLOTS
    chunk, depth = slots_of(gpus, plan.n) if gpus else on_host
    ctas = ctas_of(gpus, plan.n)
    rules = list(plan.rules)
    for one in dict.fromkeys((*algorithms, *asked.values())):
        collective, root = cast(Collective, one.collective), one.root
        if one.collective in asked:
            if asked[one.collective] is not one:
                continue
            first, last, reason = 0, 0, why
        else:
            first, last, reason = one.min_bytes, one.max_bytes, "an algorithm of this communicator's"
        for (registered, widened), rows in plan.kinds(collective, root).items():
            own = Rule(collective, first, one.scheme, chunk, depth, reason, ctas=ctas, registered=registered, root=root,
                       widened=widened)  # fmt: skip
            known = [r for r in rules if r.kind == own.kind]
            before = sorted(known or (replace(row, root=root) for row in rows), key=lambda row: row.min_bytes)
            kept = [row for row in before if row.min_bytes < first]
            if last:
                after = [row for row in before if row.min_bytes <= last + 1][-1:]
                kept += [replace(row, min_bytes=last + 1) for row in after]
                kept += [row for row in before if row.min_bytes > last + 1]
            rules = [r for r in rules if r not in known]
            rules += sorted([*kept, own], key=lambda row: row.min_bytes)
    return replace(plan, rules=tuple(rules), algorithms=everyone)


def check_ways(plan: Plan, machine: Topology) -> Plan:
    """The plan, if each of its algorithms sends along ways that a machine of GPUs has.

    Raises:
        PlanError: naming the algorithm and two ranks.
    """
    from ..program.routes import cheapest_routes

    for one in plan.algorithms:
        call = call_of_bytes(cast(Collective, one.collective), one.n, 1 << 20, root=max(one.root, 0))
        try:
            cheapest_routes(one.program(call).channels, machine)
        except PlanError as error:
            raise PlanError(f"{one.name}: {error}") from error
    return plan


def chunk_of_algorithm(made: Algorithm, call: Call, rule: Rule, *, multicast: bool) -> int:
    """The slot size for a call: at most the rule's, and small enough that a span has several chunks."""
    if multicast:
        return rule.chunk_bytes  # ranks take turns on cores: longer steps win over finer pipelines
    want = call.nbytes // (max(1, *made.flow.goal.given) * CHUNKS_PER_SPAN)
    return min(rule.chunk_bytes, max(MIN_CHUNK_BYTES, 1 << max(0, want.bit_length())))


def _of_name(name: str, algorithms: Sequence[Algorithm], n: int) -> Algorithm:
    for one in algorithms:
        if one.name == name:
            return one
    from ..lang import library
    from ..lang.written import Written

    there = {key: value for key, value in vars(library).items() if isinstance(value, Written)}
    if name not in there:
        names = sorted({*there, *(one.name for one in algorithms)})
        raise SettingsError(f"BLINKMPI_ALGO: there is no algorithm {quoted(name)}; pass it as algorithms=[...], or "
                            f"name one of {', '.join(names)}")  # fmt: skip
    try:
        return there[name](n)
    except (ArgumentError, PlanError) as error:
        raise SettingsError(f"BLINKMPI_ALGO: {error}; pass it as algorithms=[...], or name another one") from error
