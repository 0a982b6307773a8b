"""Every protocol on GPUs under stress: random calls in graphs and streams, late ranks, every element compared.

``mpirun -np 4 python -m tests.campaign.torture --seconds 120 --delays`` draws calls from a seed that it prints:
collectives, types, sizes and protocols mixed on one transport, some out of place, some in place. Before each call a
kernel writes this rank's input and poisons what is received; after it another compares every element. Nothing waits for
the host, so calls follow one another as closely as the GPU lets them. Ranks are late at random, between calls and, with
``--delays``, inside the kernels: at the loads and stores of packets and of flags.

The inputs are small whole numbers that differ from call to call, and sums of them are right to the last bit in every
type, so data of an earlier call shows. Wrong elements are kept with call, index, what was expected and found.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import blinkmpi
from blinkmpi.bench.environment import commit, mpi_library, versions
from blinkmpi.errors import DeviceError
from blinkmpi.measure.tune import candidates
from blinkmpi.planning.plan import Rule
from blinkmpi.program.call import Call
from blinkmpi.transport.announcement import Called
from blinkmpi.transport.cuda import codegen
from blinkmpi.transport.cuda.device import Gpu, cupy, device_count
from blinkmpi.transport.cuda.packets import PROTOCOLS, fits
from blinkmpi.transport.cuda.transport import CudaTransport
from tests.unit.trees.packings import even_call

COLLECTIVES = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "gather", "scatter")
TYPES = ("bfloat16", "float32")
COUNTS = (1, 63, 512, 2048, 8192, 32_768, 131_072, 500_009, 2_097_152)
CALLS_IN_BATCH = 24
RECORDS = 256
TIMEOUT_S = 20.0

CODE = r"""
typedef unsigned int u32; typedef unsigned long long u64; typedef long long i64;
struct Record { i64 serial, call, index; u32 want, got; };
struct State { i64 serial; u64 wrong, kept; };

__device__ u32 mixed(u32 x) { x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; return x ^ x >> 16; }
__device__ u32 input(u32 rank, i64 i, i64 serial) {
  return mixed((u32)i * 31u + rank * 7919u + (u32)serial * 104729u) % 23;
}
__device__ u32 bits_of(u32 whole, int kind) {  // kind: 0 float32, 1 bfloat16, 2 float16
  float f = (float)whole;
  if (kind == 0) return __float_as_uint(f);
  if (kind == 1) return __float_as_uint(f) >> 16;
  unsigned short h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
__device__ void put(void* p, i64 i, u32 bits, int kind) {
  if (kind) ((unsigned short*)p)[i] = (unsigned short)bits; else ((u32*)p)[i] = bits;
}
__device__ u32 get(const void* p, i64 i, int kind) { return kind ? ((const unsigned short*)p)[i] : ((const u32*)p)[i]; }

// This rank's input and a poisoned result; first the rank is late, sometimes.
extern "C" __global__ void prepare(void* send, i64 sends, void* recv, i64 recvs, int rank, int kind, State* s,
                                   u32 salt) {
  const i64 serial = s->serial;
  const u32 dice = mixed(salt + (u32)serial * 2654435761u);
  if ((dice & 7) == 0 && threadIdx.x == 0) {
    u64 began, now, ns = (dice & 0x70) ? (dice >> 8) % 4000 : (dice >> 8) % 60000;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - began < ns);
  }
  __syncthreads();
  const i64 step = (i64)gridDim.x * blockDim.x;
  const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (recv != send) for (i64 i = at; i < recvs; i += step) put(recv, i, 0xffffffffu, kind);
  for (i64 i = at; i < sends; i += step) put(send, i, bits_of(input(rank, i, serial), kind), kind);
}

// `sources`: the ranks whose inputs are added; `block`: elements of a block if each source has one of its own in the
// result; `offset`: where our part begins in their inputs.
extern "C" __global__ void compare(const void* recv, i64 count, u32 sources, i64 block, i64 offset, int kind, i64 call,
                                   State* s, Record* records) {
  const i64 serial = s->serial, step = (i64)gridDim.x * blockDim.x;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    u32 whole = 0;
    if (block) whole = input((u32)(i / block), i % block, serial);
    else for (u32 r = 0; r < 32; r++) if (sources >> r & 1) whole += input(r, offset + i, serial);
    const u32 want = bits_of(whole, kind), got = get(recv, i, kind);
    if (want != got) {
      atomicAdd(&s->wrong, 1ull);
      const u64 k = atomicAdd(&s->kept, 1ull);
      if (k < RECORDS) records[k] = {serial, call, i, want, got};
    }
  }
}
extern "C" __global__ void next(State* s) { s->serial++; }
"""

DELAY = r"""
__device__ __noinline__ void delay(u32 salt) {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  u32 x = (u32)t * 2654435761u ^ (blockIdx.x * 977u + threadIdx.x * 131u) ^ salt;
  x ^= x >> 15; x *= 0x2c1b3c6du; x ^= x >> 12;
  if ((x & 63) == 0) __nanosleep(x >> 8 & 4095);
}
"""
# Where a thread is late: (a line of the kernels, the same with a delay). A line of 128 bytes is stored by eight threads
# at once, so they are late before they meet, never between.
DELAYS = (
    ("// ---- element types", DELAY + "\n// ---- element types"),
    ("    const bool data = carries(position);\n", "    const bool data = carries(position);\n    delay(1);\n"),
    ("    int missing = -1;\n    __syncwarp();\n", "    int missing = -1;\n    delay(2);\n    __syncwarp();\n"),
    ("Pack (&x)[N]) {\n    __syncwarp();\n", "Pack (&x)[N]) {\n    delay(3);\n    __syncwarp();\n"),
    ("    if (wanted) store_packet(p, x.w[0], flag, x.w[1], flag), store_packet(p",
     "    delay(4);\n    if (wanted) store_packet(p, x.w[0], flag, x.w[1], flag), delay(5), store_packet(p"),
    ("    Pack more[N];\n", "    Pack more[N];\n    delay(6);\n"),
    ("  const u64 seq = shared_seq;\n", "  const u64 seq = shared_seq;\n  delay(7);\n"),
    ("    if (atomicAdd(&own->announced_ctas", "    delay(8);\n    if (atomicAdd(&own->announced_ctas"),
    ("    sync_named(MOVED);\n    if (j >=", "    sync_named(MOVED);\n    delay(9);\n    if (j >="),
)  # fmt: skip


def delayed(source: str) -> str:
    """Kernels whose threads are late at random."""
    for line, late in DELAYS:
        source = source.replace(line, late)
    return source


class Drawn:
    """A call with its buffers, how it is prepared, put on a stream, and compared."""

    def __init__(self, number: int, call: Call, name: str, start: Callable[[], None], ends: tuple[Any, Any]) -> None:
        self.number, self.call, self.name, self.start = number, call, name, start
        self.send, self.recv = ends


class Torture:
    """Random calls on one transport, compared on the device."""

    def __init__(self, comm: MPI.Intracomm, transport: CudaTransport, buffers: dict[bool, list[Any]]) -> None:
        self.cp, self.comm, self.transport, self.buffers = cupy(), comm, transport, buffers
        self.stream = self.cp.cuda.Stream(non_blocking=True)
        module = self.cp.RawModule(code=CODE.replace("RECORDS", str(RECORDS)))
        self.kernels = {name: module.get_function(name) for name in ("prepare", "compare", "next")}
        with self.stream:
            self.state = self.cp.zeros(3, "int64")
            self.records = self.cp.zeros(4 * RECORDS, "int64")
        self.stream.synchronize()
        self.drawn: list[Drawn] = []
        self.made: Counter[str] = Counter()

    def add(self, call: Call, name: str, start: Callable[[], None], ends: tuple[Any, Any]) -> None:
        """A call that may be drawn."""
        self.drawn.append(Drawn(len(self.drawn), call, name, start, ends))

    def put(self, one: Drawn, salt: int) -> None:
        """Prepare, call, compare and count, on the stream."""
        call, rank = one.call, self.comm.rank
        kind = ("float32", "bfloat16", "float16").index(call.dtype)
        sends = call.send_count if call.sends(rank) else 0
        recvs = call.recv_count(rank) if call.receives(rank) else 0
        moves = max(1, min(264, max(sends, recvs) // 1024))
        wide = np.int64
        with self.stream:
            self.kernels["prepare"]((moves,), (256,), (
                one.send, wide(sends), one.recv, wide(recvs), np.int32(rank), np.int32(kind), self.state,
                np.uint32(salt * 64 + rank)))  # fmt: skip
            one.start()
            if recvs:
                sources, block, offset = self.expected(call)
                self.kernels["compare"]((moves,), (256,), (
                    one.recv, wide(recvs), np.uint32(sources), wide(block), wide(offset), np.int32(kind),
                    wide(one.number), self.state, self.records))  # fmt: skip
            self.kernels["next"]((1,), (1,), (self.state,))

    def expected(self, call: Call) -> tuple[int, int, int]:
        """(ranks whose inputs are added, elements of a block of a rank's own, where ours begins in the inputs)."""
        everyone, count = (1 << call.n) - 1, call.counts[0]
        match call.collective:
            case "allgather" | "gather":
                return 0, count, 0
            case "broadcast":
                return 1 << call.root, 0, 0
            case "scatter":
                return 1 << call.root, 0, self.comm.rank * count
            case "reduce_scatter":
                return everyone, 0, self.comm.rank * count
        return everyone, 0, 0

    def run(self, seconds: float, seed: int, replays: int) -> dict[str, Any]:
        """Draw batches until the time is over; what was done, and what was wrong."""
        alike, began, calls, batches = random.Random(seed), time.monotonic(), 0, 0
        while self.comm.bcast(time.monotonic() - began < seconds):
            chosen = [alike.choice(self.drawn) for _ in range(CALLS_IN_BATCH)]
            salt = alike.randrange(1 << 24)
            if alike.random() < 0.75:
                self.stream.begin_capture()
                for one in chosen:
                    self.put(one, salt)
                graph = self.stream.end_capture()
                times = alike.choice((1, replays, 4 * replays))
                for _ in range(times):
                    graph.launch(self.stream)
            else:
                times = 1
                for one in chosen:
                    self.put(one, salt)
            self.stream.synchronize()
            assert not self.transport.aborted, self.transport.error(f"batch {batches} of seed {seed}")
            for one in chosen:
                self.made[one.name] += times
            calls, batches = calls + times * len(chosen), batches + 1
        wrong = int(self.state.get()[1])
        return {
            "calls": calls, "batches": batches, "seconds": time.monotonic() - began, "seed": seed,
            "kinds": dict(sorted(self.made.items())), "wrong": self.comm.allgather(wrong),
            "first_wrong": [one for found in self.comm.allgather(self.found()) for one in found],
        }  # fmt: skip

    def gpu_name(self) -> str:
        """What the driver calls this rank's GPU."""
        return str(self.cp.cuda.runtime.getDeviceProperties(self.cp.cuda.Device().id)["name"].decode())

    def found(self) -> list[dict[str, Any]]:
        """The wrong elements that were kept."""
        raw = self.records.get()[: 4 * min(RECORDS, int(self.state.get()[2]))].reshape(-1, 4)
        return [
            {"rank": self.comm.rank, "serial": int(serial), "call": self.drawn[call].name, "element": int(index),
             "expected": f"0x{both & 0xFFFFFFFF:x}", "found": f"0x{both >> 32 & 0xFFFFFFFF:x}"}
            for serial, call, index, both in raw.tolist()
        ]  # fmt: skip


def calls_of(n: int, counts: tuple[int, ...]) -> Iterator[Call]:
    """Every collective with every type and count, of roots that vary."""
    for i, collective in enumerate(COLLECTIVES):
        for j, dtype in enumerate(TYPES):
            for k, count in enumerate(counts):
                op = "sum" if "reduce" in collective else ""
                yield even_call(collective, n, count, dtype=dtype, op=op, root=(i + j + k) % n)


@contextmanager
def late_threads() -> Iterator[None]:
    """Kernels that are made meanwhile have threads that are late at random."""
    plain = codegen.kernel_source
    codegen.kernel_source = lambda name: delayed(plain(name))
    try:
        yield
    finally:
        codegen.kernel_source = plain


def several_gpus(
    comm: MPI.Intracomm, counts: tuple[int, ...] = COUNTS, protocols: str = ""
) -> tuple[Torture, blinkmpi.Communicator]:
    """Calls by every protocol on a Communicator's transport, one rank per GPU."""
    ours = blinkmpi.Communicator(comm, timeout=TIMEOUT_S)
    gpus = ours.context.cuda()
    most = max(counts) * 4 * comm.size
    buffers = {True: [ours.empty(most, "uint8") for _ in range(2)],
               False: [cupy().empty(most, "uint8") for _ in range(2)]}  # fmt: skip
    torture = Torture(comm, gpus.transport, buffers)
    for call in calls_of(comm.size, counts):
        if call.nbytes > 16 << 20:
            continue
        ours.plan(call.collective, max(call.root, 0))
        for registered in (False, True):
            rules: dict[tuple[str, str], Rule] = {}
            for rule in candidates(gpus, call, registered=registered):
                if rule.scheme != "hybrid" and (not protocols or rule.protocol in protocols.split(",")):
                    rules.setdefault((rule.scheme, rule.protocol), rule)
            for (scheme, protocol), rule in rules.items():
                if registered != (protocol in ("direct", "rs_ag")) or rule.scheme not in ("onehop", "chain"):
                    continue
                send, recv = torture.buffers[registered]
                for in_place in (False, True) if call.collective == "allreduce" else (False,):
                    target = send if in_place else recv
                    with suppress(DeviceError):  # no room for its slots, on every rank
                        name = f"{call.collective} {call.dtype} {call.counts[0]} {scheme}/{protocol}"
                        start = gpus.trial(call, rule, send, target, torture.stream.ptr)
                        torture.add(call, name + " in place" * in_place, start, (send, target))
    return torture, ours


def shared_gpus(comm: MPI.Intracomm, counts: tuple[int, ...] = COUNTS, protocols: str = "") -> Torture:
    """Calls by packets among ranks that share GPUs, which take turns on it."""
    transport = CudaTransport(comm, Gpu(comm.rank % device_count()))
    most = max(counts) * 4 * comm.size
    torture = Torture(comm, transport, {False: [cupy().empty(most, "uint8") for _ in range(2)]})
    send, recv = torture.buffers[False]
    for call in calls_of(comm.size, counts):
        for protocol in PROTOCOLS:
            if fits(call, protocol) and (not protocols or protocol in protocols.split(",")):
                name = f"{call.collective} {call.dtype} {call.counts[0]} onehop/{protocol}"
                loaded = transport.load(call, protocol, Called(name))
                transport.fill(loaded, send.data.ptr, recv.data.ptr, 0, 0, 4 * TIMEOUT_S)
                start = transport.starter(loaded, torture.stream.ptr, torture.stream, call.nbytes)
                torture.add(call, name, start, (send, recv))
    return torture


def main() -> int:
    """Run; the exit status is 1 if an element was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--delays", action="store_true", help="threads are late inside the kernels, too")
    parser.add_argument("--protocols", default="", help="only these, separated by commas")
    parser.add_argument("--counts", default="", help="only these numbers of elements")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("-o", metavar="FILE", help="write what was done as JSON")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    seed = comm.bcast(args.seed)
    counts = tuple(map(int, args.counts.split(","))) if args.counts else COUNTS
    began, ours = time.monotonic(), None
    with late_threads() if args.delays else nullcontext():
        if comm.size <= device_count():
            torture, ours = several_gpus(comm, counts, args.protocols)
        else:
            torture = shared_gpus(comm, counts, args.protocols)
    if comm.rank == 0:
        print(
            f"seed {seed}: {len(torture.drawn)} kinds of calls, loaded in {time.monotonic() - began:.1f} s", flush=True
        )
    done = torture.run(args.seconds, seed, args.replays)
    done |= {"ranks": comm.size, "gpus": device_count(), "gpu": torture.gpu_name(), "delays": args.delays, **commit(),
             "date": datetime.now(UTC).isoformat(timespec="seconds"),
             "versions": versions(mpi_library(MPI), None, gpu=True)}  # fmt: skip
    if comm.rank == 0:
        if args.o:
            Path(args.o).write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
        print(f"{done['calls']} calls in {done['seconds']:.1f} s, wrong elements by rank: {done['wrong']}")
        for one in done["first_wrong"][:24]:
            print(one)
    torture.stream.synchronize()
    if ours is not None:
        ours.Free()
    else:
        torture.transport.close(comm)
    return int(any(done["wrong"]))


if __name__ == "__main__":
    raise SystemExit(main())
