"""Decide which scheme, protocol and chunk a call takes (``choose``), and make its program (``program_for``)."""

from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from ..errors import SettingsError
from ..lang.algorithms import SCHEME, Algorithm
from ..program.call import Call, call_of_bytes, collective_named
from ..program.check import check
from ..program.ir import Program, Wire
from ..program.lower import lower
from ..program.one_shot import one_shot
from ..trees.tree import Packing
from ..util.text import quoted
from .algorithms import chunk_of_algorithm
from .memory_rows import in_place_row
from .plan import ONE_SHOTS, PACKETS, Plan, Rule, chunk_for


def parse_algo(text: str) -> dict[str, tuple[str, ...]]:
    """Read ``allreduce:trees,onehop;broadcast:^mpi`` into allowed (or, with ``^``, excluded) schemes by collective.

    Raises:
        SettingsError: for a malformed entry or an unknown collective.
    """
    found: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, colon, schemes = entry.partition(":")
        collective = collective_named(name)
        if not colon or not schemes:
            expected = "COLLECTIVE:SCHEME[,SCHEME], as in allreduce:chain"
            raise SettingsError(f"BLINKMPI_ALGO entry {quoted(entry)}: expected {expected}")
        found[collective] = tuple(s.strip() for s in schemes.split(","))
    return found


def choose(
    plan: Plan, call: Call, *, registered: bool = False, mpi: bool = True,
    fits: Callable[[Call, str], bool] = lambda _call, _protocol: True,
) -> Rule:  # fmt: skip
    """The row of the table that carries ``call``: its scheme, protocol and chunks.

    Args:
        registered: whether the buffers are GPU memory that all ranks have mapped.
        mpi: whether MPI's own collective may carry it.
        fits: whether a protocol of packets can carry a call; one that cannot is passed over.
    """
    widened = call.widened and plan.wire == "accumulator"
    by_kind = plan.rows(call.collective, call.root, widened=widened)
    rule = plan.rule_of(by_kind, call.collective, call.nbytes, registered=registered)
    if rule.scheme == "mpi" and not mpi:
        rows = sorted((r for kind in by_kind.values() for r in kind if r.scheme != "mpi"), key=lambda r: r.min_bytes)
        longer = [r for r in rows if r.min_bytes > rule.min_bytes]
        if rows:  # a row for shorter vectors may be one that longer ones do not fit
            rule = longer[0] if longer else replace(rows[-1], protocol="slots")
    if call.in_place:
        rule = in_place_row(rule, call, [row for rows in by_kind.values() for row in rows])
    uneven = rule.protocol == "direct" and not call.even and call.collective != "reduce_scatter"
    if uneven or (rule.protocol in PACKETS and not fits(call, rule.protocol)):
        passed = (*PACKETS, "direct") if uneven else PACKETS
        left = {kind: [r for r in rows if r.protocol not in passed] for kind, rows in by_kind.items()}
        rows = left.get(registered) or left.get(False, [])
        rows = [r for r in rows if not r.scheme.startswith(SCHEME)]  # which take calls of their sizes alone
        forced = replace(rule, protocol="slots")  # by an algo= that leaves no other
        rule = min(rows or [forced], key=lambda r: r.min_bytes)
    return rule


def kernel_call(call: Call, rule: Rule) -> Call:
    """The call whose program shows what the kernels of a call by ``rule`` send: by ``rs_ag`` its reduce-scatter."""
    if rule.protocol != "rs_ag":
        return call
    return call_of_bytes("reduce_scatter", call.n, call.nbytes, dtype=call.dtype, op=call.op)


def program_for(
    plan: Plan, call: Call, rule: Rule, *, budget_bytes: int = 0, nodes: Sequence[int] = (), multicast: bool = False
) -> Program:
    """Lower ``call`` by ``rule``; slots shrink so that no rank's take more than ``budget_bytes`` (0: no limit).

    Args:
        nodes: the node of each rank, if they lie on several; a chunk has a slot on both sides of a channel between two.
        multicast: whether an algorithm's values may have one slot for all readers.

    Raises:
        PlanError: if the plan lacks the packing or algorithm. The program is proved before it is returned.
    """
    if rule.protocol in ONE_SHOTS:
        return check(one_shot(call, nodes))
    made = plan.algorithm(call.collective, call.root, rule.scheme)
    if made is not None:
        chunk_bytes = chunk_of_algorithm(made, call, rule, multicast=multicast)
        lowered: Callable[[int], Program] = partial(_by_algorithm, made, call, rule.depth, multicast)
    else:
        packing = plan.packing(call.collective, call.root, rule.scheme)
        chunk_bytes = chunk_for(packing, call, rule)
        lowered = partial(_by_packing, packing, call, rule.depth, plan.wire)
    program = lowered(chunk_bytes)
    if budget_bytes and program.channels:
        slots = [0] * call.n
        for channel in program.channels:
            slots[channel.writer] += 1
            for r in channel.readers if nodes else ():
                slots[r] += nodes[r] != nodes[channel.writer]
        busiest = max(slots)
        room = budget_bytes // (busiest * rule.depth) - 128
        if room < chunk_bytes:
            program = lowered(max(64, room // 64 * 64))
    return program


def _by_packing(packing: Packing, call: Call, depth: int, wire: Wire, chunk_bytes: int) -> Program:
    return check(lower(packing, call, chunk_bytes=chunk_bytes, depth=depth, wire=wire))


def _by_algorithm(made: Algorithm, call: Call, depth: int, multicast: bool, chunk_bytes: int) -> Program:
    return made.program(call, chunk_bytes=chunk_bytes, depth=depth, multicast=multicast)
