"""A rank of a program that opens NCCL by name, and has a binder in Python: python_client.py DOOR ID RANKS RANK."""

import ctypes
import os
import sys
import time

POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t
GPU = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))
OPEN = ctypes.CFUNCTYPE(POINTER, POINTER, POINTER, SIZE)
BIND = ctypes.CFUNCTYPE(POINTER, POINTER, POINTER, POINTER, SIZE)
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER)
WRONG = ctypes.CFUNCTYPE(ctypes.c_int, POINTER)
END = ctypes.CFUNCTYPE(None, POINTER)


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


class Binder(ctypes.Structure):
    """``door_binder_t`` of binder.h."""

    _fields_ = (
        ("gpu", GPU), ("open", OPEN), ("bind", BIND), ("launch", LAUNCH), ("abort", END), ("wrong", WRONG),
        ("close", END),
    )  # fmt: skip


class Call(ctypes.Structure):
    """``door_call_t`` of binder.h."""

    _fields_ = (
        ("send", POINTER),
        ("recv", POINTER),
        *((n, ctypes.c_uint64) for n in ("count", "number")),
        ("stream", POINTER),
    )


report, closed = ctypes.c_int64(), list[int]()
bound: list[int] = []
launched: list[tuple[int, int]] = []


@GPU
def gpu(words):  # type: ignore[no-untyped-def]
    words[0], words[1] = os.getpid(), 0
    return 0


@OPEN
def opened(group, reason, nbytes):  # type: ignore[no-untyped-def]
    return ctypes.addressof(report)


@BIND
def bind(context, kind, reason, nbytes):  # type: ignore[no-untyped-def]
    bound.append(kind)
    return 1


@LAUNCH
def launch(record, call):  # type: ignore[no-untyped-def]
    made = Call.from_address(call)
    launched.append((made.count, made.number))
    return 0


@WRONG
def wrong(context):  # type: ignore[no-untyped-def]
    return 0


@END
def end(context):  # type: ignore[no-untyped-def]
    closed.append(context)


def main(path: str, name: str, n: int, rank: int) -> None:
    door, comm = ctypes.CDLL(path), ctypes.c_void_p()
    binder = Binder(gpu, opened, bind, launch, end, wrong, end)
    door.ncclCommInitRank.argtypes = [POINTER, ctypes.c_int, UniqueId, ctypes.c_int]
    assert door.blinkmpi_door_serve(ctypes.byref(binder)) == 0
    assert door.ncclCommInitRank(ctypes.byref(comm), n, UniqueId(name.encode()), rank) == 0
    holding, until = ctypes.PyDLL(path), time.monotonic() + 0.05

    def call(library: ctypes.CDLL) -> None:
        library.ncclAllReduce(None, None, SIZE(100), 7, 0, comm, None)

    sys.setswitchinterval(100)
    call(holding)  # of a new kind
    while time.monotonic() < until:
        pass
    print(f"bound: {len(bound)} while the GIL was held")
    sys.setswitchinterval(0.005)
    while not launched:
        call(door)
    print("O 0", launched)
    door.ncclCommDestroy(comm)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
