"""The trees of packings as programs over chunks, and as Python text that runs."""

import random
import runpy
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkmpi.errors import ArgumentError
from blinkmpi.lang import Algorithm
from blinkmpi.lang.packed import COLLECTIVES, algorithm_of, python_of
from blinkmpi.program.interpreter import run
from blinkmpi.topology import machine
from blinkmpi.trees import pack
from blinkmpi.trees.tree import Collective
from tests.unit.trees.packings import call_of, random_packing, reference, sends_of


def without_lines(made: Algorithm) -> Algorithm:
    nodes = tuple(msgspec.structs.replace(node, where="") for node in made.flow.nodes)
    return msgspec.structs.replace(made, nodes=nodes)


@pytest.mark.slow
@given(collective=st.sampled_from(COLLECTIVES), n=st.integers(1, 5), seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_a_packing_and_its_text_are_one_algorithm(
    tmp_path_factory: pytest.TempPathFactory, collective: Collective, n: int, seed: int
) -> None:
    rng = random.Random(seed)
    root = rng.randrange(n)
    found = random_packing(collective, n, rng, root=root)
    few = (msgspec.structs.replace(t, weight=Fraction(1 + i % 2)) for i, t in enumerate(found.trees))  # few chunks
    found = msgspec.structs.replace(found, trees=tuple(few))
    made = algorithm_of(found, "trees")
    call = call_of(collective, n, 101, root=root)
    sends = sends_of(call, np.random.default_rng(1))
    program = made.program(call, chunk_bytes=256, depth=2)
    for got, want in zip(run(program, sends), reference(call, sends), strict=True):
        assert got is want is None or np.array_equal(got, want)
    path = Path(tmp_path_factory.mktemp("text")) / "trees.py"
    path.write_text(python_of(found))
    assert without_lines(runpy.run_path(str(path))["trees"](n)) == without_lines(made)


def test_the_trees_of_a_dgx_1v_are_as_many_stages_again() -> None:
    dgx = machine("dgx-1v")
    found = pack(dgx, "allreduce")
    made = algorithm_of(found)
    program = made.program(call_of("allreduce", 8, 6_000_000), chunk_bytes=1 << 17)
    assert len({channel.tree for channel in program.channels}) == len(found.trees)
    nbytes = 256 << 20
    assert made.simulate(dgx, nbytes).algbw > 0.9 * float(found.rate) / 1000


def test_what_has_no_trees_or_too_fine_weights_is_refused() -> None:
    rng = random.Random(7)
    with pytest.raises(ArgumentError, match="a scan has no trees of its own"):
        algorithm_of(random_packing("scan", 3, rng))
    fine = random_packing("allreduce", 3, rng)
    trees = (msgspec.structs.replace(fine.trees[0], weight=fine.trees[0].weight / 65537), *fine.trees, *fine.trees)
    with pytest.raises(ArgumentError, match=r"the trees' weights need .* chunks; at most 1024"):
        algorithm_of(msgspec.structs.replace(fine, trees=trees))
