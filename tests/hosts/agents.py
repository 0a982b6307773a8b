"""torchrun's agents, one on each host of a world: :class:`Agents`."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness import ENVIRONMENT, PATIENCE_S, Closing, command_line
from tests.hosts.world import World, wait_for_end

PORT = 29400


@dataclass(frozen=True)
class Ended:
    """How the agents of a job ended: each one's exit status, in order."""

    statuses: list[int]
    output: str
    at: float  # of the monotonic clock, when the last agent had ended


class Agents(Closing):
    """A job of torchrun's; ``with`` leaves no process on any host.

    Args:
        layout: ranks of each agent, in order.
        argv: the program and its arguments, as torchrun takes them.
        env: further variables, for the ranks of all hosts; None as a value removes one.
        options: further options of torchrun.
        hosts: where the agents run, if not one on each host.
        static: the agents know their numbers and where the first one is, and find each other by its store alone; the
            ranks take that store, too.
    """

    def __init__(
        self,
        world: World,
        layout: Sequence[int],
        argv: Sequence[str],
        *,
        env: Mapping[str, str | None] | None = None,
        options: Sequence[str] = (),
        hosts: Sequence[str] = (),
        static: bool = False,
    ) -> None:
        self.world = world
        self._scratch = tempfile.TemporaryDirectory(prefix="blinkmpi-")
        self._agents: list[subprocess.Popen[bytes]] = []
        variables: dict[str, str | None] = {**os.environ, **ENVIRONMENT, **(env or {})}
        first = world.names[0]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(layout)), *options]
        for number, (host, ranks) in enumerate(zip(hosts or world.names, layout, strict=True)):
            meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{PORT}", "--rdzv-id", "job"]
            if static:
                meet = ["--master-addr", first, "--master-port", str(PORT), "--node-rank", str(number)]
            with Path(self._scratch.name, str(number)).open("wb") as log:
                line = [*torchrun, *meet, "--local-addr", host, "--nproc-per-node", str(ranks), *argv]
                self._agents.append(
                    subprocess.Popen(
                        world.command(host, line),
                        env={name: value for name, value in variables.items() if value is not None},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    @property
    def output(self) -> str:
        """What all have printed so far, agent by agent."""
        logs = [Path(self._scratch.name, str(agent)) for agent in range(len(self._agents))]
        return "\n".join(log.read_text(errors="replace") for log in logs)

    def wait(self, timeout: float) -> Ended:
        """Wait for the end of all agents.

        Raises:
            TimeoutError: if they do not end in time.
        """
        end = time.monotonic() + timeout
        while [agent for agent in self._agents if agent.poll() is None]:
            if time.monotonic() > end:
                raise TimeoutError(f"the agents have not ended after {timeout:.0f} s:\n{self.output}")
            time.sleep(0.01)
        return Ended([agent.returncode for agent in self._agents], self.output, time.monotonic())

    def left(self) -> list[str]:
        """What is left when all agents have ended: processes that do not end, and files in /dev/shm of any host."""
        self.world.do(None, "touch", "/run/go")  # for children that wait for the end of the job
        processes = [command_line(pid) for pid in wait_for_end(self.world.processes(), PATIENCE_S)]
        return processes + [name for host in self.world.names for name in self.world.do(host, "ls", "/dev/shm").split()]

    def wait_for(self, text: str, count: int, timeout: float) -> None:
        """Wait until the output holds ``text`` so many times.

        Raises:
            TimeoutError: if it does not in time.
        """
        end = time.monotonic() + timeout
        while self.output.count(text) < count:
            if time.monotonic() > end:
                raise TimeoutError(f"no {count} times {text!r} after {timeout:.0f} s:\n{self.output}")
            time.sleep(0.05)

    def close(self) -> None:
        """End all; a second call does nothing."""
        self.world.end_processes()
        for agent in self._agents:
            agent.wait(10)
        self._scratch.cleanup()
