"""Data-parallel training of a small network: ``mpirun -np 4 python examples/train.py``.

Every rank holds all weights and a share of each batch. The initial weights
travel by Bcast, the gradients are summed by Allreduce, each as one flat vector.
The data are scikit-learn's handwritten digits, which come with the package.
NumPy computes on CPUs; where every rank has a GPU, CuPy does, with the same lines.
"""

import argparse
import hashlib
import importlib
import os
import sys
from itertools import pairwise
from typing import Any

from mpi4py import MPI

# NumPy's BLAS starts a thread for each core, in every rank. Ranks that share a
# machine share its cores, so each takes its part; said before NumPy is loaded.
LOCAL = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
THREADS = max(1, len(os.sched_getaffinity(0)) // LOCAL.size)
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, str(THREADS))

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

import blinkmpi  # noqa: E402

Array = Any  # of NumPy or of CuPy
RATE, MOMENTUM = 0.1, 0.9
ENOUGH = 0.95  # test accuracy below this is a failure


def module_for(comm: blinkmpi.Communicator) -> Any:
    """Give CuPy if the communicator has found a GPU for every rank and made it the current one, else NumPy."""
    return importlib.import_module("cupy") if comm.gpu else np


def host(array: Array) -> Any:
    """Give a NumPy array with the same values."""
    return array if isinstance(array, np.ndarray) else array.get()


class Network:
    """Dense layers with ReLU between; all weights lie in one flat vector, all gradients in another.

    The arrays are those of ``xp``, NumPy or CuPy.
    """

    def __init__(self, xp: Any, widths: list[int]) -> None:
        self.xp = xp
        shapes = [(a + 1, b) for a, b in pairwise(widths)]  # the last row is the bias
        count = sum(rows * columns for rows, columns in shapes)
        self.weights, self.gradient = (xp.zeros(count, dtype=xp.float32) for _ in range(2))
        ends = np.cumsum([rows * columns for rows, columns in shapes])
        self.layers, self.slopes = (
            [part.reshape(shape) for part, shape in zip(xp.split(flat, ends[:-1].tolist()), shapes, strict=True)]
            for flat in (self.weights, self.gradient)
        )

    def initialise(self, seed: int) -> None:
        """Draw He's initial weights; the biases stay zero."""
        rng = np.random.default_rng(seed)
        for layer in self.layers:
            rows, columns = layer.shape[0] - 1, layer.shape[1]
            layer[:-1] = self.xp.asarray(rng.standard_normal((rows, columns), dtype=np.float32) * np.sqrt(2 / rows))

    def forward(self, x: Array) -> list[Array]:
        """Give the input of every layer and, last, the scores of the ten digits."""
        values = [x]
        for i, layer in enumerate(self.layers):
            y = values[-1] @ layer[:-1] + layer[-1]
            values.append(self.xp.maximum(y, 0) if i < len(self.layers) - 1 else y)
        return values

    def step(self, x: Array, digits: Array, batch: int) -> Array:
        """Write this share's part of the batch's mean gradient into ``gradient``; give its part of the loss."""
        xp = self.xp
        *inputs, scores = self.forward(x)
        scores = scores - scores.max(axis=1, keepdims=True)
        chance = xp.exp(scores) / xp.exp(scores).sum(axis=1, keepdims=True)
        rows = xp.arange(len(digits))
        loss = -xp.log(chance[rows, digits]).sum() / batch
        chance[rows, digits] -= 1
        error = chance / batch
        for i in reversed(range(len(self.layers))):
            self.slopes[i][:-1] = inputs[i].T @ error
            self.slopes[i][-1] = error.sum(axis=0)
            if i > 0:
                error = (error @ self.layers[i][:-1].T) * (inputs[i] > 0)
        return loss

    def accuracy(self, x: Array, digits: Array) -> float:
        return float((self.forward(x)[-1].argmax(axis=1) == digits).mean())


def digits_split(xp: Any, seed: int) -> tuple[Array, Array, Array, Array]:
    """Give training inputs and digits, test inputs and digits: four fifths and one fifth."""
    data = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.target))
    x, y = (data.data[order] / 16).astype(np.float32), data.target[order]
    cut = len(y) * 4 // 5
    return xp.asarray(x[:cut]), xp.asarray(y[:cut]), xp.asarray(x[cut:]), xp.asarray(y[cut:])


def against_mpi(comm: Any, net: Network, x: Array, digits: Array) -> tuple[float, float]:
    """Sum one gradient by ``comm`` and by MPI itself; give the largest difference and the largest value."""
    net.step(x[comm.rank :: comm.size], digits[comm.rank :: comm.size], len(digits))
    ours, theirs = net.xp.empty_like(net.gradient), np.empty(net.gradient.size, dtype=np.float32)
    comm.Allreduce(net.gradient, ours)
    MPI.COMM_WORLD.Allreduce(host(net.gradient), theirs)
    return float(np.abs(host(ours) - theirs).max()), float(np.abs(theirs).max())


def on_terminal() -> bool:
    """Tell whether a person watches: mpirun gives its ranks a terminal even when its own output is a file."""
    try:
        return sys.stdout.isatty() and os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts", "/dev/tty"))
    except OSError:
        return False


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits, data-parallel.")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training data (%(default)s)")
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048, 512], help="widths of the hidden layers")
    parser.add_argument("--batch", type=int, default=128, help="samples in a step, of all ranks together (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, split and order (%(default)s)")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    comm = blinkmpi.Communicator(MPI.COMM_WORLD)
    xp = module_for(comm)
    x, digits, test_x, test_digits = digits_split(xp, args.seed)
    net = Network(xp, [x.shape[1], *args.hidden, 10])
    if comm.rank == 0:
        net.initialise(args.seed)
    comm.Bcast(net.weights, root=0)

    difference, largest = against_mpi(comm, net, x, digits)

    watched = on_terminal()
    console = Console(quiet=comm.rank > 0, force_terminal=watched, highlight=False, soft_wrap=True)
    columns = (BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    steps = len(digits) // args.batch
    order = np.random.default_rng(args.seed)
    speed = xp.zeros_like(net.weights)
    with Progress(*columns, console=console, disable=not watched or comm.rank > 0) as progress:
        bar = progress.add_task("training", total=args.epochs * steps)
        for epoch in range(1, args.epochs + 1):
            shuffled = xp.asarray(order.permutation(len(digits)))
            for step in range(steps):
                mine = shuffled[step * args.batch + comm.rank : (step + 1) * args.batch : comm.size]
                loss = net.step(x[mine], digits[mine], args.batch)
                comm.Allreduce(MPI.IN_PLACE, net.gradient)
                speed = MOMENTUM * speed + net.gradient
                net.weights -= RATE * speed
                progress.advance(bar)
            mean = comm.allreduce(float(loss))
            progress.update(bar, description=f"loss {mean:.4f}")
            if not watched and epoch % max(1, args.epochs // 3) == 0:
                console.print(f"epoch {epoch} of {args.epochs}, loss {mean:.4f}")

    hashes = comm.allgather(hashlib.sha256(host(net.weights).tobytes()).hexdigest())
    same = len(set(hashes)) == 1
    accuracy = net.accuracy(test_x, test_digits)
    passed = same and accuracy >= ENOUGH

    devices = comm.machine.devices
    kinds = ", ".join(f"{sum(d.kind == k for d in devices)} {k.upper()}s" for k in sorted({d.kind for d in devices}))
    nodes = len({d.node for d in devices})
    report = {
        "machine": f"{comm.machine.name}: {kinds} on {nodes} node{'s' * (nodes > 1)}",
        "plan": comm.plan_line("allreduce"),
        "gradient": f"{net.gradient.size:,} float32, {net.gradient.nbytes / 1e6:.1f} MB, {args.epochs * steps} sums",
        "against MPI": f"largest difference in one sum {difference:.1e}, largest value {largest:.1e}",
        "weights": f"{'bit-identical' if same else 'NOT EQUAL'} on {comm.size} ranks ({hashes[0][:16]})",
        "accuracy": f"{accuracy:.1%} of {len(test_digits)} test digits, {ENOUGH:.0%} wanted",
        "result": "[bold green]passed[/]" if passed else "[bold red]FAILED[/]",
    }
    for name, text in report.items():
        console.print(f"{name:12}{text}")
    comm.Free()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
