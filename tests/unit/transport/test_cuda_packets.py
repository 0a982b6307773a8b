"""Who sends what to whom by packets, executed against the reference; and what fits the LL buffers."""

import numpy as np
import pytest

from blinkmpi.errors import ArgumentError
from blinkmpi.program.call import Call
from blinkmpi.program.reduction import Array
from blinkmpi.transport.cuda.memory_layout import LINE, LL16_BUFFER_BYTES, ll128_buffer_bytes
from blinkmpi.transport.cuda.packets import LL128, PACK_BYTES, PROTOCOLS, PacketStreams, fits, longest_slice, streams
from blinkmpi.trees.tree import Collective
from tests.unit.transport.test_cuda_direct_segments import bytes_of, ranks_in, receivers, reduced, settings, some_calls
from tests.unit.trees.packings import call_of, reference, sends_of


def slice_of(made: PacketStreams, rank: int) -> slice:
    """The bytes of the vector that a rank owns in two shots, as two_shot of packets.cu cuts it."""
    packs, owners = -(-made.nbytes // PACK_BYTES), ranks_in(made.owners)
    each = PACK_BYTES * -(-packs // len(owners))
    begin = min(owners.index(rank) * each, made.nbytes)
    return slice(begin, min(begin + each, made.nbytes))


def check(call: Call, recvs: list[Array | None], writes: list[Array | None], want: list[Array | None]) -> None:
    """Every byte was written once, and is right."""
    for result, expected, counts in zip(recvs, want, writes, strict=True):
        if result is not None and expected is not None and counts is not None:
            assert (counts == 1).all(), call
            assert result.tobytes() == expected.tobytes(), call


@some_calls
@settings(max_examples=300)
def test_one_shot_reaches_who_waits_for_it(collective: Collective, n: int, count: int, dtype: str, root: int) -> None:
    call = call_of(collective, n, count, dtype=dtype, root=root % n)
    if collective == "reduce_scatter" and len(set(call.counts)) > 1:
        assert not fits(call, "ll16_one_shot")
        with pytest.raises(ArgumentError, match="uneven"):
            streams(call, 0)
        return
    sends = sends_of(call, np.random.default_rng(count))
    want = reference(call, sends)
    recvs, writes = receivers(call, want)
    made = [streams(call, r) for r in range(n)]
    for rank, mine in enumerate(made):
        assert (mine.owners, mine.out_mask, mine.in_mask, mine.keep) == (0, 0, 0, True)
        got = []
        for r in ranks_in(mine.recv_mask):
            assert r == rank or made[r].send_mask >> rank & 1, f"rank {rank} waits for {r}, which sends nothing"
            at = rank * made[r].send_stride
            got.append(bytes_of(sends[r])[at : at + mine.nbytes])
            assert got[-1].size == mine.nbytes
        assert all(made[r].recv_mask >> rank & 1 for r in ranks_in(mine.send_mask)), "nobody reads these packets"
        parts = [(r * mine.recv_stride, x) for r, x in zip(ranks_in(mine.recv_mask), got, strict=True)]
        for at, value in parts if mine.recv_stride or not got else [(0, reduced(call, got))]:
            bytes_of(recvs[rank])[at : at + mine.nbytes] = value
            writes[rank][at : at + mine.nbytes] += 1  # type: ignore[index]
    check(call, recvs, writes, want)


@some_calls
@settings(max_examples=300)
def test_two_shots_reach_who_waits_for_them(collective: Collective, n: int, count: int, dtype: str, root: int) -> None:
    call = call_of(collective, n, count, dtype=dtype, root=root % n)
    if collective not in ("allreduce", "reduce", "broadcast"):
        with pytest.raises(ArgumentError, match="takes one shot"):
            streams(call, 0, two_shot=True)
    if not fits(call, "ll128_two_shot"):
        return
    sends = sends_of(call, np.random.default_rng(count))
    want = reference(call, sends)
    recvs, writes = receivers(call, want)
    made = [streams(call, r, two_shot=True) for r in range(n)]
    assert len({(m.owners, m.nbytes) for m in made}) == 1
    for rank, mine in enumerate(made):
        assert bool(mine.owners >> rank & 1) == bool(mine.recv_mask)
        assert not (mine.send_mask | mine.out_mask | mine.in_mask) >> rank & 1, "it sends nothing to itself"
        assert all(made[r].recv_mask >> rank & 1 for r in ranks_in(mine.send_mask)), "nobody reads the first shot"
        assert all(made[r].in_mask >> rank & 1 for r in ranks_in(mine.out_mask)), "nobody reads the second shot"
        assert all(made[r].out_mask >> rank & 1 for r in ranks_in(mine.in_mask)), "nobody sends the second shot"
        if not mine.recv_mask:
            continue
        part = slice_of(mine, rank)
        sources = ranks_in(mine.recv_mask)
        assert all(r == rank or made[r].send_mask >> rank & 1 for r in sources)
        value = reduced(call, [bytes_of(sends[r])[part] for r in sources])
        for r in [*([rank] if mine.keep else []), *ranks_in(mine.out_mask)]:
            bytes_of(recvs[r])[part] = value
            writes[r][part] += 1  # type: ignore[index]
    check(call, recvs, writes, want)


def test_what_fits_the_ll16_buffers() -> None:
    data = LL16_BUFFER_BYTES // 2  # the other half is flags
    one = Call("allreduce", 8, (data,), "int8", "sum")
    assert fits(one, "ll16_one_shot")
    assert not fits(Call("allreduce", 8, (data + 1,), "int8", "sum"), "ll16_one_shot")
    assert fits(Call("allreduce", 8, (8 * data,), "int8", "sum"), "ll16_two_shot")
    assert not fits(Call("allreduce", 8, (8 * data + 1,), "int8", "sum"), "ll16_two_shot")
    assert fits(Call("broadcast", 8, (7 * data,), "int8", "", 0), "ll16_two_shot"), "the root owns nothing"
    assert not fits(Call("broadcast", 8, (7 * data + 1,), "int8", "", 0), "ll16_two_shot")
    assert not fits(Call("broadcast", 2, (16,), "int8", "", 0), "ll16_two_shot"), "who is alone needs one shot"
    assert not fits(Call("allgather", 8, (16,), "int8"), "ll16_two_shot")


@pytest.mark.parametrize("n", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("protocol", ["ll128_one_shot", "ll128_two_shot"])
def test_lines_fill_the_ll128_buffers_and_no_more(n: int, protocol: str) -> None:
    most = ll128_buffer_bytes(n) // LINE * LL128.data * PACK_BYTES * (n if protocol == "ll128_two_shot" else 1)
    for nbytes, room in ((most, True), (most + 1, False)):
        call = Call("allreduce", n, (nbytes,), "int8", "sum")
        assert fits(call, protocol) is room
        taken = PACK_BYTES * LL128.positions(longest_slice(call, two_shot=PROTOCOLS[protocol].two_shot))
        assert (taken <= ll128_buffer_bytes(n)) is room
        assert taken % LINE == 0
