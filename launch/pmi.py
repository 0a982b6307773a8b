"""A launcher's half of PMI-1, by which MPICH's processes find one another, where MPI's launcher did not start them.

PMI-1 is lines of ``key=value`` words: a rank puts values into a space of keys, waits in a barrier, and gets the others
by their keys. MPICH reads and writes them on a connection that it is given. :class:`Job` is what is answered, without a
socket; :class:`Server` has the sockets. It is a process of its own, since ranks hold Python's lock while MPI starts. It
is run as a file, by the path of this module, and needs nothing but Python: its input's first line is what
:func:`described` writes, its output is the port, and then it serves until the last rank has gone.

Each rank connects twice and says the job's secret first. One connection becomes MPICH's. The other, its lifeline,
carries nothing until the job ends too early: then it brings the reason, and is closed. So a rank that dies ends all.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import groupby

NAME_BYTES, KEY_BYTES, VALUE_BYTES = 256, 64, 1024  # the longest that ranks may send, as MPICH's own launcher has them
MAPPING = "PMI_process_mapping"  # the key under which MPICH looks up which ranks share a node
LINE_BYTES = 1 << 16
GREETING_S = 20.0  # that who has connected may take to say the secret
ANSWER_S = 10.0  # that a rank may take to read what it is told
PROBE_S, PROBE_AGAIN_S, PROBES = 20, 10, 4  # a host that is silent for a minute has gone
KINDS = ("pmi", "lifeline")
WELCOME = "welcome"


class JobEnds(Exception):
    """The job ends before its time; the text says why.

    Args:
        aborts: the rank that has asked for it, and ends by itself; else -1.
    """

    def __init__(self, why: str, aborts: int = -1) -> None:
        super().__init__(why)
        self.aborts = aborts


def process_mapping(nodes: Sequence[object]) -> str:
    """What MPICH reads under ``MAPPING``: ``nodes`` has what names each rank's node.

    Runs of ranks are told as (first node, number of nodes, ranks of each), with nodes numbered as they first come.
    """
    number = {node: index for index, node in reversed(list(enumerate(dict.fromkeys(nodes))))}
    runs = [(number[node], len(list(ranks))) for node, ranks in groupby(nodes)]
    blocks: list[list[int]] = []
    for node, ranks in runs:
        if blocks and blocks[-1][2] == ranks and sum(blocks[-1][:2]) == node:
            blocks[-1][1] += 1
        else:
            blocks.append([node, 1, ranks])
    return f"(vector,{','.join('({},{},{})'.format(*block) for block in blocks)})"


class Job:
    """The ranks of a job, and what they have told each other.

    Args:
        name: of the space of keys; no other job of the machines may have it, for MPICH names shared memory by it.
        hosts: of each rank, for messages.
        values: keys that are there from the beginning.
    """

    def __init__(self, name: str, hosts: Sequence[str], values: Mapping[str, str]) -> None:
        self.hosts = hosts
        self._name, self._values = name, dict(values)
        self._waiting: set[int] = set()
        self._finalized: set[int] = set()

    def answers(self, rank: int, line: str) -> list[tuple[int, str]]:
        """Who is told what, now that a rank has said this.

        Raises:
            JobEnds: if it aborts the job, or says what is not understood.
        """
        said = dict(word.partition("=")[::2] for word in line.split())
        command = said.get("cmd", said.get("mcmd", ""))
        if command == "barrier_in":
            self._waiting.add(rank)
            if len(self._waiting) < len(self.hosts):
                return []
            self._waiting.clear()
            return [(r, "cmd=barrier_out rc=0") for r in range(len(self.hosts))]
        if command == "abort":
            raise JobEnds(f"{self._who(rank)} aborted the job, exit status {said.get('exitcode', 'not told')}", rank)
        return [(rank, self._answer(rank, command, said))]

    def _answer(self, rank: int, command: str, said: Mapping[str, str]) -> str:
        key = said.get("key", "")
        match command:
            case "init":
                return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
            case "get_maxes":
                return f"cmd=maxes kvsname_max={NAME_BYTES} keylen_max={KEY_BYTES} vallen_max={VALUE_BYTES} rc=0"
            case "get_appnum":
                return "cmd=appnum appnum=0 rc=0"
            case "get_universe_size":
                return f"cmd=universe_size size={len(self.hosts)} rc=0"
            case "get_my_kvsname":
                return f"cmd=my_kvsname kvsname={self._name} rc=0"
            case "put":
                self._values[key] = said.get("value", "")
                return "cmd=put_result rc=0 msg=success"
            case "get" if key in self._values:
                return f"cmd=get_result rc=0 msg=success value={self._values[key]}"
            case "get":
                return f"cmd=get_result rc=-1 msg=key_{key}_not_found value=unknown"
            case "finalize":
                self._finalized.add(rank)
                return "cmd=finalize_ack rc=0"
        raise JobEnds(f"{self._who(rank)} asked MPI's launcher for {command[:80]!r}, and MPI has none here")

    def gone(self, rank: int) -> None:
        """A connection of a rank is closed.

        Raises:
            JobEnds: if its MPI was not finalized.
        """
        if rank not in self._finalized:
            raise JobEnds(f"{self._who(rank)} ended before MPI_Finalize: it was killed, or ended by itself")

    def _who(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}"


class Connection:
    """One of a rank's two connections; before it has said the secret, anybody's."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(ANSWER_S)
        keep_alive(sock)
        self.sock, self.since = sock, time.monotonic()
        self.rank, self.kind = -1, ""
        self._read = b""

    def lines(self) -> list[str] | None:
        """The lines that have come; None if it is closed."""
        try:
            found = self.sock.recv(LINE_BYTES)
        except OSError:
            return None
        self._read += found
        if not found or len(self._read) > LINE_BYTES:
            return None
        *whole, self._read = self._read.split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole]

    def say(self, line: str) -> bool:
        """Send a line; whether that went well."""
        try:
            self.sock.sendall(f"{line}\n".encode())
        except OSError:
            return False
        return True


class Server:
    """The sockets of a job.

    Args:
        parent: a file that is closed when the rank that has started this has gone; looked at until all have come.
        seconds: within which all ranks must have connected.
    """

    def __init__(self, job: Job, listener: socket.socket, secret: str, parent: int, seconds: float) -> None:
        self._job, self._listener, self._secret, self._parent = job, listener, secret, parent
        self._until = time.monotonic() + seconds
        self._strangers: list[Connection] = []
        self._ranks: dict[tuple[int, str], Connection] = {}
        self._come = 0  # connections of ranks that have been made, closed ones too

    def serve(self) -> str:
        """Serve until the last rank has gone; returns why the job ended too early, or an empty text."""
        try:
            while self._come < 2 * len(self._job.hosts) or self._ranks:
                self._turn()
        except JobEnds as end:
            self._end(end)
            return str(end)
        finally:
            for connection in (*self._strangers, *self._ranks.values()):
                connection.sock.close()
        return ""

    def _end(self, end: JobEnds) -> None:
        """End all ranks; one that has asked for it gets the time to end with a status of its own."""
        aborting = self._ranks.pop((end.aborts, "lifeline"), None)
        for (_, kind), connection in self._ranks.items():
            if kind == "lifeline":
                connection.say(str(end))
            connection.sock.close()
        if aborting is not None:
            aborting.lines()
            aborting.sock.close()

    def _turn(self) -> None:
        complete = self._come == 2 * len(self._job.hosts)
        if complete:
            self._listener.close()
            for stranger in self._strangers:
                stranger.sock.close()
            self._strangers.clear()
        connections = {c.sock.fileno(): c for c in (*self._strangers, *self._ranks.values())}
        watched = [*connections] if complete else [*connections, self._listener.fileno(), self._parent]
        poll = select.poll()  # not select.select: a job of 512 ranks has more descriptors than that takes
        for fd in watched:
            poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(None if complete else 1000)]
        if not complete and time.monotonic() > self._until:
            raise JobEnds(f"only {self._come} of {2 * len(self._job.hosts)} connections of the ranks were made in time")
        if self._parent in ready and not os.read(self._parent, 1):
            raise JobEnds(f"rank 0 on {self._job.hosts[0]} ended while the ranks connected")
        for fd in ready:
            if not complete and fd == self._listener.fileno():
                self._strangers.append(Connection(self._listener.accept()[0]))
            elif (connection := connections.get(fd)) is not None:
                self._hear(connection)
        for connection in [c for c in self._strangers if time.monotonic() - c.since > GREETING_S]:
            self._drop(connection)

    def _hear(self, connection: Connection) -> None:
        lines = connection.lines()
        if connection.rank < 0:
            if lines is None or len(lines) > 1 or (lines and not self._greeted(connection, lines[0])):
                self._drop(connection)
            return
        if lines is None:
            self._ranks.pop((connection.rank, connection.kind)).sock.close()
            self._job.gone(connection.rank)
        for line in lines or ():
            for rank, answer in self._job.answers(connection.rank, line):
                told = self._ranks.get((rank, "pmi"))
                if told is None or not told.say(answer):
                    self._job.gone(rank)

    def _greeted(self, connection: Connection, line: str) -> bool:
        """Whether a stranger is a rank: it says the secret, which connection this is, and its rank."""
        secret, _, rest = line.partition(" ")
        kind, _, rank = rest.partition(" ")
        key = int(rank) if rank.isdecimal() else -1, kind
        if not hmac.compare_digest(secret.encode(), self._secret.encode()) or kind not in KINDS:
            return False
        if not 0 <= key[0] < len(self._job.hosts) or key in self._ranks or not connection.say(WELCOME):
            return False
        self._strangers.remove(connection)
        connection.rank, connection.kind = key
        self._ranks[key] = connection
        self._come += 1
        return True

    def _drop(self, connection: Connection) -> None:
        self._strangers.remove(connection)
        connection.sock.close()


def keep_alive(sock: socket.socket) -> None:
    """Let a connection end when the other host is silent for a minute, as one without power is."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", PROBE_S), ("TCP_KEEPINTVL", PROBE_AGAIN_S), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):  # Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def described(name: str, secret: str, hosts: Sequence[str], values: Mapping[str, str], seconds: float) -> bytes:
    """A job, as the line that :func:`main` reads; arguments as for :class:`Job` and :class:`Server`."""
    told = {"name": name, "secret": secret, "hosts": list(hosts), "values": dict(values), "seconds": seconds}
    return json.dumps(told).encode() + b"\n"


def main() -> None:
    """The server's process: the job comes from standard input, and the port goes to standard output."""
    with os.fdopen(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:  # what follows the line is watched
        told = json.loads(stdin.readline())
    job = Job(told["name"], told["hosts"], told["values"])
    with _listener() as listener:
        print(listener.getsockname()[1], flush=True)
        Server(job, listener, told["secret"], sys.stdin.fileno(), told["seconds"]).serve()


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


if __name__ == "__main__":
    main()
