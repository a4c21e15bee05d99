"""A cluster on one machine: several hosts, each with its own link, and ranks on each.

::

    from shardwright.testing.cluster import Cluster

    with Cluster(hosts=2, ranks_per_host=2, rate_bit_per_s=1e9) as machines:
        before = machines.traffic()
        machines.torchrun(["train.py"], timeout_s=60)
        print(machines.traffic()[0] - before[0])        # bytes over the link of host 0

It needs root and iproute2 (`missing_for_networks` says what is missing). Only rates are limited: latencies
are those of one machine.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from shardwright.errors import LaunchError, UsageError
from shardwright.launch.hosts_network import HostsNetwork, Traffic, missing_for_networks

__all__ = ["Cluster", "Traffic", "_HostOutcome", "missing_for_networks"]

_PORT = 29500
_POLL_S = 0.02
# Those whose peer has failed get so long to notice it and to say so.
_GRACE_S = 10.0
_SHOWN = 3000


@dataclass(frozen=True, slots=True)
class _HostOutcome:
    """The outcome of one host's command.

    Attributes:
        exit_code: of the command; minus the number of the signal that ended it; None where it was stopped
            because the time was up.
        output: what it wrote, standard error included.
    """

    host: int
    exit_code: int | None
    output: str
    seconds: float


class Cluster:
    """Hosts of this machine, while a ``with`` statement lasts.

    Args:
        hosts: how many.
        ranks_per_host: ranks that `torchrun` starts on each.
        rate_bit_per_s: of each host's link, in either direction; None for no limit.
        own_cores: each host has cores that no other has, as real ones do; else all share the cores.

    Raises:
        UsageError: this machine cannot have one.

    Attributes:
        network: the hosts and their links: rates, addresses, cables to be drawn.
    """

    def __init__(
        self,
        *,
        hosts: int = 2,
        ranks_per_host: int = 1,
        rate_bit_per_s: float | None = None,
        own_cores: bool = False,
    ):
        self._cores = _cores_of_hosts(hosts) if own_cores else None
        self.network = HostsNetwork(hosts, rate_bit_per_s=rate_bit_per_s)
        self.ranks_per_host = ranks_per_host

    def __enter__(self) -> Self:
        self.network.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.network.close()

    def traffic(self) -> list[Traffic]:
        """The bytes over each host's link."""
        return [self.network.traffic(host) for host in range(self.network.num_hosts)]

    def torchrun(
        self, script: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None
    ) -> list[str]:
        """Runs a script with `ranks_per_host` ranks on each host.

        Args:
            script: its path and arguments, or ``["-m", "module"]``.
            timeout_s: stops all hosts after so long.
            env: environment variables, on top of those of this process.

        Returns:
            What each host wrote.

        Raises:
            LaunchError: a host failed, or the time was up.
        """
        commands = [
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", str(self.network.num_hosts), "--node-rank", str(host)),
                *("--nproc-per-node", str(self.ranks_per_host)),
                *("--master-addr", self.network.address(0), "--master-port", str(_PORT)),
                *script,
            ]
            for host in range(self.network.num_hosts)
        ]
        outcomes = self.run(commands, timeout_s=timeout_s, env=env)
        failed = [outcome for outcome in outcomes if outcome.exit_code != 0]
        if failed:
            raise LaunchError("\n".join(map(_told, failed)))
        return [outcome.output for outcome in outcomes]

    def _on_its_cores(self, host: int, command: Sequence[str]) -> Sequence[str]:
        return command if self._cores is None else ["taskset", "--cpu-list", self._cores[host], *command]

    def run(
        self,
        commands: Sequence[Sequence[str]],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
    ) -> list[_HostOutcome]:
        """Runs a command on each host, at the same time.

        When one fails, the others get some seconds to notice it.

        Args:
            timeout_s: stops all of them after so long.
            env: environment variables, on top of those of this process.
        """
        whole = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": self.network.interface,
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        with tempfile.TemporaryDirectory(prefix="shardwright-hosts-") as folder:
            files = [Path(folder, f"host{host}") for host in range(len(commands))]
            processes = []
            try:
                for host, command in enumerate(commands):
                    with files[host].open("wb") as output:
                        processes.append(
                            subprocess.Popen(
                                self.network.command(host, self._on_its_cores(host, command)),
                                env=whole,
                                stdin=subprocess.DEVNULL,
                                stdout=output,
                                stderr=subprocess.STDOUT,
                            )
                        )
                ends = _wait(processes, timeout_s=timeout_s)
            finally:
                for host, process in enumerate(processes):
                    process.kill()  # it may not have entered its namespace yet
                    self.network.end_all(host)  # torchrun gives its workers sessions of their own
                    process.wait()
            return [
                _HostOutcome(host, code, files[host].read_text(errors="replace"), seconds)
                for host, (code, seconds) in enumerate(ends)
            ]


def _cores_of_hosts(hosts: int) -> list[str]:
    """The cores of each host, as ``taskset`` takes them."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // hosts
    if not each or shutil.which("taskset") is None:
        raise UsageError(
            f"{hosts} hosts with cores of their own need {hosts} cores and taskset (of util-linux), but here "
            f"are {len(cores)} cores. Take fewer hosts, or own_cores=False."
        )
    return [",".join(map(str, cores[host * each : (host + 1) * each])) for host in range(hosts)]


def _wait(
    processes: Sequence["subprocess.Popen[bytes]"], *, timeout_s: float
) -> list[tuple[int | None, float]]:
    """The exit code of each, None where the time was up, and how long it ran."""
    start_s = time.monotonic()
    deadline_s = start_s + timeout_s
    ends: dict[int, tuple[int | None, float]] = {}
    while len(ends) < len(processes) and time.monotonic() < deadline_s:
        for number, process in enumerate(processes):
            code = process.poll()
            if code is not None and number not in ends:
                ends[number] = (code, time.monotonic() - start_s)
                if code:
                    deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_S)
    seconds = time.monotonic() - start_s
    return [ends.get(number, (None, seconds)) for number in range(len(processes))]


def _told(outcome: _HostOutcome) -> str:
    how = (
        "was stopped, because the time was up or another host had failed"
        if outcome.exit_code is None
        else f"ended with exit code {outcome.exit_code}"
    )
    return f"host {outcome.host} {how} after {outcome.seconds:.1f} s:\n{outcome.output[-_SHOWN:]}"
