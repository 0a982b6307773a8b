"""Method ``mwu+ilp``: fewer trees by integer programming, Blink's second stage (section 3.2.1).

It takes the fewest trees of the first stage that carry its rate, less a stated loss. As in the paper, it first tries
weights of one unit (the smallest link); where they do not reach the rate, any weights that fit.
"""

from fractions import Fraction

from ..exact.weights import fewest_for, fewest_units, placed
from ..problem import Problem, Solution
from . import mwu

NODES = 2_000


def plan(problem: Problem) -> Solution:
    """The trees of multiplicative weights, reduced to the fewest."""
    caps = problem.capacities
    shapes, weights = mwu.packed(caps, float(problem.options.epsilon))
    rate = sum(weights.values(), Fraction(0))
    target = (1 - problem.options.loss) * rate
    told = f"{len(shapes)} trees of multiplicative weights"
    answer, way = fewest_units(caps, shapes, target, nodes=NODES), "of one unit each"
    if answer is None:
        answer, way = fewest_for(caps, shapes, target, nodes=NODES), "of any weight, as units do not reach the rate"
    if answer is None or sum(answer.weights.values()) < target or len(answer.weights) >= len(shapes):
        return Solution(*placed(caps, shapes, weights), f"{told}, of which the integer program could drop none")
    kept = "the fewest" if answer.proved else "the fewest that were found"
    loss = 1 - float(sum(answer.weights.values()) / rate)
    most = f"{float(problem.options.loss):.1%}"
    why = f"{told} thinned out to {len(answer.weights)} {way}, {kept} that lose at most {most}"
    return Solution(*placed(caps, shapes, answer.weights), f"{why} of them (here {loss:.1%})")
