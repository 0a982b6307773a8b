"""The arguments of ``grow`` (how many ranks, which program), and what new ranks take over from the old ones."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

import msgspec

from ...errors import ArgumentError, CannotGrow
from ...util.numbers import whole
from ...util.text import quoted
from ...util.together import read
from ..bootstrap import Options
from ..children import part_of_options
from ..context import Context


class Shared(msgspec.Struct, frozen=True):
    """The arguments of a communicator that hold for any number of ranks: newcomers take them over."""

    timeout_s: float | None
    strict: bool
    deterministic: bool
    executor: str | None
    algo: str | None
    max_ctas: int | None
    stream: str | None
    wire: str | None


def number_of(n: object) -> int:
    """How many ranks are to come.

    Raises:
        ArgumentError: for what is no number, or less than 1.
    """
    found = whole(n)
    if found is None or found < 1:
        raise ArgumentError(f"grow({quoted(n)}): expected a number of ranks to add, at least 1; pass one")
    return found


def command_of(command: Sequence[str] | None) -> list[str]:
    """The command line that new ranks run: as given, or that of this program.

    Raises:
        ArgumentError: for what is no command line, or no program.
    """
    if command is None:
        return [sys.executable, *sys.orig_argv[1:]]
    if isinstance(command, str | bytes) or not command or not all(isinstance(word, str) for word in command):
        raise ArgumentError(
            f"command={quoted(command)}: expected words, such as [sys.executable, 'worker.py']; pass a list of them"
        )
    if shutil.which(command[0]) is None:
        raise ArgumentError(f"command={quoted(list(command))}: there is no program {quoted(command[0])}; correct it")
    return list(command)


def check_growable(context: Context) -> None:
    """Raise CannotGrow for a communicator that cannot have more ranks, whatever starts them."""
    if context.gpus is not None:
        raise CannotGrow(
            "grow(): this communicator has a GPU for each rank, and ranks that join on GPUs were never tried: start "
            "the job again with more ranks"
        )
    settings = context.settings
    for set_, what in (
        (context.emulated, "topology= (or BLINKMPI_TOPO_FILE) describes a machine"),
        (settings.graph_file, "BLINKMPI_GRAPH_FILE has a plan"),
        (settings.nodes, f"BLINKMPI_NODES={'+'.join(map(str, settings.nodes))} is a division"),
    ):
        if set_:
            raise CannotGrow(f"grow(): {what} of {context.n} ranks, and of no more; leave it out, and start again")


def check_launcher() -> None:
    """Raise CannotGrow where it is not MPI's launcher that decides how many processes there are."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise CannotGrow(
            "grow(): torchrun started these processes, and its agents alone decide how many there are; start the job "
            "by mpirun, or let torchrun start it anew (--nnodes MIN:MAX)"
        )


def shared(context: Context, n: int) -> Shared:
    """What the ranks of a communicator of ``n`` ranks take over from this one's."""
    found = part_of_options(context.options, context.settings, None, n)
    return Shared(
        context.timeout_s, found.strict, found.deterministic, found.executor, found.algo, found.max_ctas, found.stream,
        found.wire,
    )  # fmt: skip


def encoded(these: Shared) -> bytes:
    """As bytes."""
    return msgspec.msgpack.encode(these)


def options_of(body: bytes) -> Options:
    """The arguments, from bytes that another rank has told.

    Raises:
        FormatError: if they are none.
    """
    told: Shared = read(body, Shared, "a rank of the communicator that grows")
    return Options(
        timeout_s=told.timeout_s, strict=told.strict, deterministic=told.deterministic, executor=told.executor,
        algo=told.algo, max_ctas=told.max_ctas, stream=told.stream, wire=told.wire,
    )  # fmt: skip
