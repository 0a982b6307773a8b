"""What a communicator says about itself: how a call will run, why, and how fast. No call is made here.

What follows from machine and plan alone is said by ``planning.explain`` and ``program.cost_model``, which need no MPI;
here stands what only the live job can add.
"""

from typing import Any

from ..planning.algorithms import chunk_of_algorithm
from ..planning.explain import explain as explain_plan
from ..planning.explain import plan_line
from ..planning.plan import chunk_for
from ..program.call import Call, call_of_bytes, collective_named
from ..program.cost_model import price
from ..transport.counters import counts_in
from ..transport.stats import Stats, stats_of
from .buffers import delegated_because, op_name
from .context import Context


def executor(context: Context) -> str:
    """What executes our programs on the ranks of this job, and what was found out about it."""
    if context.gpus:
        return f"CUDA kernels on {context.gpus.gpu.name}"
    return context.host.executor_reason


def explain(context: Context, collective: str, nbytes: int, *, dtype: str, op: Any, root: int) -> str:
    """Which scheme a call of ``nbytes`` takes, why, how fast it could be, and what was rejected."""
    if why := delegated_because(op):
        return f"{collective}: MPI's own collective, because {why}"
    call = call_of(context.n, collective, nbytes, dtype, op, root)
    live, gpus = [executor(context)], context.gpus
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
    if plan.wire == "operand":
        live.append("wire: partial results are rounded to the call's type on each hop (wire=operand)")
    return explain_plan(plan, main.machine, call, rule=main.rule(call, plan=plan), live=live)


def plan_text(context: Context, collective: str, root: int) -> str:
    """The packing that large vectors take, in one line: trees, rate, bound."""
    name = collective_named(collective)
    plans = context.main.planned.about(name, root)
    scheme = plans.rule(name, 1 << 62, root=root).scheme
    if scheme == "mpi":
        return f"{name}: MPI's own, by BLINKMPI_ALGO"
    if (made := plans.algorithm(name, root, scheme)) is not None:
        return f"{name}: {scheme}, {made.summary()}"
    return plan_line(plans.packing(name, root, scheme))


def choice(
    context: Context, collective: str, nbytes: int, *, dtype: str = "float32", op: Any = "sum", root: int = 0
) -> dict[str, Any]:
    """The choice for a call, as data: scheme, executor, protocol, ctas, chunk_bytes, depth, reason."""
    if why := delegated_because(op):
        return {"scheme": "mpi", "executor": "mpi", "chunk_bytes": 0, "depth": 0, "reason": why}
    call = call_of(context.n, collective, nbytes, dtype, op, root)
    main = context.main
    plan = main.planned.about(call.collective, call.root)
    rule, chunk = main.rule(call, plan=plan), 0
    if (made := plan.algorithm(call.collective, call.root, rule.scheme)) is not None:
        chunk = chunk_of_algorithm(made, call, rule, multicast=context.one_node and not context.gpus)
    elif rule.scheme != "mpi":
        chunk = chunk_for(plan.packing(call.collective, call.root, rule.scheme), call, rule)
    name = "cuda" if context.gpus else context.host.executor
    return {
        "scheme": rule.scheme,
        "executor": "mpi" if rule.scheme == "mpi" else name,
        "protocol": rule.protocol,
        "ctas": rule.ctas,
        "chunk_bytes": chunk,
        "depth": rule.depth,
        "reason": rule.reason,
    }


def predict(
    context: Context, collective: str, nbytes: int, *, dtype: str = "float32", op: Any = "sum", root: int = 0
) -> tuple[float | None, float | None]:
    """(predicted seconds, seconds that the bound allows) for a call; None where the plan has no say."""
    if delegated_because(op):
        return None, None
    call = call_of(context.n, collective, nbytes, dtype, op, root)
    main = context.main
    plan = main.planned.about(call.collective, call.root)
    rule = context.rule(call, blocking=False, plan=plan) if main is context else main.rule(call, plan=plan)
    if (made := plan.algorithm(call.collective, call.root, rule.scheme)) is not None:
        return made.price(call, main.machine, chunk_bytes=rule.chunk_bytes, depth=rule.depth).seconds, None
    packing = plan.packing(call.collective, call.root, rule.scheme)
    bound = call.nbytes / float(packing.bound * 10**6) if packing.bound else None
    return price(main.program(call, rule, plan), packing, main.machine).seconds, bound


def stats(context: Context) -> Stats:
    """What this rank's calls have moved so far. Local."""
    host = context.host
    return stats_of(host.rank, host.n, counts_in(host.window.counters), timed=host.recorder.ring is not None)


def call_of(n: int, collective: str, nbytes: int, dtype: str, op: Any, root: int) -> Call:
    """The call of ``n`` ranks that moves ``nbytes`` in its largest buffer."""
    return call_of_bytes(collective_named(collective), n, nbytes, dtype=dtype, op=op_name(op), root=root)
