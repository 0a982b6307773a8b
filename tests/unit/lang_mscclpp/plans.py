"""Execution plans that the tests build themselves, in the JSON that MSCCL++'s executor reads."""

import json
from typing import Any

from blinkmpi.lang.mscclpp.file import MscclppPlan, read_mscclpp

Json = dict[str, Any]
NOP: Json = {"name": "nop"}


def local(buffer: str, index: int, size: int = 1) -> Json:
    return {"type": buffer, "index": index, "size": size}


def far(number: int, index: int, size: int = 1) -> Json:
    return {"buffer_id": number, "index": index, "size": size}


def op(name: str, src: list[Json], dst: list[Json], kind: str = "memory", **more: Any) -> Json:
    return {"name": name, "src_buff": src, "dst_buff": dst, "channel_type": kind, **more}


def sync(name: str, channels: list[int], kind: str = "memory") -> Json:
    return {"name": name, "channel_ids": channels, "channel_type": kind}


def plan_of(
    collective: str, blocks: list[list[list[Json]]], sizes: tuple[int, int, int], *, buffer: str = "i",
    kind: str = "memory", inplace: bool = True, protocol: str = "Simple", **more: Any,
) -> Json:  # fmt: skip
    """A plan of some thread blocks for each GPU, with one channel and one buffer of every peer for each thread block.

    Channel and buffer ``k`` of a thread block lead to the k-th other GPU.

    Args:
        sizes: chunks of input, output and scratch. buffer: of the peers, that can be reached.
    """
    n = len(blocks)
    gpus = []
    for g, own in enumerate(blocks):
        peers = [r for r in range(n) if r != g]
        tbs = [
            {"id": b, "ops": ops,
             "channels": [{"channel_type": kind, "channel_ids": [b * len(peers) + k for k in range(len(peers))]}],
             "remote_buffer_refs": [{"access_channel_type": kind, "remote_buffer_ids": list(range(len(peers)))}]}
            for b, ops in enumerate(own)
        ]  # fmt: skip
        gpus.append({
            "id": g, "input_chunks": sizes[0], "output_chunks": sizes[1], "scratch_chunks": sizes[2],
            "threadblocks": tbs, "channels": [{"channel_type": kind, "connected_to": peers * len(own)}],
            "remote_buffers": [{"rank": r, "type": buffer, "access_channel_types": [kind]} for r in peers],
            "semaphores": [],
        })  # fmt: skip
    head = {"name": "made", "collective": collective, "protocol": protocol, "inplace": inplace, "gpus": gpus}
    return head | {"num_threads_per_block": 1024, "buffer_alignment": 16} | more


def made(plan: Json) -> MscclppPlan:
    return read_mscclpp(json.dumps(plan), source="made.json")


def all_pairs(n: int, blocks: int = 1) -> Json:
    """An allreduce in place: each GPU folds its part of all inputs, and stores it everywhere."""

    def ops(g: int, b: int) -> list[Json]:
        every, at = list(range(n - 1)), g * blocks + b
        ends = [local("i", at), *(far(k, at) for k in every)]
        return [
            sync("rlxsignal", every), sync("rlxwait", every), NOP, op("rres", ends, ends, reduce_op="sum"), NOP,
            sync("signal", every), sync("wait", every),
        ]  # fmt: skip

    return plan_of("allreduce", [[ops(g, b) for b in range(blocks)] for g in range(n)], (n * blocks, n * blocks, 0))


def by_packets(n: int) -> Json:
    """An allreduce in place: parts go to their owners' scratch, as packets, and results to everybody's."""

    def ops(g: int) -> list[Json]:
        peers = [r for r in range(n) if r != g]
        sends = op("ppkt", [local("i", r) for r in peers], [far(k, g) for k in range(n - 1)])
        fold = op("respkt", [local("i", g), *(local("s", r) for r in peers)],
                  [local("i", g), *(far(k, n + g) for k in range(n - 1))], reduce_op="sum")  # fmt: skip
        return [sends, fold, *(op("upkt", [local("s", n + r)], [local("i", r)], "none") for r in peers)]

    return plan_of("allreduce", [[ops(g)] for g in range(n)], (n, n, 2 * n), buffer="s", protocol="LL")


def by_ports(n: int) -> Json:
    """An allgather in place, by proxies."""

    def ops(g: int) -> list[Json]:
        every = list(range(n - 1))
        put = op("pws", [local("o", g)] * (n - 1), [far(k, g) for k in every], "port", channel_ids=every)
        begin = [sync("signal", every, "port"), sync("wait", every, "port"), NOP]
        return [*begin, put, NOP, sync("flush", every, "port"), sync("wait", every, "port")]

    return plan_of("allgather", [[ops(g)] for g in range(n)], (1, n, 0), buffer="o", kind="port")


def in_turns() -> Json:
    """Two GPUs exchange through scratch; a second thread block unpacks, when a barrier or a semaphore says so."""

    def ops(g: int) -> list[list[Json]]:
        first = [
            sync("signal", [0]), sync("wait", [0]), NOP, op("put", [local("i", 1 - g)], [far(0, 0)]), NOP,
            sync("signal", [0]), sync("wait", [0]), NOP, {"name": "sem_release", "semaphore_ids": [0]},
            op("copy", [local("i", g)], [local("o", g)], "none"),
            {"name": "barrier", "barrier_id": 0, "num_threadblocks": 2},
        ]  # fmt: skip
        second = [
            {"name": "sem_acquire", "semaphore_ids": [0]}, NOP,
            op("copy", [local("s", 0)], [local("o", 1 - g)], "none"),
            {"name": "barrier", "barrier_id": 0, "num_threadblocks": 2},
        ]  # fmt: skip
        return [first, second]

    plan = plan_of("alltoall", [ops(g) for g in range(2)], (2, 2, 1), buffer="s", inplace=False)
    for gpu in plan["gpus"]:
        gpu["semaphores"] = [{"init_value": 0}]
    return plan
