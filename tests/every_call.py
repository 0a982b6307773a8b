"""Calls of every method of mpi4py that takes buffers, on arrays of any kind; MPI's own on NumPy arrays is the judge."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

import blinkmpi
from blinkmpi.errors import BlinkError
from blinkmpi.runtime.guard import ON_HOST, STAGED
from tests.every_method import COUNT, KINDS, buffers_of, forms, public

Array = np.ndarray[Any, Any]
Make = Callable[[Array], Any]  # an array with the content of a NumPy array
Fetch = Callable[[Any], Array]  # and back
ENDS = ("Send_init", "Bsend_init", "Ssend_init", "Rsend_init", "Recv_init", "Psend_init", "Precv_init")


def collectives(kind: type) -> Iterator[tuple[str, dict[str, str]]]:
    """Give the collectives of a type, also persistent ones, and their buffers with what each may be."""
    for name, signature in public(kind):
        buffers = {b: text.strip("'").split(" ")[0] for b, text in buffers_of(signature).items()}
        if buffers and name not in (*STAGED, *ON_HOST, *ENDS):
            yield name, buffers


def make_collective(of: Any, name: str, buffers: dict[str, str], form: int, make: Make) -> list[Any]:
    """Make a collective call and complete it; gives its buffers."""
    peers = len(of.inedges) if "eighbor" in name else of.size
    arrays, arguments = [], {}
    for buffer, annotation in buffers.items():
        whole = "educe_scatter" in name and "block" not in name and buffer == "sendbuf"  # of one count, not of blocks
        blocks = 1 if annotation == "BufSpec" and not whole else peers
        array = make(np.arange(COUNT * blocks, dtype=np.float32) + 10 * of.rank + len(arrays))
        arrays.append(array)
        arguments[buffer] = forms(array, annotation, peers)[form % (2 if whole else 3 - (annotation == "BufSpecW"))]
    finish(getattr(of, name)(**arguments))
    return arrays


def finish(made: Any) -> None:
    """Complete a call of whatever kind."""
    if isinstance(made, MPI.Prequest):
        made.Start()
        made.Wait()
        made.Free()
    elif isinstance(made, MPI.Request):
        made.Wait()


def walk_collectives(of: Any, make: Make, fetch: Fetch) -> dict[str, str]:
    """Make every collective of a communicator in every form; maps name to ``right`` or to the error's type.

    Raises:
        AssertionError: for a wrong result.
    """
    kind = next(base for base in type(of).__mro__ if base in KINDS)
    outcomes = {}
    for name, buffers in collectives(kind):
        for form in range(3):
            want = make_collective(kind(of), name, buffers, form, np.copy)
            try:
                got = make_collective(of, name, buffers, form, make)
            except BlinkError as error:
                outcomes[name] = type(error).__name__
                continue
            if "xscan" in name and of.rank == 0:  # whose result is undefined
                want, got = want[:1], got[:1]
            for one, other in zip(want, got, strict=True):
                assert fetch(other).tolist() == one.tolist(), f"{type(of).__name__}.{name}, form {form}, rank {of.rank}"
            assert outcomes.setdefault(name, "right") == "right", f"{name}: form {form} alone is taken"
    return outcomes


def walk_point_to_point(of: blinkmpi.Communicator, make: Make, fetch: Fetch) -> None:
    """Send and receive by every method, around a ring; the other end of a one-sided method is in host memory.

    Raises:
        AssertionError: for a wrong result.
    """
    right, left = (of.rank + 1) % of.size, (of.rank - 1) % of.size
    mine, lefts = (np.arange(1000, dtype=np.float32) + 10 * rank for rank in (of.rank, left))
    MPI.Attach_buffer(bytearray(1 << 20))
    for name, (send, recv) in STAGED.items():
        got: Any = np.zeros_like(mine)
        pending = of.Irecv(got, left) if not recv else of.Isend(mine, right) if not send else None
        of.Barrier()  # for Rsend
        if not recv:
            finish(getattr(of, name)(make(mine), right))
        else:
            got = make(mine if send == recv else got)
            if not send:
                finish(getattr(of, name)(got, left))
            elif send == recv:
                finish(getattr(of, name)(got, right, source=left))
            else:
                finish(getattr(of, name)(make(mine), right, 0, got, left))
        finish(pending)
        assert fetch(got).tolist() == lefts.tolist(), f"{name}, rank {of.rank}"
    for name in ("Recv", "Irecv"):
        got, pending = make(np.zeros_like(mine)), of.Isend(mine, right)
        finish(getattr(of.Mprobe(left), name)(got))
        finish(pending)
        assert fetch(got).tolist() == lefts.tolist(), f"Message.{name}, rank {of.rank}"
    MPI.Detach_buffer()
