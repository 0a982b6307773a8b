"""A machine that runs execution plans on numbers, for tests alone: two threads a block, in an order by chance.

It knows nothing of the checker's orders: each thread does its elements of an operation by itself, and a ``nop`` is
where the threads of a block meet. Proxies of port channels are not there.
"""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]
THREADS, ELEMENTS = 2, 3  # of a block, of a chunk


class Stuck(Exception):
    """No thread can go on."""


def run(plan: Json, rng: random.Random) -> list[dict[tuple[str, int], Counter[tuple[int, int]]]]:
    """Run a plan of memory channels once; what is folded in each element of each GPU's buffers.

    Raises:
        Stuck: if it never ends.
    """
    return _Machine(plan, rng).run()


class _Machine:
    def __init__(self, plan: Json, rng: random.Random) -> None:
        self.plan, self.rng, self.n = plan, rng, len(plan["gpus"])
        self.memory: list[dict[tuple[str, int], Counter[tuple[int, int]]]] = [{} for _ in range(self.n)]
        self.alias = {"o": "i"} if plan["inplace"] and plan["collective"] == "allreduce" else {}
        self.counts: Counter[tuple[Any, ...]] = Counter()
        self.meets: Counter[tuple[Any, ...]] = Counter()
        for g, gpu in enumerate(plan["gpus"]):
            for e in range(gpu["input_chunks"] * ELEMENTS):
                self.memory[g]["i", e] = Counter({(g, e): 1})
            for s, semaphore in enumerate(gpu["semaphores"]):
                self.counts["sem", g, s] = semaphore["init_value"]

    def run(self) -> list[dict[tuple[str, int], Counter[tuple[int, int]]]]:
        threads = [
            self._thread(g, b, t) for g, gpu in enumerate(self.plan["gpus"])
            for b in range(len(gpu["threadblocks"])) for t in range(THREADS)
        ]  # fmt: skip
        waits: dict[int, Any] = dict.fromkeys(range(len(threads)))  # what each waits for
        while waits:
            ready = [i for i, wait in waits.items() if wait is None or wait()]
            if not ready:
                raise Stuck
            i = self.rng.choice(ready)
            for _ in range(self.rng.choice((1, 1, 5, 50))):
                if waits[i] is not None and not waits[i]():
                    break
                try:
                    waits[i] = next(threads[i])
                except StopIteration:
                    del waits[i]
                    break
        return self.memory

    def _thread(self, g: int, b: int, t: int) -> Iterator[Any]:
        block = self.plan["gpus"][g]["threadblocks"][b]
        taken: Counter[Any] = Counter()
        for number, op in enumerate(block["ops"]):
            name = op["name"]
            if name in ("nop", "barrier"):
                key, many = (g, b, "nop", number), THREADS
                if name == "barrier":
                    key, many = (g, op["barrier_id"], "barrier", taken["barrier", op["barrier_id"]]), 0
                    taken["barrier", op["barrier_id"]] += 1
                    many = op["num_threadblocks"] * THREADS
                self.meets[key] += 1
                yield lambda key=key, many=many: self.meets[key] >= many
            elif name in ("signal", "wait", "rlxsignal", "rlxwait", "sem_acquire", "sem_release"):
                yield from self._sync(g, b, t, op, taken)
            else:
                yield from self._move(g, block, t, op)

    def _sync(self, g: int, b: int, t: int, op: Json, taken: Counter[Any]) -> Iterator[Any]:
        ids = op["semaphore_ids"] if op["name"].startswith("sem") else op["channel_ids"]
        for i, number in enumerate(ids):
            if i % THREADS != t:
                continue
            if op["name"].startswith("sem"):
                key: tuple[Any, ...] = ("sem", g, number)
            else:
                peers = self.plan["gpus"][g]["channels"][0]["connected_to"]
                own = self.plan["gpus"][g]["threadblocks"][b]["channels"][0]["channel_ids"][number]
                peer, k = peers[own], peers[:own].count(peers[own])
                key = (g, peer, k) if op["name"].endswith("signal") else (peer, g, k)
            if op["name"].endswith(("signal", "release")):
                self.counts[key] += 1
                yield None
            else:
                taken[key] += 1
                yield lambda key=key, want=taken[key]: self.counts[key] >= want

    def _places(self, g: int, block: Json, buffer: Json, packets: bool, lane: int) -> tuple[int, tuple[str, int]]:
        gpu, kind = g, buffer.get("type", "")
        if "buffer_id" in buffer:
            found = self.plan["gpus"][g]["remote_buffers"][block["remote_buffer_refs"][0]["remote_buffer_ids"]
                                                           [buffer["buffer_id"]]]  # fmt: skip
            gpu, kind = found["rank"], found["type"]
        kind = "p" if packets else self.alias.get(kind, kind)
        return gpu, (kind, buffer["index"] * ELEMENTS + lane)

    def _move(self, g: int, block: Json, t: int, op: Json) -> Iterator[Any]:
        name, src, dst = op["name"], op["src_buff"], op["dst_buff"]
        packets = name.endswith("pkt")
        pairs = [([a], [b]) for a, b in zip(src, dst, strict=True)] if name in ("put", "ppkt", "get") else [(src, dst)]
        for sources, targets in pairs:
            for lane in range(t, sources[0]["size"] * ELEMENTS, THREADS):
                total: Counter[tuple[int, int]] = Counter()
                for i, source in enumerate(sources):
                    flagged = packets and (i > 0 or name == "upkt")
                    gpu, key = self._places(g, block, source, flagged, lane)
                    if flagged:
                        yield lambda gpu=gpu, key=key: key in self.memory[gpu]
                    total = total + self.memory[gpu].get(key, Counter({(-1, -1): 1}))
                    yield None
                for i, target in enumerate(targets):
                    gpu, key = self._places(g, block, target, packets and (i > 0 or name == "ppkt"), lane)
                    self.memory[gpu][key] = total
                    yield None
