"""Expands Slurm's short form of a list of hosts."""

import math
import re

from shardwright.errors import LaunchError
from shardwright.limits import MOST_NODES
from shardwright.printable import shown

__all__ = ["expand_hosts"]

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
