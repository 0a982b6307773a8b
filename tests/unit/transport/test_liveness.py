"""What a rank that waits for its GPU sees of the others' calls, in control pages that are plain memory."""

import pickle
from unittest import mock

import numpy as np
import pytest

from blinkmpi.errors import SHRINK, CollectiveTimeout, MismatchError, PeerLost
from blinkmpi.transport.announcement import Announcement, Called, Failed, decode_failure, encode, encode_failure
from blinkmpi.transport.control_pages import BODY, CONTROL, ControlPages
from blinkmpi.transport.host.transport import HostTransport
from blinkmpi.transport.liveness import Peers, died_of
from blinkmpi.util.together import Failure

CALL = Called("allreduce(8 x float32, op sum) in GPU memory")


def job(n: int = 3) -> Peers:
    """What rank 0 sees."""
    memory = np.zeros(n * CONTROL, np.uint8)
    return Peers(ControlPages(memory, n, 0, tuple(range(n)), None), ["here"] * n)


def announce(peers: Peers, rank: int, seq: int, said: Announcement) -> None:
    """As rank ``rank``."""
    fingerprint, body = encode(said, BODY)
    peers.pages.write(peers.pages.record(rank, seq), body, fingerprint)
    peers.pages.announced[rank] = seq


def test_a_rank_that_refused_the_call_and_went_on_is_still_heard() -> None:
    """It may wait in its next call for those who wait for it in this one."""
    peers = job()
    for rank in range(2):
        announce(peers, rank, 7, CALL)
    announce(peers, 2, 7, Failed(Failure("BufferTypeError", "operation 'band' is not defined")))
    assert isinstance(peers.mismatch_so_far(7, CALL.text), MismatchError)
    announce(peers, 2, 8, Called("free()"))
    with pytest.raises(MismatchError, match="rank 2 failed: BufferTypeError: operation 'band'"):
        raise peers.mismatch_so_far(7, CALL.text) or AssertionError("nothing was seen")


def test_a_rank_that_made_the_call_and_went_on_is_none_of_them() -> None:
    peers = job()
    announce(peers, 0, 7, CALL)
    for rank in (1, 2):
        announce(peers, rank, 7, CALL)
        announce(peers, rank, 8, Called("another call"))
    assert peers.mismatch_so_far(7, CALL.text) is None
    announce(peers, 1, 9, Failed(Failure("ArgumentError", "of a later call, in the same record")))
    assert peers.mismatch_so_far(7, CALL.text) is None


def test_of_two_calls_that_differ_the_first_is_told() -> None:
    """Roots of broadcasts wait for nobody; the call behind them is the one that fails."""
    peers = job()
    for rank in range(3):
        announce(peers, rank, 6, CALL)
        announce(peers, rank, 7, Called(f"broadcast(8 x float32, root {min(rank, 1)}) in GPU memory"))
    assert "rank 2 called broadcast(8 x float32, root 1)" in peers.different(7)
    announce(peers, 0, 8, CALL)
    announce(peers, 1, 8, CALL)
    text = peers.different(8)
    assert text.startswith(
        "call 7: rank 0 called broadcast(8 x float32, root 0) in GPU memory; rank 1 called broadcast"
    )
    for rank in range(3):
        for seq in (8, 9, 10):
            announce(peers, rank, seq, CALL)
    assert not peers.different(10)


@pytest.mark.parametrize("says", [True, False])
def test_a_rank_that_says_why_and_leaves_during_a_look_is_heard(says: bool) -> None:
    """Many ranks' deadlines are over at once: one of them may be gone before another one has looked at who is here."""
    peers = job()
    for rank in range(3):
        announce(peers, rank, 7, CALL)

    def ended() -> list[int]:
        if says:
            error = CollectiveTimeout("rank 2 is stopped")
            peers.pages.write(peers.pages.error_record(1), encode_failure(error, BODY))
            peers.pages.abort[0] = 1 + 1
        return [1]

    host = HostTransport.__new__(HostTransport)  # a look needs no more of it
    host.messages, host.pages, host.peers = None, peers.pages, peers
    with mock.patch.object(peers, "ended", ended), pytest.raises(CollectiveTimeout if says else PeerLost) as caught:
        host.look(7, lambda: {1: "a chunk", 2: "a chunk"}, 1.0, 3.0)
    assert ("rank 2 is stopped (found by rank 1; rank 0 left call 7 too)" in str(caught.value)) == says


def test_the_numbers_of_lost_ranks_reach_every_rank() -> None:
    """As an attribute of the first error, of the others', and of all later ones."""
    peers = job(4)
    peers.remedy = SHRINK
    mine = peers.timeout_error(7, {1: "its call 7", 3: "its call 7"}, [3, 1], 0.5)
    assert isinstance(mine, PeerLost)
    assert mine.ranks == (1, 3)
    assert str(mine).endswith("start the job again, or go on with the others: comm.shrink()")
    peers.pages.write(peers.pages.error_record(2), encode_failure(mine, BODY))
    peers.pages.abort[0] = 3
    theirs = peers.abort_error(7)
    assert isinstance(theirs, PeerLost)
    assert theirs.ranks == (1, 3)
    assert died_of(theirs).ranks == (1, 3)
    assert pickle.loads(pickle.dumps(theirs)).ranks == (1, 3)


def test_an_error_of_very_many_lost_ranks_fits_into_its_record() -> None:
    error = PeerLost("x" * 2000, range(1 << 20, (1 << 20) + 5000))
    body = encode_failure(error, BODY)
    assert len(body) <= BODY
    assert decode_failure(body).lost == error.ranks[: len(decode_failure(body).lost)] != ()


def test_a_rank_that_gave_up_for_a_reason_of_its_own_is_not_lost() -> None:
    peers = job()
    peers.pages.write(peers.pages.error_record(2), encode_failure(ValueError("seven"), BODY))
    peers.pages.abort[0] = 3
    theirs = peers.abort_error(7)
    assert isinstance(theirs, PeerLost)
    assert theirs.ranks == ()
