"""A Markov chain of emcee's, whose walkers schwimmbad spreads over the ranks: what make clients runs."""

import sys

import emcee
import numpy as np
from schwimmbad import MPIPool

WALKERS, DIMENSIONS, STEPS = 32, 3, 100


def log_probability(x: np.ndarray) -> float:
    """Of a normal distribution."""
    return float(-0.5 * (x**2 / np.arange(1, DIMENSIONS + 1)).sum())


with MPIPool() as pool:
    if not pool.is_master():
        pool.wait()
        sys.exit()
    rng = np.random.RandomState(7)
    sampler = emcee.EnsembleSampler(WALKERS, DIMENSIONS, log_probability, pool=pool)
    sampler.random_state = rng.get_state()
    sampler.run_mcmc(rng.normal(size=(WALKERS, DIMENSIONS)), STEPS)
    chain = sampler.get_chain(flat=True)
    RESULT = {"mean": float(chain.mean()), "variance": float(chain.var())}
