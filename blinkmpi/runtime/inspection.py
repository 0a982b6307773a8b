"""What a communicator says about itself: how a call will run, why, and how fast. No call is made here.

What follows from machine and plan alone is said by ``planning.explain`` and ``planning.predictor``, which need no MPI;
here stands what only the live job can add.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..forecast.calibrate import Trial, measured
from ..forecast.rates import StepRates
from ..forecast.simulate import BySteps
from ..forecast.steps import host_steps
from ..planning.algorithms import chunk_of_algorithm
from ..planning.beside_mpi import slower
from ..planning.explain import Explanation, plan_line
from ..planning.explain import explanation as explain_plan
from ..planning.gpus.kernel_times import ByKernels
from ..planning.plan import Plan, Rule, chunk_for
from ..planning.predictor import ByLinks, Predictor
from ..program.call import Call, call_of_bytes, collective_named
from ..topology.model import Topology
from ..transport.counters import counts_in
from ..transport.host.host_program import past_caches
from ..transport.stats import Stats, stats_of
from ..util.numbers import rank_of, size_of
from ..util.text import size_text
from .agreeing import takes_blocks
from .buffers import delegated_because, op_name
from .children import Child
from .context import Context
from .outlook import Outlook

OF_BLOCKS = ("gather", "scatter", "allgather", "alltoall")  # collectives with a v-variant
LONGEST = 128 << 20  # vectors that are longer are taken to cost as much for each byte as these
SHORTER = 15 / 16  # steps are timed in vectors of this part of a call's length, by the rule of its own length


def explain(context: Outlook, collective: str, nbytes: int, *, dtype: str, op: Any, root: int) -> str:
    """Which scheme a call of ``nbytes`` takes, why, how fast it could be, and what was rejected."""
    if why := delegated_because(op) or no_room(context):
        return f"{collective}: MPI's own collective, because {why}"
    return explanation(context, call_of(context.n, collective, nbytes, dtype, op, root)).text()


def explanation(context: Outlook, call: Call) -> Explanation:
    """The same of a call, as data; on GPUs of a call between registered buffers, and how others differ."""
    live, gpus = [context.executor], context.gpus
    if gpus and gpus.here:
        live.append(f"between nodes: chunks are {gpus.crossing}")
    if gpus and gpus.emulated:
        live.append(f"emulated: the trees of {context.machine.name} on other GPUs, every link paced to its rate")
    elif context.emulated and not gpus:
        live.append(
            f"emulated: the trees of {context.machine.name} on CPU ranks; times are predictions for that machine"
        )
    main = context.main
    plan = main.planned.about(call.collective, call.root)
    rule = main.rule(call, plan=plan)
    if gpus:
        plain = gpus.rule(call, registered=False, plan=plan)
        if (plain.scheme, plain.protocol) != (rule.scheme, rule.protocol):
            live.append(f"buffers that are not registered: {plain.scheme} by {plain.protocol}")
    if blocks := blocks_line(context, call):
        live.append(blocks)
    live.append(f"predictions are by {rests_on(context)}")
    like_measured = not context.gpus and not context.emulated and context.host.native
    if like_measured and (why := slower(call, len(set(context.nodes)))):
        live.append(why)
    predictor = _predictor(context, plan=plan, rates=context.step_rates)
    return explain_plan(plan, main.machine, call, rule=rule, live=live, predictor=predictor)


def blocks_line(context: Outlook, call: Call) -> str:
    """How the v-variant of a collective runs, if it follows no plan; empty if there is none, or it does.

    It is known once the communicator has opened.
    """
    if not isinstance(context, Context) or call.collective not in OF_BLOCKS:
        return ""
    if context.gpus:
        return _blocks_on_gpus(context, call)
    memory = context.host.block_memory
    if memory is None or not takes_blocks(context, call.collective):
        return ""
    short, read_from = memory.lengths(call.collective)
    name, shot = f"{call.collective.capitalize()}v", f"blocks to {size_text(short)} in one shot"
    if read_from == short + 1:
        return f"{name}: no trees; {shot}, longer ones by cma"
    by_cma = f", by cma from {size_text(read_from)} on" if read_from else ""
    return f"{name}: no trees; {shot}, longer ones in chunks{by_cma}"


def _blocks_on_gpus(context: Context, call: Call) -> str:
    if call.collective == "allgather":  # whose lengths all ranks know
        return ""
    gpus, name = context.cuda(), f"{call.collective.capitalize()}v"
    if takes_blocks(context, call.collective, on_gpus=True):
        lanes = gpus.transport.block_lanes
        return f"{name}: no trees; from GPU to GPU in {lanes} lanes, lengths compared by the kernels"
    why = gpus.why_no_blocks or "a scheme for it was asked for"
    return f"{name}: by trees, and the ranks tell one another the lengths before, as {why}"


def no_room(context: Outlook) -> str:
    """Why MPI's own collectives carry all calls on host memory; empty where they do not."""
    return "" if context.gpus else context.host.window.full


def rests_on(context: Outlook, rates: StepRates | None = None) -> str:
    """What predictions of calls are made from: steps, kernels, or the rates of links or copies.

    Args:
        rates: what steps cost on these CPU ranks, if not what ``blinkmpi tune`` has kept.
    """
    gpus, timed = context.gpus, rates or context.step_rates
    if gpus and gpus.forecasts:
        return f"what kernels cost, in graphs: {gpus.costs.basis}"
    if timed is not None:
        return f"the steps of calls, timed on {timed.measured}" + (" (blinkmpi tune)" if rates is None else "")
    if context.forecasts:
        return "the rate of copies at the start; blinkmpi tune times the steps of calls"
    return "a simulation at the rates of the machine's links"


def _predictor(
    context: Outlook, *, plan: Plan, rates: StepRates | None, in_place: bool = False, graph: bool = True
) -> Predictor | None:
    """What predicts here in place of the simulator.

    Args:
        plan: that has the call.
        rates: what steps cost on these CPU ranks.
    """
    gpus = context.gpus
    if gpus and gpus.forecasts:
        about, machine, costs = gpus.planned.about, gpus.machine, gpus.costs
        return ByKernels(about, gpus.program, machine, costs, in_place, graph)
    if rates is None:
        return None
    return BySteps(
        rates,
        lambda call, rule: host_steps(context.host, context.program(call, rule, plan), rule.protocol),
        in_place,
    )


def plan_text(context: Outlook, collective: str, root: int) -> str:
    """The packing that large vectors take, in one line: trees, rate, bound."""
    name, root = collective_named(collective), rank_of(root, context.n)
    plans = context.main.planned.about(name, root)
    scheme = plans.rule(name, 1 << 62, root=root).scheme
    if scheme == "mpi":
        return f"{name}: MPI's own, by BLINKMPI_ALGO"
    if (made := plans.algorithm(name, root, scheme)) is not None:
        return f"{name}: {scheme}, {made.summary()}"
    return plan_line(plans.packing(name, root, scheme))


def choice(
    context: Outlook, collective: str, nbytes: int, *, dtype: str = "float32", op: Any = "sum", root: int = 0,
    registered: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """The choice for a call, as data: scheme, executor, protocol, ctas, chunk_bytes, depth, reason.

    Args:
        registered: whether GPU memory is registered.
    """
    if why := delegated_because(op) or no_room(context):
        return {"scheme": "mpi", "executor": "mpi", "chunk_bytes": 0, "depth": 0, "reason": why}
    call = call_of(context.n, collective, nbytes, dtype, op, root)
    main = context.main
    plan = main.planned.about(call.collective, call.root)
    gpus = context.gpus
    rule = gpus.rule(call, registered=registered, plan=plan) if gpus else main.rule(call, plan=plan)
    chunk = 0
    if (made := plan.algorithm(call.collective, call.root, rule.scheme)) is not None:
        chunk = chunk_of_algorithm(made, call, rule, multicast=context.one_node and not context.gpus)
    elif rule.scheme != "mpi":
        chunk = chunk_for(plan.packing(call.collective, call.root, rule.scheme), call, rule)
    name = "cuda" if context.gpus else context.host.executor
    return {
        "scheme": rule.scheme,
        "executor": "mpi" if rule.scheme == "mpi" else name,
        "protocol": rule.protocol,
        "ctas": min(rule.ctas, gpus.transport.max_ctas) if gpus else rule.ctas,
        "chunk_bytes": chunk,
        "depth": rule.depth,
        "reason": rule.reason,
    }


def predict(
    context: Outlook, collective: str, nbytes: int, *, dtype: str = "float32", op: Any = "sum", root: int = 0,
    in_place: bool = False, rates: StepRates | None = None, registered: bool = True, graph: bool = True,
) -> tuple[float | None, float | None]:  # fmt: skip
    """(predicted seconds, seconds that the bound allows) for a call; None where the plan has no say.

    Args:
        rates: what steps cost on these CPU ranks, if not what ``blinkmpi tune`` has kept. Without either the simulator
            predicts, and both places are alike; on GPUs it is :mod:`..planning.gpus.kernel_times`.
        registered, graph: of GPU memory, whether it is registered; of calls on it, whether they are in a graph.
    """
    if delegated_because(op):
        return None, None
    call = call_of(context.n, collective, nbytes, dtype, op, root)
    main = context.main
    plan = main.planned.about(call.collective, call.root)
    gpus = context.gpus
    if gpus:
        rule = gpus.rule(call, registered=registered, plan=plan)
    else:
        rule = context.rule(call, blocking=False, plan=plan)
    rates = rates or context.step_rates
    predictor = _predictor(context, plan=plan, rates=rates, in_place=in_place, graph=graph)
    seconds = predictor.seconds(call, rule) if predictor else None
    if rates is not None and (seconds is not None or in_place not in places(call)):
        bound = _bound(call, rule, plan, main.machine, rates)
        if bound and in_place and call.collective == "allgather":  # a rank's own block lies where it belongs
            bound *= (call.n - 1) / call.n
        return (seconds if in_place in places(call) else None), bound
    if seconds is None:
        seconds = ByLinks(plan, main.machine, lambda call, rule: main.program(call, rule, plan)).seconds(call, rule)
    return seconds, None if seconds is None else _bound(call, rule, plan, main.machine, None)


def _bound(call: Call, rule: Rule, plan: Plan, machine: Topology, rates: StepRates | None) -> float | None:
    """Seconds of the packing's bound: at the rates of the links, or of the fastest pass that was measured here.

    The bound counts how often each rank must go over the bytes; all ranks together have their cores, no more.
    """
    if plan.algorithm(call.collective, call.root, rule.scheme) is not None:
        return None
    packing = plan.packing(call.collective, call.root, rule.scheme)
    if not packing.bound:
        return None
    seconds = call.nbytes / float(packing.bound * 10**6)
    fastest = rates.fastest_pass(call.nbytes) if rates else None
    if rates is None or fastest is None:
        return seconds
    assumed = min(k.mbps for k in machine.links if k.kind == "memory")
    crowd = max(1.0, rates.hardware.ranks / rates.hardware.cores)
    return seconds * (assumed * 1e6) / (1048576 / (fastest * 1e-6)) * crowd


def places(call: Call) -> tuple[bool, ...]:
    """The places, out of and in place, in which steps of a call are timed: in place only where nothing is copied."""
    return (False, True) if call.collective in ("allreduce", "allgather", "broadcast") else (False,)


def measure_steps(
    context: Context, calls: Sequence[Call], buffers: tuple[Any, Any], meet: Callable[[], object]
) -> StepRates | None:
    """Time the steps of calls a little shorter than these (:data:`SHORTER`); collective, while no call is under way.

    None where times do not follow from those of steps (:attr:`Context.forecasts`).

    Args:
        buffers: two arrays of bytes, of which the longest call has room in each.
        meet: makes a call without data.
    """
    if not context.forecasts:
        return None
    trials = []
    for call in calls:
        plan = context.planned.about(call.collective, call.root)
        rule = context.rule(call, blocking=False, plan=plan)
        nbytes, root = int(min(call.nbytes, LONGEST) * SHORTER), max(call.root, 0)
        shorter = call_of_bytes(call.collective, call.n, nbytes, dtype=call.dtype, op=call.op, root=root, aligned=64)
        if rule.scheme == "mpi" or not shorter.nbytes:
            continue
        make = partial(context.program, shorter, rule, plan)
        for in_place in places(call)[: 1 if call.collective == "broadcast" else 2]:
            trials.append(Trial(make, rule.protocol, in_place, past_caches(call)))
    return measured(context.host, context.together, trials, buffers, meet)


def stats(context: Context) -> Stats:
    """What this rank's calls have moved so far. Local."""
    host = context.host
    return stats_of(host.rank, host.n, counts_in(host.window.counters), timed=host.recorder.ring is not None)


def no_stats(child: Child) -> Stats:
    """What the calls of a communicator have moved that has not opened. Local."""
    return stats_of(child.comm.rank, len(child.ranks), {}, timed=bool(child.parent.settings.events))


def call_of(n: int, collective: str, nbytes: int, dtype: str, op: Any, root: int) -> Call:
    """The call of ``n`` ranks that moves ``nbytes`` in its largest buffer."""
    root, nbytes = rank_of(root, n), size_of(nbytes)
    return call_of_bytes(collective_named(collective), n, nbytes, dtype=dtype, op=op_name(op), root=root)
