"""No method of mpi4py's leads GPU memory to an MPI that does not take it. The GPU memory here is nobody's memory."""

import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI

import blinkmpi
from blinkmpi.collectives import Collectives
from blinkmpi.errors import BlinkError, BufferTypeError
from blinkmpi.guarded import GUARDED, MAKERS
from blinkmpi.runtime.cuda import buffers
from blinkmpi.runtime.guard import BUFFERS, NAMES
from blinkmpi.transport.cuda import device
from tests.every_call import walk_collectives, walk_point_to_point
from tests.every_method import COUNT, KINDS, ByDLPack, Fake, buffers_of, calls, making_objects, taking_buffers
from tests.harness import mpi


def test_the_table_has_every_method_of_mpi4py_that_takes_buffers() -> None:
    found: dict[str, Any] = {name: s for kind in KINDS for name, s in taking_buffers(kind).items()}
    assert set(NAMES) == set(found), "mpi4py has others: decide in runtime/guard.py what each does with GPU memory"
    assert len(NAMES) == len(set(NAMES))
    assert {name for signature in found.values() for name in buffers_of(signature)} <= set(BUFFERS)


def test_the_table_has_every_method_that_makes_an_object_with_such_methods() -> None:
    found = {name for kind in KINDS for name in making_objects(kind)}
    assert found - {"Shrink"} == set(MAKERS)  # which makes an object of its own type
    assert set(GUARDED) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_signatures_stay_mpi4pys(kind: type) -> None:
    for name, signature in taking_buffers(kind).items():
        theirs, ours = signature.parameters.values(), taking_buffers(GUARDED[kind])[name].parameters.values()
        assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs], name


def family(comm: blinkmpi.Communicator) -> Iterator[Any]:
    """One object of every kind."""
    n = comm.size
    everybody = list(range(n))
    yield comm
    cart = comm.Create_cart([n])
    yield cart
    yield cart.Sub([True])
    yield comm.Create_graph([n * (i + 1) for i in everybody], everybody * n)
    yield comm.Create_dist_graph_adjacent(everybody, everybody)
    yield comm.Create_dist_graph([comm.rank], [n], everybody)
    yield cart.Split(0)
    if n > 1:
        half = MPI.Intracomm(comm).Split(comm.rank % 2)
        inter = GUARDED[MPI.Intracomm](half).Create_intercomm(0, MPI.Intracomm(comm), 1 - comm.rank % 2)
        yield inter
        yield inter.Merge()


def finished(made: Any) -> None:
    """Wait for a call, if it is non-blocking."""
    if isinstance(made, MPI.Request):
        made.Wait()


@mpi(ranks=(1, 2, 3), timeout=120)
def test_every_method_refuses_gpu_memory_that_it_cannot_carry(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        for of in family(ours):
            kind = next(base for base in type(of).__mro__ if base in KINDS)
            n = of.Get_remote_size() if kind is MPI.Intercomm else of.size
            on_gpu, on_host = (Fake(np.ones(COUNT * n, np.float32)), np.ones(COUNT * n, np.float32))
            for name, signature in taking_buffers(kind).items():
                own = isinstance(of, blinkmpi.Communicator) and name in vars(Collectives)
                for arguments in calls(signature, n, on_gpu, on_host):
                    if n == 1 and name in ("Exscan", "Iexscan") and not buffers.lies_on_device(arguments["sendbuf"]):
                        continue  # rank 0 receives nothing
                    with pytest.raises(BlinkError) as raised:  # on every rank: there its own, elsewhere that one
                        finished(getattr(of, name)(**arguments))
                    if not own:
                        assert isinstance(raised.value, BufferTypeError), (type(of), name, arguments)
                        assert name in str(raised.value)
                        assert "pass" in str(raised.value), "no remedy"
        total = np.zeros(1)
        ours.Allreduce(np.ones(1), total)  # which lives on
        assert total == comm.size


@mpi(ranks=(1,))
def test_gpu_memory_that_only_dlpack_shows_is_refused_too(comm: MPI.Intracomm) -> None:
    dlpack, kind = ByDLPack(np.ones(4, np.float32)), MPI.FLOAT.Create_vector(2, 1, 2).Commit()
    with blinkmpi.Communicator(comm) as ours:
        for buffer in (dlpack, [dlpack, 4, MPI.FLOAT]):
            for name in ("Send", "Send_init", "Bcast", "Ibcast"):
                with pytest.raises(BufferTypeError, match="pass"):
                    finished(getattr(ours, name)(buffer, 0))
            for name in ("Bcast", "Ibcast"):
                with pytest.raises(BufferTypeError, match="MPI's alone"):
                    finished(getattr(ours, name)([dlpack, 1, kind]))
            with pytest.raises(BufferTypeError, match="pass"):  # user's operations are MPI's alone
                ours.Allreduce(buffer, buffer, MPI.MAXLOC)


@mpi(ranks=(1,))
def test_addresses_of_gpu_memory_in_datatypes_are_refused(comm: MPI.Intracomm) -> None:
    """MPI.BOTTOM with a datatype of addresses; here those of a NumPy array pass for a GPU's."""
    x = np.arange(4, dtype=np.float32)
    kind = MPI.Datatype.Create_struct([4], [MPI.Get_address(x)], [MPI.FLOAT]).Commit()
    device_of = mock.Mock(side_effect=lambda at: 0 if at == x.ctypes.data else None)
    y = np.zeros_like(x)
    elsewhere = MPI.Datatype.Create_struct([4], [MPI.Get_address(y)], [MPI.FLOAT]).Commit()
    calls: list[Callable[[], object]] = [
        lambda: ours.Alltoallw((MPI.BOTTOM, ([1], [0]), [kind]), (MPI.BOTTOM, ([1], [0]), [elsewhere])),
        lambda: ours.Ialltoallw((MPI.BOTTOM, ([1], [0]), [elsewhere]), (MPI.BOTTOM, ([1], [0]), [kind])),
        lambda: ours.Sendrecv([MPI.BOTTOM, 1, elsewhere], 0, 0, [MPI.BOTTOM, 1, kind], 0),
        lambda: ours.Allreduce([MPI.BOTTOM, 1, kind], y),
        lambda: ours.Bcast([MPI.BOTTOM, 1, kind]),
    ]
    with (
        blinkmpi.Communicator(comm) as ours,
        mock.patch.multiple(device, device_of=device_of, why_none=lambda: ""),
        mock.patch.dict(sys.modules, cupy=mock.MagicMock(ndarray=type("ndarray", (), {}))),
    ):
        for call in calls:
            with pytest.raises(BufferTypeError, match="pass"):
                finished(call())
        ours.Sendrecv([MPI.BOTTOM, 1, elsewhere], 0, 0, [y, 4, MPI.FLOAT], 0)  # of which none is on a GPU
    assert not y.any()
    assert (x == np.arange(4)).all()
    ours = blinkmpi.Communicator(comm)
    ours.Alltoallw((MPI.BOTTOM, ([1], [0]), [kind]), (MPI.BOTTOM, ([1], [0]), [elsewhere]))
    assert (x == y).all()
    ours.Free()


@mpi(ranks=(1,))
def test_messages_refuse_it_and_can_be_received_afterwards(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        got = np.zeros(COUNT, np.float32)
        for probe in (ours.Mprobe, ours.Improbe, ours.mprobe, ours.improbe):
            request = ours.Isend(np.ones(COUNT, np.float32), 0)
            while (message := probe()) is None:
                pass
            for receive in (message.Recv, message.Irecv):
                with pytest.raises(BufferTypeError, match="pass NumPy copies"):
                    receive([Fake(got), MPI.FLOAT])
            message.Recv(got)
            assert (got == 1).all()
            got[:] = 0
            request.Wait()
            assert ours.Improbe() is None


@mpi(ranks=(2,), env={"BLINKMPI_CUDA_AWARE": "1"})
def test_an_mpi_that_takes_gpu_memory_gets_it(comm: MPI.Intracomm) -> None:
    """It lies on the host, so that this MPI can take it."""
    n = comm.size
    with blinkmpi.Communicator(comm) as ours:
        sent, got = np.full(COUNT * n, 1 + comm.rank, np.float32), np.zeros(COUNT * n, np.float32)
        send, recv = Fake(sent, 0), Fake(got, 0)
        peer = 1 - comm.rank
        ours.Sendrecv(send, peer, 0, [recv, MPI.FLOAT], peer)
        assert (got == 1 + peer).all()
        got[:] = 0
        MPI.Request.Waitall([ours.Isend(send, peer), ours.Irecv(recv, peer)])
        assert (got == 1 + peer).all()
        ours.Create_cart([n]).Neighbor_allgather(Fake(sent[:COUNT], 0), recv)
        assert (got == 1 + peer).all()
        kinds = ([COUNT] * n, [0, 4 * COUNT]), [MPI.FLOAT] * n
        ours.Alltoallw([send, *kinds], [recv, *kinds])
        assert (got.reshape(n, -1) == [[1], [2]]).all()
        persistent = ours.Scan_init(send, recv)
        persistent.Start()
        persistent.Wait()
        persistent.Free()
        assert (got == sum(range(1, comm.rank + 2))).all()
        with pytest.raises(BufferTypeError, match="on the host"):
            ours.Attach_buffer(send)


@mpi(ranks=(1, 2, 3), timeout=120)
def test_on_host_memory_every_method_does_what_mpis_own_does(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours:
        for of in family(ours):
            if not isinstance(of, MPI.Intercomm):
                assert set(walk_collectives(of, np.copy, np.copy).values()) == {"right"}
        walk_point_to_point(ours, np.copy, np.copy)


@mpi(ranks=(2,))
def test_reduce_scatter_in_place_that_would_copy_on_a_gpu_that_is_not_there(comm: MPI.Intracomm) -> None:
    with blinkmpi.Communicator(comm) as ours, pytest.raises(BlinkError, match=r"pip install|no rank has a GPU|no CuPy"):
        ours.Reduce_scatter(MPI.IN_PLACE, Fake(np.ones(5, np.float32)), [2, 3])
