"""Read and check the TOML file of a sweep, and expand it to the runs that it describes. Pure.

A run is one job: one ``blinkmpi bench`` on one number of ranks. Every list of the file is an axis, and the runs are
their product; a ``[[part]]`` repeats that with some keys changed. Whatever can be found wrong without starting
a rank is refused here, with the key that is wrong.
"""

import argparse
import difflib
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any, Literal, NoReturn

import msgspec

from ...errors import ArgumentError, BlinkError, FormatError
from ...launch.command import Binding, Launcher
from ...planning.selection import parse_algo
from ...program.call import REDUCTIONS, collective_named
from ...trees.tree import ROOTED
from ...util.codec import Value
from ...util.files import read_file
from ...util.settings import LONGEST_S, MOST_RANKS
from ...util.text import brief, parse_size, plural, quoted, whole_number
from ..nccl_tests import TEST_NAMES
from ..options import add_flags, memory_for, read

MOST_FILE_BYTES, MOST_RUNS = 1 << 20, 4096
LARGEST = 1 << 62
AXES = ("collectives", "nodes", "ranks_per_node", "types", "ops", "schemes", "executors", "graphs")
WHOLE = ("hostfile", "launcher", "bind", "gpus_per_node")  # what a part cannot change
OWN_FLAGS = ("-J", "--output_file", "--json", "--format", "--sweep", "-N", "--run_cycles", "-h", "--help")


class Sweep(Value, frozen=True):
    """A sweep, or one part of it, as in the file; ``docs/sweeps.md`` explains the keys."""

    collectives: tuple[str, ...] = ("all_reduce",)
    nodes: tuple[int | str, ...] = ()  # (): 1, 2, 4, ... and all
    ranks_per_node: tuple[int, ...] = ()  # (): as many as a node takes
    minbytes: int | str = "1K"
    maxbytes: int | str = "64M"
    stepfactor: int = 4
    types: tuple[str, ...] = ("float",)
    ops: tuple[str, ...] = ("sum",)
    root: int = 0
    schemes: tuple[str, ...] = ("auto",)
    executors: tuple[Literal["auto", "c", "numpy"], ...] = ("auto",)
    compare: tuple[str, ...] | None = None  # None: MPI, or NCCL where the nodes have GPUs
    memory: Literal["host", "gpu"] | None = None
    graphs: tuple[int, ...] = (0,)
    iters: int | None = None
    warmup_iters: int = 1
    timeout: float = 600.0  # seconds that a run may take
    flags: tuple[str, ...] = ()
    env: dict[str, str] = msgspec.field(default_factory=dict)
    hostfile: str | None = None
    launcher: Launcher | None = None
    bind: Binding = "none"
    gpus_per_node: int | None = None


class Run(Value, frozen=True):
    """One job, with everything that could change its numbers: two equal runs measure the same."""

    collective: str
    nodes: int
    ranks: int
    virtual: str  # "4+4": virtual nodes of one machine (BLINKMPI_NODES)
    type: str
    op: str  # "" where nothing is reduced
    root: int
    scheme: str
    executor: str
    minbytes: int
    maxbytes: int
    stepfactor: int
    compare: tuple[str, ...]
    memory: str | None
    graph: int
    iters: int | None
    warmup_iters: int
    flags: tuple[str, ...]
    env: dict[str, str]
    bind: Binding

    @property
    def key(self) -> dict[str, Any]:
        """What identifies this run in the results."""
        return dict(msgspec.json.decode(msgspec.json.encode(self)))

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks of each node; None if virtual nodes differ."""
        sizes = set(node_sizes(self.virtual)) if self.virtual else {self.ranks // self.nodes}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def algo(self) -> str:
        """``--algo``; empty for the plan's own choice."""
        if self.scheme == "auto" or ":" in self.scheme:
            return self.scheme.removeprefix("auto")
        return f"{collective_named(self.collective)}:{self.scheme}"

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments of ``bench``, without where its JSON goes."""
        words = [self.collective, "-b", str(self.minbytes), "-e", str(self.maxbytes), "-f", str(self.stepfactor)]
        words += ["-d", self.type, "-w", str(self.warmup_iters)]
        words += ["-o", self.op] if self.op else []
        words += ["-r", str(self.root)] if collective_named(self.collective) in ROOTED else []
        words += ["-n", str(self.iters)] if self.iters is not None else []
        words += ["--algo", self.algo] if self.algo else []
        words += ["--executor", self.executor] if self.executor != "auto" else []
        words += ["--compare", ",".join(self.compare)] if self.compare else []
        words += ["--memory", self.memory] if self.memory else []
        words += ["-G", str(self.graph)] if self.graph else []
        return (*words, *self.flags)

    def label(self) -> str:
        """The run in a few words."""
        real = f"{self.nodes} x {plural(self.ranks // self.nodes, 'rank')}"
        where = f"nodes {self.virtual}" if self.virtual else real
        more = [self.type] if self.type != "float" else []
        more += [self.op] if self.op not in ("", "sum") else []
        more += [self.scheme] if self.scheme != "auto" else []
        more += [self.executor] if self.executor != "auto" else []
        more += [f"graph {self.graph}"] if self.graph else []
        return ", ".join((f"{self.collective}, {where}", *more))


class Resources(Value, frozen=True):
    """The nodes and slots that a sweep can use."""

    nodes: int
    slots: int  # ranks that each node takes
    gpus: bool
    local: bool = False  # this machine, without a scheduler or a hostfile


def load(path: str) -> tuple[Sweep, ...]:
    """Read a file; the whole sweep first, and its parts if there are any.

    Raises:
        ArgumentError: if it cannot be read.
        FormatError: naming the file, the key, what was expected and the remedy.
    """
    try:
        text = read_file(path, most=MOST_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        said = f"cannot read the sweep {quoted(path)}: {why}"
        raise ArgumentError(f"{said}; give a TOML file, see docs/sweeps.md") from error
    return parse(text, source=path)


def parse(text: str, *, source: str) -> tuple[Sweep, ...]:
    """Read the text of a sweep; see :func:`load`."""
    source = brief(source)
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        said = brief(str(error))
        raise FormatError(f"{source}: no TOML: {said}; write KEY = VALUE lines, see docs/sweeps.md") from error
    parts = raw.pop("part", [])
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise FormatError(f"{source}: part: expected tables; write each under a line [[part]]")
    whole = _convert(raw, source, "")
    for i, part in enumerate(parts):
        for key in WHOLE:
            if key in part:
                raise FormatError(f"{source}: part[{i}].{key}: the same for the whole sweep; move it to the top")
    return (whole, *(_convert({**raw, **part}, source, f"part[{i}].") for i, part in enumerate(parts)))


def _convert(raw: Mapping[str, Any], source: str, at: str) -> Sweep:
    listed = {k: [v] if k in (*AXES, "compare") and not isinstance(v, list) else v for k, v in raw.items()}
    for key in listed:
        if key not in Sweep.__struct_fields__:
            near = difflib.get_close_matches(key[:80], Sweep.__struct_fields__, n=1, cutoff=0.5)
            remedy = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(Sweep.__struct_fields__)}"
            raise FormatError(f"{source}: {at}{brief(key)}: there is no such key; {remedy}")
    try:
        sweep = msgspec.convert(listed, Sweep)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `")
        key = brief(path.rstrip("`").removeprefix("$.").removeprefix("$")) or "the file"
        raise FormatError(f"{source}: {at}{key}: {said[0].lower()}{brief(said[1:])}; correct it") from error
    for name in AXES:
        if name in raw and not getattr(sweep, name):
            raise FormatError(f"{source}: {at}{name}: an empty list leaves no run; leave the key out for its default")
    if not 0 < sweep.timeout <= LONGEST_S:
        raise FormatError(f"{source}: {at}timeout: {sweep.timeout:g} s; expected more than 0, such as 600")
    for name in ("nodes", "ranks_per_node", "graphs", "minbytes", "maxbytes", "stepfactor", "root", "iters",
                 "warmup_iters", "gpus_per_node"):  # fmt: skip
        value = getattr(sweep, name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and not -LARGEST <= number <= LARGEST:
                raise FormatError(f"{source}: {at}{name}: {quoted(number)} is too large; correct it")
    for name, words in {"flags": sweep.flags, "env": (*sweep.env, *sweep.env.values())}.items():
        if wrong := [word for word in words if "\0" in word]:
            raise FormatError(f"{source}: {at}{name}: {quoted(wrong[0])}: a command line cannot hold this; correct it")
    if wrong := [name for name in sweep.env if not name or "=" in name]:
        raise FormatError(f"{source}: {at}env: {quoted(wrong[0])} is no name of a variable; correct it")
    for flag in sweep.flags:
        if flag.partition("=")[0] in OWN_FLAGS:
            raise FormatError(f"{source}: {at}flags: {brief(flag)}: the sweep itself needs it; leave it out")
    return sweep


def expand(sweeps: tuple[Sweep, ...], resources: Resources, *, source: str) -> list[tuple[Run, float]]:
    """All runs in order, each once, with the seconds that it may take.

    Raises:
        FormatError: for what the machines do not have, or ``bench`` would refuse.
    """
    found: dict[str, tuple[Run, float]] = {}
    parts = sweeps[1:] or sweeps[:1]
    for i, sweep in enumerate(parts):
        at = f"{source}: part[{i}]." if sweeps[1:] else f"{source}: "
        for run in _runs(sweep, resources, at):
            if len(found) == MOST_RUNS:
                raise FormatError(f"{at.rstrip(' .')} more than {MOST_RUNS} runs; take values out of the lists")
            _check(run, at)
            found.setdefault(msgspec.json.encode(run).decode(), (run, sweep.timeout))
    return list(found.values())


def _runs(sweep: Sweep, resources: Resources, at: str) -> Iterator[Run]:
    sizes = _size(sweep.minbytes, f"{at}minbytes"), _size(sweep.maxbytes, f"{at}maxbytes")
    compare = sweep.compare
    if compare is None:
        compare = ("nccl",) if resources.gpus and sweep.memory != "host" else ("mpi",)
    wheres = list(dict.fromkeys(_wheres(sweep, resources, at)))
    axes = product(sweep.collectives, wheres, sweep.types, sweep.ops, sweep.schemes, sweep.executors, sweep.graphs)
    for collective, (nodes, ranks, virtual), kind, op, scheme, executor, graph in axes:
        try:
            name = collective_named(collective)
        except BlinkError as error:
            raise FormatError(f"{at}collectives: {error}") from error
        yield Run(
            collective=TEST_NAMES.get(name, collective), nodes=nodes, ranks=ranks, virtual=virtual, type=kind,
            op=op if name in REDUCTIONS else "", root=sweep.root if name in ROOTED else -1, scheme=scheme,
            executor=executor, minbytes=sizes[0], maxbytes=sizes[1], stepfactor=sweep.stepfactor, compare=compare,
            memory=sweep.memory, graph=graph, iters=sweep.iters, warmup_iters=sweep.warmup_iters, flags=sweep.flags,
            env=dict(sorted(sweep.env.items())), bind=sweep.bind,
        )  # fmt: skip


def _wheres(sweep: Sweep, resources: Resources, at: str) -> Iterator[tuple[int, int, str]]:
    """(nodes, ranks, virtual nodes) of every run."""
    entries = sweep.nodes or tuple(dict.fromkeys((*_powers(resources.nodes), resources.nodes)))
    for i, entry in enumerate(entries):
        if isinstance(entry, str):
            sizes = node_sizes(entry)
            if not sizes:
                expected = 'expected a number of nodes, or virtual nodes by their ranks, such as "4+4"'
                raise FormatError(f"{at}nodes[{i}]: {quoted(entry)}; {expected}")
            yield len(sizes), sum(sizes), entry.replace(" ", "")
            continue
        if not 1 <= entry <= resources.nodes:
            there = f"there {'is' if resources.nodes == 1 else 'are'} {resources.nodes} here"
            remedy = "take it out, or ask for more nodes"
            if resources.local:
                remedy = 'nodes of one machine are written "4+4"'
            raise FormatError(f"{at}nodes[{i}]: {entry}, and {there}; {remedy}")
        for j, each in enumerate(sweep.ranks_per_node or (resources.slots,)):
            if each < 1:
                raise FormatError(f"{at}ranks_per_node[{j}]: {each}; expected at least 1")
            if not resources.local and each > resources.slots:
                raise FormatError(f"{at}ranks_per_node[{j}]: {each}, and a node has {resources.slots} slots; give "
                                  "fewer, or more slots in the hostfile or from the scheduler")  # fmt: skip
            yield entry, entry * each, ""


def node_sizes(text: str) -> tuple[int, ...]:
    """``4+2``: (4, 2); () for anything else."""
    sizes = [whole_number(word.strip()) for word in text.split("+")]
    fits = all(size and size <= MOST_RANKS for size in sizes)
    return tuple(size for size in sizes if size) if fits else ()


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


def _size(value: int | str, where: str) -> int:
    try:
        return parse_size(str(value))
    except BlinkError as error:
        raise FormatError(f"{where}: {error}") from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(message)


@cache
def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False)
    add_flags(parser)
    return parser


def _check(run: Run, at: str) -> None:
    """Let ``bench`` itself read the flags of a run.

    Raises:
        FormatError: with what it says.
    """
    try:
        parse_algo(run.algo)
        args = _parser().parse_args(run.words)
        options = read(args, run.ranks)
        if run.memory is not None:
            memory_for(args, options, gpu=run.memory == "gpu")
    except BlinkError as error:
        raise FormatError(f"{at.rstrip(': .')}: {run.label()}: bench refuses this: {error}") from error
