"""Training that goes on when ranks die: ``mpirun --with-ft ulfm -np 4 python examples/train_elastic.py --lose 2:40``.

The network, the data and the steps are those of ``train.py``. Rank 2 is killed before its step 40. The others get a
``PeerLost``, go on in the communicator that ``shrink`` gives them, and divide each batch among fewer ranks. What the
ranks sum is the gradient of the same batches, so the accuracy is that of a run which loses nobody.

A rank may have ended a step in which another one heard of the loss. So each keeps the weights of the step before, and
all go back to the last step that all have ended.

With ``--replace`` a new rank is started for each that is lost (``grow``). It runs this program, too: it joins the
others, and gets the state of the training from the first of them.
"""

import argparse
import hashlib
import os
import signal
import sys

import numpy as np
from mpi4py import MPI
from train import ENOUGH, MOMENTUM, RATE, Array, Network, digits_split

import blinkmpi


class State:
    """The weights and their speed after some steps, and after one step less."""

    def __init__(self, net: Network) -> None:
        self.net, self.speed, self.steps = net, np.zeros_like(net.weights), 0
        self._before = net.weights.copy(), self.speed.copy()

    def step(self) -> None:
        """Take the step of the gradient, which is that of all ranks."""
        self._before = self.net.weights.copy(), self.speed.copy()
        self.speed = MOMENTUM * self.speed + self.net.gradient
        self.net.weights -= RATE * self.speed
        self.steps += 1

    def back_to(self, steps: int) -> None:
        """Be as after so many steps: those that were taken, or one less."""
        if steps < self.steps:
            self.net.weights[:], self.speed = self._before
            self.steps = steps

    def share(self, comm: blinkmpi.Communicator) -> None:
        """Be as on the first rank."""
        self.steps = comm.bcast(self.steps)
        for array in (self.net.weights, self.speed):
            comm.Bcast(array)


def go_on(comm: blinkmpi.Communicator, error: blinkmpi.PeerLost, state: State, replace: bool) -> blinkmpi.Communicator:
    """Give the communicator of the ranks that are left, or of as many as before; they are at the same step then."""
    at, size = state.steps, comm.size
    new = comm.shrink()
    state.back_to(new.allreduce(at, MPI.MIN))
    if new.rank == 0:
        lost = ", ".join(map(str, error.ranks))
        print(f"rank {lost} of {size} is lost at step {state.steps}: {new.size} go on", flush=True)
    if not replace:
        return new
    grown = new.grow(size - new.size)
    state.share(grown)
    if grown.rank == 0:
        print(f"{grown.size} ranks are there again at step {state.steps}", flush=True)
    return grown


def batch_of(step: int, args: argparse.Namespace, n: int) -> Array:
    """Give the samples of a step, the same on all ranks, of ``n`` in all; each epoch has an order of its own."""
    epoch, at = divmod(step, n // args.batch)
    order = np.random.default_rng([args.seed, epoch]).permutation(n)
    return order[at * args.batch : (at + 1) * args.batch]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits, and lose ranks meanwhile.")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training data (%(default)s)")
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 64], help="widths of the hidden layers")
    parser.add_argument("--batch", type=int, default=128, help="samples in a step, of all ranks together (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, split and order (%(default)s)")
    parser.add_argument("--lose", nargs="*", default=[], metavar="RANK:STEP", help="kill these ranks at these steps")
    parser.add_argument("--replace", action="store_true", help="start a new rank for each that is lost")
    return parser.parse_args()


def main() -> int:
    args, joined = arguments(), blinkmpi.Communicator.join()
    comm = joined or blinkmpi.Communicator(MPI.COMM_WORLD)
    deaths = {int(rank): int(step) for rank, _, step in (text.partition(":") for text in args.lose)}
    dies_at = None if joined else deaths.get(comm.rank)
    x, digits, test_x, test_digits = digits_split(np, args.seed)
    net = Network(np, [x.shape[1], *args.hidden, 10])
    net.initialise(args.seed)  # the same on all ranks
    state, steps = State(net), args.epochs * (len(digits) // args.batch)
    if joined:
        state.share(comm)
    while state.steps < steps:
        if state.steps == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        mine = batch_of(state.steps, args, len(digits))[comm.rank :: comm.size]
        net.step(x[mine], digits[mine], args.batch)
        try:
            comm.Allreduce(MPI.IN_PLACE, net.gradient)
        except blinkmpi.PeerLost as error:
            comm = go_on(comm, error, state, args.replace)
        else:
            state.step()

    hashes = comm.allgather(hashlib.sha256(net.weights.tobytes()).hexdigest())
    accuracy = net.accuracy(test_x, test_digits)
    passed = len(set(hashes)) == 1 and accuracy >= ENOUGH
    if comm.rank == 0:
        print(f"weights     {'bit-identical' if len(set(hashes)) == 1 else 'NOT EQUAL'} on {comm.size} ranks")
        print(f"accuracy    {accuracy:.1%} of {len(test_digits)} test digits after {state.steps} steps")
        print(f"result      {'passed' if passed else 'FAILED'}")
    comm.Free()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
