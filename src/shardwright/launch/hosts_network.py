"""A network of hosts inside this machine, made of network namespaces.

::

    ┌ host 0 ───────────┐                           ┌ host 1 ───────────┐
    │ eth0 10.77.0.1    │                           │ eth0 10.77.0.2    │
    └───┬───────────────┘                           └───┬───────────────┘
        │ veth pair, a rate limit on either end         │
    ┌───┴───────────────── switch, a bridge ────────────┴───┐
    └────────────────────────────────────────────────────────┘

Switch and hosts are namespaces of their own: nothing outside them changes. A second process ends them, with
everything that runs in them, when their maker closes them or ends.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from shardwright.errors import UsageError

_SUBNET = "10.77.0"
_INTERFACE = "eth0"
_MOST_HOSTS = 200

# A bucket of tokens this long: a larger one lets bursts pass above the rate, a smaller one wastes some of it.
_BURST_S = 0.002
_LEAST_BURST_BYTES = 64 * 1024
_QUEUE_S = 0.2

# A process that is told to end takes a moment, and may have started another one meanwhile.
_MOST_LOOKS = 100
_PAUSE_S = 0.02

# Ends what runs in the namespaces, and then the namespaces, as soon as its standard input ends: when the
# network is closed, and also when the process that made it is killed.
_CLEANER = """
import sys
from shardwright.launch.hosts_network import remove
sys.stdin.read(1)
for name in sys.argv[1:]:
    remove(name)
"""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that went over a host's link, with all headers."""

    sent_bytes: int
    received_bytes: int

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        """The traffic since then."""
        return Traffic(self.sent_bytes - earlier.sent_bytes, self.received_bytes - earlier.received_bytes)


def missing_for_networks() -> str | None:
    """Names what this machine lacks for networks of hosts; None if it has everything."""
    if sys.platform != "linux":
        return f"{sys.platform} has no network namespaces"
    missing = [tool for tool in ("ip", "tc") if _path_of(tool) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be found (apt install iproute2)"
    if os.geteuid() != 0:
        return "it takes root to make network namespaces"
    name = f"sw-probe-{uuid.uuid4().hex[:8]}"
    try:
        _run("ip", "netns", "add", name)
    except UsageError as error:
        return str(error)
    _run("ip", "netns", "del", name)
    return None


class HostsNetwork:
    """Hosts and the links between them, while a ``with`` statement lasts.

    Attributes:
        namespaces: their names, and that of the switch.
    """

    def __init__(self, num_hosts: int, *, rate_bit_per_s: float | None = None):
        if not 1 <= num_hosts <= _MOST_HOSTS:
            raise UsageError(f"a network has 1 to {_MOST_HOSTS} hosts, not {num_hosts}.")
        missing = missing_for_networks()
        if missing is not None:
            raise UsageError(f"this machine cannot have a network of hosts: {missing}.")
        self.num_hosts = num_hosts
        self._rate_bit_per_s = rate_bit_per_s
        identity = uuid.uuid4().hex[:8]
        self._switch = f"sw-{identity}-switch"
        self._names = [f"sw-{identity}-host{number}" for number in range(num_hosts)]
        self.namespaces = (*self._names, self._switch)
        self._cleaner: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._cleaner = subprocess.Popen(
            [sys.executable, "-c", _CLEANER, *self.namespaces],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is not for it
        )
        try:
            self._build()
            self.set_rate(self._rate_bit_per_s)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._cleaner is not None:
            # A byte, since children of this process may hold on to the pipe.
            _, errors = self._cleaner.communicate(b"x")
            failed, self._cleaner = self._cleaner.returncode != 0, None
            if failed:
                raise UsageError(
                    f"the namespaces {', '.join(self.namespaces)} could not be removed: "
                    f"{errors.decode(errors='replace').strip()}. Remove them with: ip netns del NAME"
                )

    def address(self, host: int) -> str:
        return f"{_SUBNET}.{host + 1}"

    @property
    def interface(self) -> str:
        """The name of the network interface, the same on all hosts."""
        return _INTERFACE

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        return [_path_of("ip") or "ip", "netns", "exec", self._names[host], *argv]

    def set_rate(self, rate_bit_per_s: float | None) -> None:
        """Limits every link, in either direction; None takes the limits away."""
        for host in range(self.num_hosts):
            self.set_rate_of(host, rate_bit_per_s)

    def set_rate_of(self, host: int, rate_bit_per_s: float | None) -> None:
        """Limits the link of one host, in either direction."""
        for name, interface in ((self._names[host], _INTERFACE), (self._switch, f"port{host}")):
            if rate_bit_per_s is None:
                with contextlib.suppress(UsageError):  # there was none
                    _run("tc", "-n", name, "qdisc", "del", "dev", interface, "root")
                continue
            burst = max(_LEAST_BURST_BYTES, int(rate_bit_per_s / 8 * _BURST_S))
            queue = burst + int(rate_bit_per_s / 8 * _QUEUE_S)
            _run(
                *("tc", "-n", name, "qdisc", "replace", "dev", interface, "root", "tbf"),
                *("rate", f"{int(rate_bit_per_s)}bit", "burst", str(burst), "limit", str(queue)),
            )

    def cut(self, host: int) -> None:
        """Takes the link of a host away, as if its cable were drawn."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "up")

    def end_all(self, host: int) -> None:
        end_all_in(self._names[host])

    def traffic(self, host: int) -> Traffic:
        """The bytes over a host's link since the network was made."""
        shown = _run("ip", "-n", self._names[host], "-s", "-j", "link", "show", _INTERFACE)
        (link,) = json.loads(shown)
        counted = link["stats64"]
        return Traffic(counted["tx"]["bytes"], counted["rx"]["bytes"])

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge0", "up")
        for host, name in enumerate(self._names):
            port = f"port{host}"
            _run("ip", "netns", "add", name)
            _run(
                *("ip", "-n", self._switch, "link", "add", port, "type", "veth"),
                *("peer", "name", _INTERFACE, "netns", name),
            )
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge0", "up")
            _run("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", _INTERFACE)
            _run("ip", "-n", name, "link", "set", _INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")


def end_all_in(namespace: str) -> None:
    for _ in range(_MOST_LOOKS):
        try:
            found = _run("ip", "netns", "pids", namespace)
        except UsageError:  # there is no such namespace
            return
        if not found:
            return
        for pid in found.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(_PAUSE_S)


def remove(namespace: str) -> None:
    """Ends everything that runs in a network namespace, and the namespace."""
    end_all_in(namespace)
    with contextlib.suppress(UsageError):  # it was never made
        _run("ip", "netns", "del", namespace)


def _path_of(tool: str) -> str | None:
    """The path of a tool; few users have the folders of the administrator in theirs."""
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def _run(tool: str, *arguments: str) -> str:
    command = [_path_of(tool) or tool, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
