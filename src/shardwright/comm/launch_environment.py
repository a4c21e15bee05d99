"""The position of a process among all that run the same script, and reading it from variables with checks."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.errors import LaunchError
from shardwright.quantities import MOST_NODES, MOST_RANKS
from shardwright.text import control_in, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """The position of a process among all that run the same script.

    Attributes:
        master_addr: host of the key-value store at which the ranks meet.
        restart_count: how often the launcher has started the ranks anew.
        launcher_serves_store: the launcher runs that store; otherwise rank 0 has to.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    restart_count: int = 0
    launcher_serves_store: bool = False
    source: str

    def __post_init__(self) -> None:
        if max(self.world_size, self.num_nodes) > MOST_RANKS:
            self._refuse(
                f"the world size is {self.world_size}, the number of nodes {self.num_nodes}, and at most "
                f"{MOST_RANKS} go"
            )
        if (control := control_in(self.master_addr)) is not None:
            self._refuse(f"the address of the master is {shown(self.master_addr)}, which has {control} in it")
        for name, value, limit_name, limit in (
            ("rank", self.rank, "world size", self.world_size),
            ("local rank", self.local_rank, "local world size", self.local_world_size),
            ("node rank", self.node_rank, "number of nodes", self.num_nodes),
        ):
            if not 0 <= value < limit:
                self._refuse(
                    f"{name} {value} is not in 0 to {limit - 1}, although the {limit_name} is {limit}"
                )
        if self.local_world_size > self.world_size:
            self._refuse(f"local world size {self.local_world_size} exceeds world size {self.world_size}")
        if self.restart_count < 0:
            self._refuse(f"the number of restarts is {self.restart_count}")
        if not 0 < self.master_port < 2**16:
            self._refuse(f"port {self.master_port} of the master is not in 1 to 65535")

    def _refuse(self, what: str) -> None:
        raise LaunchError(
            f"{self.source}: {what}. Correct these variables, or unset them to run a single process."
        )

    def __str__(self) -> str:
        nodes = f" on node {self.node_rank} of {self.num_nodes}" if self.num_nodes > 1 else ""
        return f"rank {self.rank} of {self.world_size}{nodes} (from {self.source})"


_NUMBER = re.compile(r"\s*[-+]?[0-9]{1,18}\s*")  # int() takes more: 1_000, and other scripts' digits


class Variables:
    """Environment variables of which some are numbers and some belong together; an empty one counts as unset.

    >>> Variables({"RANK": "3"}).number("RANK")
    3
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, *names: str) -> str | None:
        """The first of these variables that is set."""
        return next((self._environ[name] for name in names if self._environ.get(name)), None)

    def number(self, *names: str) -> int | None:
        """The first of these variables that is set, as a number."""
        name = next((name for name in names if self._environ.get(name)), None)
        if name is None:
            return None
        value = self._environ[name]
        if _NUMBER.fullmatch(value) is None:
            raise LaunchError(f"{name} is {shown(value)}, which is not a whole number. Correct or unset it.")
        return int(value)

    def required_number(self, name: str, *, because: str) -> int:
        """A variable that must be set, as a number."""
        value = self.number(name)
        if value is None:
            raise LaunchError(
                f"{because} is set but {name} is not. Set both, or neither for a single process."
            )
        return value

    def count(self, name: str, *, because: str) -> int:
        """A number of ranks, or of hosts, that must be set; raises as `required_number`."""
        value = self.required_number(name, because=because)
        if not 1 <= value <= MOST_RANKS:
            raise LaunchError(
                f"{name} is {value}, but it must be from 1 to {MOST_RANKS}. Correct or unset it."
            )
        return value

    def port(self, *names: str) -> int | None:
        """The first of these variables that is set, as a port."""
        value = self.number(*names)
        if value is not None and not 0 < value < 2**16:
            raise LaunchError(f"{names[-1]} is {value}, but a port is from 1 to 65535. Correct or unset it.")
        return value

    def together(self, *names: str) -> bool:
        """Says whether variables that belong together are set."""
        there = [name for name in names if self._environ.get(name)]
        missing = [name for name in names if name not in there]
        if there and missing:
            raise LaunchError(
                f"{_list(there)} set but {_list(missing)} not. "
                "Set all of them, or none to run a single process."
            )
        return bool(there)


def _list(names: list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} are"


_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand_hosts(text: str) -> list[str]:
    """Expands a list such as ``SLURM_NODELIST`` holds.

    >>> expand_hosts("login,gpu[01-03,7]-ib")
    ['login', 'gpu01-ib', 'gpu02-ib', 'gpu03-ib', 'gpu7-ib']
    >>> expand_hosts("rack[1-2]n[0-1]")
    ['rack1n0', 'rack1n1', 'rack2n0', 'rack2n1']
    """
    names = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not names or ",".join(names) != text:
        raise LaunchError(f"{shown(text)} is not a list of hosts. Slurm writes one as in gpu[01-04,7],login.")
    hosts: list[str] = []
    for name in names:
        # Looked at first: gpu[0-99999999999] has more hosts than there is memory.
        if len(hosts) + _hosts_in(name) > MOST_NODES:
            raise LaunchError(f"the list of hosts {shown(text)} has more than {MOST_NODES} hosts.")
        hosts += _expand(name, text)
    return hosts


def _hosts_in(name: str) -> int:
    return math.prod(
        sum(_count(part) for part in brackets.split(",")) for brackets in re.findall(r"\[([^\[\]]*)\]", name)
    )


def _count(part: str) -> int:
    match = _RANGE.fullmatch(part)
    return 1 if match is None or match[2] is None else max(0, int(match[2]) - int(match[1]) + 1)


def _expand(name: str, text: str) -> list[str]:
    match = re.search(r"\[([^\[\]]*)\]", name)
    if match is None:
        return [name]
    before, after = name[: match.start()], _expand(name[match.end() :], text)
    return [f"{before}{number}{rest}" for number in _numbers(match[1], text) for rest in after]


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise LaunchError(
                f"{shown(part)} in the list of hosts {shown(text)} is not a number or a range such as 01-04."
            )
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
