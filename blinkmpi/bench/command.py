"""``blinkmpi bench``: time collectives as nccl-tests does, check every result, compare with other libraries.

All ranks call :func:`run`; rank 0 prints each row as it is measured.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from itertools import count, groupby
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..lang.algorithms import Algorithm
from ..lang.source import algorithm_from_root, check_asked
from ..program.call import Call
from ..topology.importers import load, modify
from ..topology.model import Topology
from ..transport.cuda.device import cupy
from ..util.codec import plain
from ..util.together import allgather, bcast
from . import environment as meta
from .document import document, write_new
from .layout import Buffers, Layout
from .nccl_tests import TEST_NAMES, type_name
from .options import BenchOptions, memory_for, read
from .peers import MpiPeer, NcclPeer, Peer, SymmMemPeer
from .report import PLACES, Columns, Row, omb_header, omb_row
from .time_gpu import GpuTimer, no_room
from .time_host import measure
from .timing import Contender, TimingResult, call_facts, our_call

MEMORY_SHARE = 0.8


def run(args: argparse.Namespace, comm: Any, *, make_communicator: Callable[..., Any] | None = None) -> int:
    """Run the benchmark on all ranks of ``comm``; the exit status.

    Args:
        make_communicator: called in place of :class:`.Communicator`, with what the flags give of its arguments.

    Raises:
        BlinkError: on every rank, for bad flags or a collective that failed.
    """
    from mpi4py import MPI

    if make_communicator is None:
        from ..communicator import Communicator

        make_communicator = Communicator
    keywords: dict[str, Any] = {}
    if args.algorithm is not None:
        made = _algorithm(args, comm)
        keywords = {"algo": f"{made.collective}:{made.scheme}", "algorithms": [made]}
    options = read(args, comm.Get_size())
    topology = _topology(args, comm.Get_size())
    _check_output(args)
    bench = _Bench(args, options, comm, MPI, topology)
    asked = {"timeout": args.timeout, "algo": args.algo, "wire": args.wire}
    keywords |= {name: value for name, value in asked.items() if value is not None}
    cycles: Iterable[int] = range(args.run_cycles) if args.run_cycles else count()
    for cycle in cycles:
        for executor in options.executors:
            ours = make_communicator(comm, topology=topology, executor=executor, **keywords)
            bench.block(ours, first=cycle == 0 and executor == options.executors[0])
            ours.Free()
    bench.close()
    return bench.finish()


def _algorithm(args: argparse.Namespace, comm: Any) -> Algorithm:
    """The algorithm of ``--algorithm``, which rank 0 reads; the flags then ask for its collective and root.

    Raises:
        ArgumentError: on every rank, for one of another collective or root.
    """
    made = algorithm_from_root(comm, args.algorithm)
    check_asked(made, args.collective, args.root)
    args.collective, args.root = made.collective, max(made.root, 0)
    return made


def _topology(args: argparse.Namespace, n: int) -> Topology | None:
    if args.topology is None:
        if args.gpus is not None:
            raise ArgumentError("--gpus chooses devices of --topology; give both")
        return None
    topology = modify(load(args.topology), gpus=args.gpus)
    if topology.n != n:
        raise ArgumentError(
            f"{topology.name} has {topology.n} devices and {n} ranks run; start mpirun -np {topology.n}, "
            "or choose as many devices as ranks with --gpus"
        )
    return topology


def _check_output(args: argparse.Namespace) -> None:
    if args.output_file is not None:
        folder = Path(args.output_file).resolve().parent
        if not folder.is_dir():
            raise ArgumentError(f"--output_file {args.output_file}: folder {folder} does not exist; make it first")


class _Bench:
    """One run of the benchmark: the job's facts, and the rows so far."""

    def __init__(
        self, args: argparse.Namespace, options: BenchOptions, world: Any, mpi: Any, topology: Topology | None
    ) -> None:
        self.args, self.options, self.world, self.mpi = args, options, world, mpi
        self.rank, self.n = world.Get_rank(), world.Get_size()
        self.emulated = topology is not None
        self.started = datetime.now().astimezone()
        self.executor: str | None = None
        self.machine: dict[str, Any] = {}
        self.rows: list[tuple[Row, str]] = []
        self.rates: Any = None  # what steps cost, if that is known
        self.columns = Columns(options.peers, executor=args.executor is not None, predict=args.predict,
                               emulated=self.emulated, timestamps=bool(args.report_timestamps),
                               cpu_time=bool(args.report_cputime))  # fmt: skip
        self.name = TEST_NAMES[options.collective]
        self.memory = "host"
        self.buffers: Buffers | None = None
        self.gpu: GpuTimer | None = None
        self.peers: list[Peer] = []
        self.setup: dict[str, Any] = {"memory": self.memory}  # of the file
        self.refused: dict[str, str] = {}
        self.processes: list[meta.Process] = []

    @property
    def calls(self) -> list[Call]:
        """All rows of one block."""
        return [call for series in self.options.series for call in self.options.calls(self.n, series)]

    @property
    def registered(self) -> bool:
        """Whether peers reach the buffers, if they lie on GPUs."""
        return self.setup.get("local_register") == 2

    def say(self, text: str) -> None:
        """Print a line, on rank 0 and unless JSON alone is wanted."""
        if self.rank == 0 and not self.args.json:
            print(text, flush=True)

    def _begin(self, ours: Any) -> None:
        """Find out what the ranks have, and make what all blocks use: buffers and peers.

        Raises:
            ArgumentError: on every rank, for flags, sizes or peers that such ranks cannot take.
        """
        machine = ours.machine
        self.machine = {"name": machine.name, "fingerprint": machine.fingerprint, "ranks": machine.n}
        self.executor = getattr(ours, "executor", None)
        gpu: Any = getattr(ours, "gpu", None)
        self.memory = memory_for(self.args, self.options, gpu=gpu is not None)
        process = meta.Process(self.rank, os.getpid(), self.mpi.Get_processor_name(), meta.cpu_model() or "CPU")
        if self.memory == "gpu":
            process = process._replace(info=gpu.name, device=gpu.device, bus=gpu.bus_id.lower())
        self.processes = allgather(self.world, process, meta.Process)
        self._check_room()
        if self.memory == "host":
            self.buffers = Buffers(self.calls, unalign=self.args.unalign)
        self.setup = {"memory": self.memory}
        self.peers = [self._peer(name, gpu) for name in self.options.peers]
        self.setup["peers"] = {peer.name: peer.facts for peer in self.peers}
        if self.memory == "gpu":
            self.columns = replace(self.columns, protocol=True)
            register = 2 if self.args.local_register is None else self.args.local_register
            driver = {"driver": meta.nvidia_driver(), **gpu.versions}
            own_block = any(map(self._own_block, self.calls))
            self.setup |= {"local_register": register, "persistent": self.args.persistent, "own_block": own_block}
            self.setup["gpu"] = {"name": gpu.name, **driver}

    def _peer(self, name: str, gpu: Any) -> Peer:
        if name == "mpi":
            return MpiPeer(self.world, self.mpi)
        if name == "nccl":
            return NcclPeer(self.world, cupy())
        hosts = len({process.host for process in self.processes})
        return SymmMemPeer(self.world, self.mpi, cupy(), gpu.device, self.calls, hosts=hosts)

    def _check_room(self) -> None:
        """Raise ArgumentError on every rank if the buffers do not fit into some host's or GPU's free memory."""
        need = sum(Buffers.needs(self.calls))
        if self.memory == "gpu":
            own = need * (2 if "symm_mem" in self.options.peers else 1)
            for rank, why in enumerate(allgather(self.world, no_room(cupy(), own), str)):
                if why:
                    raise ArgumentError(f"rank {rank}: {why}")
            return
        rooms = allgather(self.world, meta.memory("MemAvailable"), int | None)
        hosts = [process.host for process in self.processes]
        for host, room in zip(hosts, rooms, strict=True):
            ranks = hosts.count(host)
            if room is not None and ranks * need > MEMORY_SHARE * room:
                raise ArgumentError(
                    f"host {host}: {ranks} ranks with {need >> 20} MiB of buffers each do not fit into its free "
                    f"{room >> 20} MiB; use a smaller --maxbytes"
                )

    def block(self, ours: Any, *, first: bool) -> None:
        """All rows on one communicator."""
        if first:
            self._begin(ours)
        if self.memory == "gpu":
            symmetric = self.setup["local_register"] == 2
            self.gpu = GpuTimer(cupy(), ours, self.calls, unalign=self.args.unalign, symmetric=symmetric)
            self.buffers = self.gpu.buffers
        if first or self.args.executor is not None:
            self.setup["wire"] = ours.plan(self.options.collective, max(self.calls[0].root, 0)).wire
            self._measure_steps(ours)
            self._header(ours, first=first)
        for call in self.calls:
            with nullcontext() if self.gpu is None else self.gpu.stream:
                row = self._row(ours, call)
            if self.rank == 0:
                self._print(row)
                self.rows.append((row, f"{self.name}_{type_name(call.dtype)}_{call.op or 'none'}"))
        if self.gpu is not None:  # symmetric memory goes with its communicator
            self.gpu = self.buffers = None

    def _measure_steps(self, ours: Any) -> None:
        """Time the steps of the calls that are to be predicted, on the buffers on which they are to be measured."""
        from ..runtime.inspection import measure_steps, rests_on

        if not self.args.predict:
            return
        if self.memory == "gpu":
            self.setup["predictions"] = rests_on(ours.context)
            return
        assert self.buffers is not None
        for memory in self.buffers.whole:  # pages that nothing was written to yet are all one
            memory.fill(0)
        start = time.perf_counter()
        self.rates = measure_steps(ours.context, self.calls, self.buffers.whole, ours.Barrier)
        self.setup["steps"] = None
        if self.rates is not None:
            self.setup["steps"] = {"seconds": time.perf_counter() - start, **plain(self.rates)}

    def close(self) -> None:
        """Close the peers."""
        for peer in self.peers:
            peer.close()

    def _row(self, ours: Any, call: Call) -> Row:
        from ..runtime.inspection import choice, predict

        facts = call_facts(call)
        able = [peer for peer in self.peers if not self._refuses(peer, call)]
        both = (self._place(ours, call, able, in_place=place == "in_place") for place in PLACES)
        mine, theirs = zip(*both, strict=True)
        measured = {peer.name: (theirs[0][i], theirs[1][i]) for i, peer in enumerate(able)}
        what = (ours.context, call.collective, call.nbytes)
        seconds: list[float | None] = [None, None]
        bounds: list[float | None] = [None, None]
        for place in range(len(PLACES)) if self.args.predict else ():
            seconds[place], bounds[place] = predict(
                *what, **facts, in_place=bool(place) and not self._own_block(call), rates=self.rates,
                registered=self.registered, graph=bool(self.args.cudagraph),
            )  # fmt: skip
        peers = {name: measured.get(name) for name in self.options.peers}
        return Row(
            call, mine, peers, choice(*what, **facts, registered=self.registered), (seconds[0], seconds[1]),
            (bounds[0], bounds[1]), self.emulated,
        )  # fmt: skip

    def _own_block(self, call: Call) -> bool:
        """Whether a result in place stays in this rank's block, and is not moved to the front as MPI has it."""
        return self.memory == "gpu" and call.collective == "reduce_scatter"

    def _place(
        self, ours: Any, call: Call, peers: list[Peer], *, in_place: bool
    ) -> tuple[TimingResult, list[TimingResult]]:
        """Ours and the peers', in or out of place."""
        assert self.buffers is not None
        layout = Layout(
            call, self.rank, self.buffers, in_place=in_place, marker=self.mpi.IN_PLACE,
            narrow=self.setup["wire"] == "operand", own_block=self._own_block(call),
        )  # fmt: skip
        if self.gpu is None:
            contenders = [Contender(layout, our_call(ours, layout))]
        else:
            contenders = [self.gpu.contender(layout, persistent=self.args.persistent)]
        contenders += [peer.contender(call, self.buffers, in_place=in_place) for peer in peers]
        run = measure if self.gpu is None else self.gpu.measure
        mine, *theirs = run(self.world, self.mpi, contenders, self.options.timing)
        return mine, theirs

    def _refuses(self, peer: Peer, call: Call) -> bool:
        why = peer.refusal(call)
        if why is not None and peer.name not in self.refused:
            self.refused[peer.name] = why
            self.say(f"# {peer.name}: N/A where {why}")
        return why is not None

    def _print(self, row: Row) -> None:
        self.say(omb_row(row, self.options.peers) if self.args.format == "osu" else self.columns.row(row))
        for place, mine in enumerate(row.ours):
            both = {"blinkmpi": mine, **{p: m[place] for p, m in row.peers.items() if m is not None}}
            for library, measured in both.items():
                what = f"#   {library} {PLACES[place].replace('_', '-')}"
                if self.args.per_iter_timing:
                    self.say(f"{what} (us): " + " ".join(f"{t:.2f}" for t in measured.slowest_us))
                if measured.wrong:
                    self.say(f"{what}: {measured.wrong} wrong elements, the first of each rank:")
                for element in measured.wrong_elements:
                    self.say(f"#     {element}")

    def _header(self, ours: Any, *, first: bool) -> None:
        """The machine, the schemes and the libraries; then the names of the columns."""
        args, sizes = self.args, self.options.sizes
        if args.format == "nccl" and first:
            step = (args.stepfactor, "factor") if args.stepfactor > 1 else (args.stepbytes, "bytes")
            self.say(f"# blinkmpi version {meta.versions('', None)['blinkmpi'] or 'unknown: not installed'}")
            self.say(f"# Collective test starting: {self.name}_perf")
            self.say(
                f"# nThread 1 nGpus 1 minBytes {sizes[0]} maxBytes {sizes[-1]} step: {step[0]}({step[1]}) warmup "
                f"iters: {args.warmup_iters} iters: {args.iters or 'by size'} "
                f"agg iters: {args.agg_iters} validation: {args.check} graph: {args.cudagraph}"
            )
            self.say("#\n# Using devices")
            for device in meta.devices(self.processes):
                self.say(
                    f"#  Rank {device['rank']:2d} Group {device['group']:2d} Pid {device['pid']:6d} on "
                    f"{device['hostname']:>10} device {device['device']:2d} [{device['device_hex']}] "
                    f"{device['device_info']}"
                )
        for line in omb_header(self.options.collective, self.options.peers) if args.format == "osu" else ():
            self.say(line)
        mark = " (emulated)" if self.emulated else ""
        self.say(f"# {self.machine['name']}{mark}, {self.n} ranks; {self._schemes(ours)}; {meta.mpi_library(self.mpi)}")
        if "predictions" in self.setup:
            self.say(f"# predictions are by {self.setup['predictions']}")
        for peer in self.peers:
            if peer.facts:
                self.say(f"# {peer.name}: " + ", ".join(f"{key} {value}" for key, value in peer.facts.items()))
        for line in self.columns.header() if args.format == "nccl" else ():
            self.say(line)

    def _schemes(self, ours: Any) -> str:
        """``direct from 65536 B, mpi from ...``: the plan in words."""
        from ..runtime.inspection import choice

        found: list[tuple[str, int]] = []
        for call in self.options.calls(self.n, self.options.series[0]):
            how = choice(ours.context, call.collective, call.nbytes, **call_facts(call))
            executor = f" ({how['executor']} executor)" if how.get("executor") in ("c", "numpy") else ""
            found.append((f"{how.get('scheme')}{executor}", call.nbytes))
        runs = groupby(found, key=lambda pair: pair[0])
        return ", ".join(f"{words} from {next(run)[1]} B" for words, run in runs)

    def finish(self) -> int:
        """Print the sums, write the file; the exit status, the same on every rank."""
        peaks = allgather(self.world, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, int)
        status = 0
        if self.rank == 0:
            wrong = sum(m.wrong or 0 for row, _ in self.rows for m in row.ours)
            busses = [row.bandwidth(place)[1] for row, _ in self.rows for place in range(len(PLACES))]
            average = sum(busses) / len(busses)
            least = self.options.minimum_bandwidth
            fast = None if least is None else average >= 0.9 * least
            if self.args.format == "nccl":
                self.say(f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}")
                verdict = "" if fast is None else "OK" if fast else "FAILED"
                self.say(f"# {'Avg bus bandwidth':<20} : {average:g} {verdict}")
                if self.args.memory_report:
                    buffers = sum(Buffers.needs(self.calls)) / 2**20
                    self.say(f"# {'Memory usage':<20} : Buffers {buffers:.1f} MB | Peak {max(peaks) / 2**20:.1f} MB")
                self.say(f"#\n# Collective test concluded: {self.name}_perf")
            if self.args.json or self.args.output_file is not None:
                body = document(
                    self.args, self.options, self.rows, devices=meta.devices(self.processes), started=self.started,
                    machine={**self.machine, "emulated": self.emulated}, verdict=(wrong, average, fast),
                    versions=meta.versions(meta.mpi_library(self.mpi), self.executor, gpu=self.memory == "gpu"),
                    setup={**self.setup, "refused": self.refused}, peak_resident_bytes=max(peaks),
                )  # fmt: skip
                text = json.dumps(body, indent=1)
                if self.args.json:
                    print(text, flush=True)
                if self.args.output_file is not None:
                    self.say(f"# JSON written to {write_new(self.args.output_file, text)}")
            status = int(wrong > 0 or fast is False)
        return bcast(self.world, status, int)
