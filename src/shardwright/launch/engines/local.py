"""Training jobs on this machine: plain processes, or the hosts of a cluster inside it."""

import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping

from shardwright.comm.joining.run_secret import SECRET, has_secret, new_secret
from shardwright.errors import ConfigError
from shardwright.launch.engines.engine import HostCommand, ProcessesJob, prepared_run_folder
from shardwright.launch.hosts_network import HostsNetwork
from shardwright.launch.job_spec import JobSpec, own_environ
from shardwright.launch.placement import LOCAL, gpus_here
from shardwright.launch.ranks.rank_environment import as_json, host_names
from shardwright.launch.running_job import RunningJob
from shardwright.quantities import cores_of_host

_PORT = 29500
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_RATE = re.compile(r"\s*([\d.]+)\s*([kmg]?)(?:bit|bps|bit/s|b/s)?\s*", re.IGNORECASE)


class Local:
    """Processes of this machine. Each of several hosts is a group of them: ``algo-1``, ``algo-2``, ..."""

    is_here = True
    sees_files = True

    def manifest(self, spec: JobSpec) -> str:
        commands = _commands(spec, endpoint=f"127.0.0.1:{_PORT}", interface=None, environ={})
        return "\n".join([*_said_of_secret(spec), *(_line(spec, command) for command in commands)])

    def start(self, spec: JobSpec, *, waits: bool) -> RunningJob:
        endpoint = f"127.0.0.1:{_free_port()}" if spec.num_hosts > 1 else ""
        commands = _commands(spec, endpoint=endpoint, interface=None, environ=os.environ)
        with prepared_run_folder(spec) as lock:
            return ProcessesJob(spec, commands, ends_with_parent=waits, lock=lock)

    def __repr__(self) -> str:
        return "Local()"


class LocalCluster:
    """Hosts inside of this machine, each with a network link of its own (it takes root and iproute2).

    Args:
        bandwidth: of each host's link in either direction, as a number of bit/s or text such as
            ``"1 Gbit/s"``; None for no limit.

    Raises:
        ConfigError: the bandwidth cannot be read.
    """

    is_here = True
    sees_files = True

    def __init__(self, *, bandwidth: float | str | None = None) -> None:
        self.rate_bit_per_s = _rate(bandwidth)

    def manifest(self, spec: JobSpec) -> str:
        """The command line of each host, after what its network namespace is called here."""
        commands = _commands(spec, endpoint=f"10.77.0.1:{_PORT}", interface="eth0", environ={})
        rate = "no limit" if self.rate_bit_per_s is None else f"{self.rate_bit_per_s / 1e9:g} Gbit/s"
        lines = [f"# {spec.num_hosts} network namespaces with a link of {rate} each", *_said_of_secret(spec)]
        for host, command in enumerate(commands):
            lines.append(f"ip netns exec host{host} sh -c {shlex.quote(_line(spec, command))}")
        return "\n".join(lines)

    def start(self, spec: JobSpec, *, waits: bool) -> RunningJob:
        with prepared_run_folder(spec) as lock:
            return self._start(spec, lock, waits=waits)

    def _start(self, spec: JobSpec, lock: int, *, waits: bool) -> RunningJob:
        network = HostsNetwork(spec.num_hosts, rate_bit_per_s=self.rate_bit_per_s)
        network.__enter__()
        try:
            endpoint = f"{network.address(0)}:{_PORT}"
            commands = _commands(spec, endpoint=endpoint, interface=network.interface, environ=os.environ)
            placed = [
                HostCommand(network.command(host, command.words), command.environ)
                for host, command in enumerate(commands)
            ]
            return ProcessesJob(spec, placed, ends_with_parent=waits, lock=lock, close=network.close)
        except BaseException:
            network.close()
            raise

    def __repr__(self) -> str:
        return f"LocalCluster(bandwidth={self.rate_bit_per_s!r})"


def _commands(
    spec: JobSpec, *, endpoint: str, interface: str | None, environ: Mapping[str, str]
) -> list[HostCommand]:
    hosts = host_names(spec.num_hosts)
    whole = own_environ(spec, environ)
    whole |= {"SM_HOSTS": as_json(hosts)}
    if spec.num_hosts > 1:
        # The launcher of a host divides all cores of the machine among its own ranks.
        whole.setdefault("OMP_NUM_THREADS", str(max(1, cores_of_host() // spec.num_ranks)))
    if spec.num_hosts > 1 and environ and not has_secret(whole):  # of one host its launcher makes it
        whole[SECRET] = new_secret()
    if interface is not None:
        whole["GLOO_SOCKET_IFNAME"] = interface
    if spec.instance_type == LOCAL:
        whole["CUDA_VISIBLE_DEVICES"] = ""
    commands = []
    for host, name in enumerate(hosts):
        words = spec.words_of_launcher(python=sys.executable, node_rank=str(host), endpoint=endpoint)
        own = {"SM_CURRENT_HOST": name, **_gpus_of_host(spec, host, environ)}
        commands.append(HostCommand(words, {**whole, **own}))
    return commands


def _said_of_secret(spec: JobSpec) -> list[str]:
    """A line of a manifest, in which the secret must not stand."""
    if spec.num_hosts == 1:
        return []
    return [f"# export {SECRET}=...: made at the start, the same for all hosts"]


def _gpus_of_host(spec: JobSpec, host: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Hosts that share this machine share no GPU."""
    if spec.num_hosts == 1 or spec.instance_type == LOCAL or spec.device == "cpu" or not gpus_here():
        return {}
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    devices = listed.split(",") if listed else [str(number) for number in range(gpus_here())]
    each = spec.processes_per_host
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[host * each : (host + 1) * each])}


def _line(spec: JobSpec, command: HostCommand) -> str:
    variables = [f"{name}={value}" for name, value in command.environ.items()]
    return f"cd {shlex.quote(str(spec.source_dir))} && {shlex.join(['env', *variables, *command.words])}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _rate(bandwidth: float | str | None) -> float | None:
    if bandwidth is None:
        return None
    match = _RATE.fullmatch(str(bandwidth))
    try:
        rate = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    except ValueError:
        rate = 0.0
    if rate <= 0:
        raise ConfigError(
            f"bandwidth is {bandwidth!r}, but it must be a rate of more than 0, as a number of bit/s or "
            'such as "1 Gbit/s".'
        )
    return rate
