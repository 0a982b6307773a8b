"""The conformance suite on the simulator: every plan of every small machine, all ranks in one process."""

from functools import cache

import numpy as np
import pytest

from blinkmpi.planning.plan import Plan
from blinkmpi.planning.selection import make_plan, program_for
from blinkmpi.program.call import Call
from blinkmpi.program.interpreter import run
from blinkmpi.program.reduction import dtype_of
from blinkmpi.topology import machine, modify
from tests.conformance import COLLECTIVES, Case, cases, expected, inputs, mistakes

MACHINES = {
    "cpu:1": ("cpu:1", None),
    "cpu:3": ("cpu:3", None),
    "cpu:4": ("cpu:4", None),
    "dgx-1v[1,4,5,6]": ("dgx-1v", "1,4,5,6"),
    "dgx-1v": ("dgx-1v", None),
    "dgx-a100": ("dgx-a100", None),
    "pcie-8[0,2,5]": ("pcie-8", "0,2,5"),
}


@cache
def plan_of(name: str) -> Plan:
    spec, gpus = MACHINES[name]
    return make_plan(modify(machine(spec), gpus=gpus))


def call_of(case: Case) -> Call:
    kind = case.collective.removesuffix("_block")
    counts = case.counts() if kind == "reduce_scatter" else (case.count,)
    root = case.root if kind in ("broadcast", "reduce", "gather", "scatter") else -1
    return Call(kind, case.n, counts, case.dtype, case.op, root)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", MACHINES)
def test_every_scheme(name: str, collective: str) -> None:
    plan = plan_of(name)
    kind = collective.removesuffix("_block")
    for case in cases(collective, plan.n, full=name == "dgx-1v[1,4,5,6]"):
        call = call_of(case)
        if call.total == 0 or case.in_place:  # a program does not know whose memory it works on
            continue
        sends = inputs(case)
        for scheme in plan.schemes(kind, call.root):
            rule = next(r for r in plan.rules if r.collective == kind)
            program = program_for(plan, call, type(rule)(kind, 0, scheme, rule.chunk_bytes, rule.depth))
            for rank, got in enumerate(run(program, list(sends))):
                want = expected(case, rank)
                if want is None or want.size == 0:
                    continue
                assert got is not None, f"{case}: {scheme}: rank {rank} received nothing"
                wrong = mistakes(case, np.asarray(got), want, rank)
                assert wrong == 0, f"{case}: {scheme}: rank {rank}: {wrong} of {want.size} elements wrong"


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_wrong_element_is_found(collective: str) -> None:
    for case in cases(collective, 3):
        for rank in range(case.n):
            want = expected(case, rank)
            if want is None or not want.size:
                continue
            got = want.astype(dtype_of(case.dtype))
            assert mistakes(case, got, want, rank) == 0, case
            last = want[-1]
            if want.dtype.kind in "fcV":
                got[-1] = 0 if np.isnan(last) else last + (2 if last.real < 0 else -2)
            else:
                got[-1] = ~last
            assert mistakes(case, got, want, rank) == 1, case
            assert mistakes(case, got[:-1], want, rank) == want.size, case
