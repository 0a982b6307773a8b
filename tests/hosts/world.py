"""Hosts as namespaces of one machine, with links between them, for tests of jobs on several hosts.

A :class:`World` is a process (``world.sh``) in PID, mount and network namespaces of its own; its network is the switch.
Inside it each host has its own network, hostname, IPC, /dev/shm and /sys; the files and the PIDs are shared. So nothing
of a world is in the machine's network, and nothing needs cleaning: when the process that made the world ends, even by
SIGKILL, the first process of the world ends, and the kernel ends all others and takes down links and mounts.

netem is not in every kernel, so links have a rate and no added latency.
"""

import contextlib
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness import ENVIRONMENT, GRACE_S, ROOT, Closing, Outcome, Started, command_line, mpirun

SCRIPT = Path(__file__).with_name("world.sh")
ROOTLESS = [] if os.geteuid() == 0 else ["--map-root-user"]
UNSHARE = ["unshare", *ROOTLESS, "--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--uts", "--ipc"]
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "hostname": "hostname"}
START_S = 20.0
END_S = 10.0
DO_S = 20.0  # for a command on a host
OURS = ("OMPI_", "PRTE_", "PMIX_")  # what mpirun gives to other hosts unasked


class HostsError(RuntimeError):
    """A host, or a link of it, is not what was asked for."""


def missing() -> str | None:
    """Name what this machine lacks, with Debian's packages, or None."""
    lacking = sorted(tool for tool in TOOLS if shutil.which(tool, path=search_path()) is None)
    packages = " ".join(sorted({TOOLS[tool] for tool in lacking}))
    return f"no {', '.join(lacking)}: apt-get install {packages}" if lacking else None


def forbidden() -> str | None:
    """Say why no namespaces can be made here, or None."""
    mounts = "mount -t tmpfs tmpfs /run && mount -t sysfs sysfs /sys"
    tried = subprocess.run([*UNSHARE, "bash", "-c", mounts], capture_output=True, text=True, timeout=START_S)
    return f"namespaces are forbidden here: {tried.stderr.strip()}" if tried.returncode else None


def search_path() -> str:
    """PATH with the folders of tools for root, which a user's lacks."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


class World(Closing):
    """``n`` hosts, host0 and so on, at switches; ``with World(2) as world`` leaves nothing behind.

    Args:
        n: number of hosts.
        links: links of each host, eth0 and so on, each to a switch of its own: host i has 10.77.LINK.(i + 1).
        rate: rate of every link, both ways, as ``tc`` reads it: ``200mbit``. None leaves links unlimited.
    """

    def __init__(self, n: int, *, links: int = 1, rate: str | None = None) -> None:
        self.names = tuple(f"host{i}" for i in range(n))
        self.links = links
        self._init = subprocess.Popen(
            [*UNSHARE, "bash", str(SCRIPT), "init", str(links), *self.names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PATH": search_path()},
            start_new_session=True,
        )
        try:
            self._keepers = self._wait_until_ready()
            for name in self.names if rate else ():
                for link in range(links):
                    self.shape(name, str(rate), link=link)
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> dict[str, int]:
        """Read the line that world.sh prints last; gives the first process of each host."""
        assert self._init.stdout is not None
        assert self._init.stderr is not None
        ready, _, _ = select.select([self._init.stdout], [], [], START_S)
        words = self._init.stdout.readline().decode().split() if ready else []
        if words[:1] != ["ready"]:
            self._init.kill()
            raise HostsError(f"no world of {len(self.names)} hosts:\n{self._init.stderr.read().decode()}")
        outside = {inside: pid for pid, inside in self._all()}
        return {name: outside[int(inside)] for name, inside in zip(self.names, words[1:], strict=True)}

    def close(self) -> None:
        """End every process of the world, and with them its namespaces; may be called again."""
        for pipe in (self._init.stdin, self._init.stdout, self._init.stderr):
            if pipe is not None:
                pipe.close()
        try:
            self._init.wait(END_S)
        except subprocess.TimeoutExpired:
            self._init.kill()
            self._init.wait()

    # ------------------------------------------------------------ commands

    def command(self, host: str | None, argv: Sequence[str]) -> list[str]:
        """Give the command line that runs ``argv`` on a host, or at the switches."""
        pid = self._init.pid
        user = ["--user", "--preserve-credentials"] if ROOTLESS else []
        spaces = [*user, "--mount", "--net", f"--pid=/proc/{pid}/ns/pid_for_children"]
        enter = [] if host is None else ["bash", str(SCRIPT), "enter", host]
        return ["nsenter", f"--target={pid}", *spaces, "--", "env", f"--chdir={ROOT}", *enter, *argv]

    def do(self, host: str | None, *argv: str, env: Mapping[str, str] | None = None) -> str:
        """Run a command on a host, or at the switches, to its end; gives its output."""
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        variables = {**os.environ, "PATH": search_path(), **(env or {})}
        done = subprocess.run(self.command(host, argv), env=variables, **pipes, text=True, timeout=DO_S, check=False)
        if done.returncode:
            raise HostsError(f"{host or 'switch'}: {' '.join(argv)}: exit status {done.returncode}\n{done.stdout}")
        return done.stdout

    # ------------------------------------------------------------ links

    def shape(self, host: str, rate: str, *, link: int = 0) -> None:
        """Limit a link of a host, in both directions."""
        limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        self.do(host, "tc", "qdisc", "replace", "dev", f"eth{link}", *limit)
        self.do(None, "tc", "qdisc", "replace", "dev", f"{host}-{link}", *limit)

    def link(self, host: str, state: str, *, link: int = 0) -> None:
        """Set a link of a host ``up`` or ``down``, as pulling its cable does: at the switch."""
        self.do(None, "ip", "link", "set", f"{host}-{link}", state)

    # ------------------------------------------------------------ processes

    def _all(self) -> list[tuple[int, int]]:
        """List the processes of the world that have not ended, with their PIDs inside."""
        space = os.stat(f"/proc/{self._init.pid}/ns/pid_for_children").st_ino
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # gone, or somebody else's
                if os.stat(entry / "ns" / "pid").st_ino == space:
                    facts = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines())
                    if not facts["State"].strip().startswith("Z"):
                        found.append((int(entry.name), int(facts["NSpid"].split()[-1])))
        return sorted(found)

    def processes(self, host: str | None = None) -> list[int]:
        """List the processes of one host, or of all, without those that hold the namespaces."""
        found = []
        for pid, inside in self._all():
            with contextlib.suppress(OSError):
                here = host is None or os.path.samefile(f"/proc/{pid}/ns/net", f"/proc/{self._keepers[host]}/ns/net")
                if here and inside != 1 and pid not in self._keepers.values():
                    found.append(pid)
        return found

    def end_processes(self, host: str | None = None) -> None:
        """Kill what runs on one host, or on all, and wait until it is gone; the hosts stay."""
        end = time.monotonic() + END_S
        while pids := self.processes(host):
            if time.monotonic() > end:
                raise HostsError(f"processes that do not end: {[command_line(pid) for pid in pids]}")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_for_end(pids, 1.0)

    def kill(self, host: str) -> None:
        """Cut a host's power: its peers hear nothing any more, its processes and its links are gone."""
        self.do(None, "touch", f"/run/{host}.cut")
        for link in range(self.links):
            self.link(host, "down", link=link)
        self.end_processes(host)
        keeper = self._keepers.pop(host)
        os.kill(keeper, signal.SIGKILL)
        wait_for_end([keeper], END_S)

    # ------------------------------------------------------------ jobs

    def start(self, layout: Sequence[int], argv: Sequence[str], **arguments: Any) -> "Job":
        """Start a command line on ``layout[i]`` ranks of host i; arguments as for :class:`Job`."""
        return Job(self, layout, argv, **arguments)

    def run(self, layout: Sequence[int], argv: Sequence[str], **arguments: Any) -> Outcome:
        """Run a command line on ``layout[i]`` ranks of host i to its end; arguments as for :class:`Job`."""
        with self.start(layout, argv, **arguments) as job:
            return job.wait()


class Job(Started):
    """A command line under mpirun, which runs on the first host; ``with`` leaves no process on any host.

    Args:
        layout: ranks of each host, in order.
        argv: what each rank runs.
        timeout: seconds from the start until :meth:`wait` ends the job.
        env: further variables, for the ranks of all hosts.
        options: further options of mpirun.
        hosts: names for the hostfile, if not those of the world.
    """

    def __init__(
        self,
        world: World,
        layout: Sequence[int],
        argv: Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        hosts: Sequence[str] | None = None,
    ) -> None:
        self.world, self.timeout = world, timeout
        self._scratch = tempfile.TemporaryDirectory(prefix="blinkmpi-")
        self._log = Path(self._scratch.name) / "output"
        hostfile = Path(self._scratch.name) / "hostfile"
        lines = zip(hosts or world.names, layout, strict=False)
        hostfile.write_text("".join(f"{name} slots={ranks}\n" for name, ranks in lines))
        variables = {**ENVIRONMENT, "MPIEXEC_TIMEOUT": str(math.ceil(timeout + GRACE_S)), **(env or {})}
        variables["PRTE_MCA_plm_ssh_agent"] = f"bash {SCRIPT} agent"
        exports = [word for name in variables if not name.startswith(OURS) for word in ("-x", name)]
        line = [mpirun(), "--hostfile", str(hostfile), *exports, *options, "-np", str(sum(layout)), *argv]
        self._started = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                world.command(world.names[0], line),
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def close(self) -> None:
        """End the job if it has not ended."""
        if self._outcome is None:
            self.timeout = 0.0
            self.wait()

    def wait(self) -> Outcome:
        """Wait for the end of the job, or end it when its time is over."""
        if self._outcome is not None:
            return self._outcome
        leftovers, timed_out = (), not self._ends_in_time()
        seconds = self.seconds
        if not timed_out:  # a rank may be on its way out
            leftovers = tuple(command_line(pid) for pid in wait_for_end(self.world.processes(), 2.0))
        self.world.end_processes()
        rc = self._process.wait(END_S)
        output = self._log.read_text(errors="replace")
        self._outcome = Outcome(rc, output, seconds, timed_out, leftovers)
        self._scratch.cleanup()
        return self._outcome


def program(layout: Sequence[int], function: Callable[..., object], *args: object, timeout: float) -> list[str]:
    """Give the command line of a rank that checks where it is and calls a function of a module (``rank.py``)."""
    where = ",".join(map(str, layout))
    what = [function.__module__, function.__name__, *map(str, args)]
    return [sys.executable, "-m", "tests.hosts.rank", where, str(timeout), *what]


def wait_for_end(pids: Sequence[int], timeout: float) -> list[int]:
    """Wait until processes have ended; gives those that have not."""
    end = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        waiting = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                stack.callback(os.close, fd)
                waiting[fd] = pid
        while waiting and (left := end - time.monotonic()) > 0:
            for fd in select.select(list(waiting), [], [], left)[0]:
                del waiting[fd]
        return sorted(waiting.values())
