"""The memory of the current host, or its container's share of it."""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from pydantic import TypeAdapter

from shardwright.cluster.cluster import Accelerator, Inventory, NodeKind
from shardwright.errors import ConfigError
from shardwright.files.documents import parse_yaml
from shardwright.quantities import MOST_NODES, cores_of_host
from shardwright.text import shown

# Of cgroups, version 2 and 1; in a container, its own.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory_bytes(limits: tuple[str, ...] = _LIMITS) -> int:
    """Bytes that the processes of this host, or container, may use together; 0: not known."""
    try:
        known = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
    for path in limits:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if text.isdecimal():  # without a limit: max, or a number beyond all memory
            known = min(known, int(text))
    return known


THIS_CPU = "this-cpu"
"""The machine that this runs on, with typical rates; ``shardwright probe`` measures them."""

_CORE_FLOPS_PER_S, _CORE_MEMORY_BPS = 5e10, 1e10
_CPU_LINK_BPS, _CPU_LINK_LATENCY_S = 2e9, 5e-5
_CPU_NETWORK_BPS, _CPU_NETWORK_LATENCY_S = 1.25e9, 1e-4  # 10 Gbit/s
_UNKNOWN_MEMORY = 8 * 2**30

_MOST_DIGITS = 12
_TERM = re.compile(
    r"(?P<name>[\w.-]*[a-z][\w.-]*?)(?:(?:\s*\*\s*|\s+x\s+)(?P<number>[-+\w.]+))?"
    r"(?:\s*@\s*(?P<network>[\w.]+(?:\s*[\w/]+)?))?",
    re.IGNORECASE,
)


@lru_cache(maxsize=1)
def node_kinds() -> Mapping[str, NodeKind]:
    folder = files("shardwright.cluster").joinpath("presets")
    accelerators, nodes = (
        parse_yaml(folder.joinpath(name).read_text(encoding="utf-8"))
        for name in ("accelerators.yaml", "nodes.yaml")
    )
    chips = {name: {**fields, "name": name, "source": "data sheet"} for name, fields in accelerators.items()}
    kinds = TypeAdapter(dict[str, NodeKind]).validate_python(
        {
            name: {
                **fields,
                "name": name,
                "accelerator": chips[fields["accelerator"]],
                "source": "data sheet",
            }
            for name, fields in nodes.items()
        }
    )
    return {**kinds, THIS_CPU: _this_cpu()}


def parse_inventory(text: str) -> Inventory:
    """Machines from a text.

    Args:
        text: names of kinds of nodes, each with how many there are of it (one, if it is not said), joined
            by ``+``; ``p4d.24xlarge x 4`` is the same as ``p4d.24xlarge*4``. ``@10Gbit`` behind one is the
            rate of a node's network.

    Raises:
        ConfigError: a name is not known (the nearest are given), or a number is none or out of range.

    >>> machines = parse_inventory("p4d.24xlarge*4 + p5.48xlarge")
    >>> machines.num_ranks, machines.num_nodes
    (40, 5)
    >>> parse_inventory("dgx-h100*2@10Gbit").nodes[0][0].network_Bps
    1250000000.0
    """
    nodes = []
    for term in text.split("+"):
        match = _TERM.fullmatch(term.strip())
        if match is None:
            raise ConfigError(
                f"{shown(term.strip())} in {shown(text)} is not a kind of node and a number, such as "
                "p4d.24xlarge*4."
            )
        kind = kind_called(match["name"])
        if match["network"]:
            rate = match["network"].strip()
            kind = replace(kind, name=f"{kind.name}@{rate}", network_Bps=_rate(rate))
        nodes.append((kind, _number(match["number"], text)))
    return Inventory(name=" + ".join(f"{kind.name} x {number}" for kind, number in nodes), nodes=tuple(nodes))


def kind_called(name: str) -> NodeKind:
    kinds = node_kinds()
    plain = name.lower()
    if plain in kinds:
        return kinds[plain]
    # "h100", "8xh100": machines are named, and each has several of these.
    chip = re.sub(r"^\d+x", "", plain)
    of_it = [kind for kind in kinds.values() if kind.accelerator.name.lower().partition("-")[0] == chip]
    if of_it:
        found = ", ".join(f"{kind.name} ({kind.num_accelerators} of it)" for kind in of_it)
        raise ConfigError(f"{shown(name)} is an accelerator, and machines have several. Name these: {found}.")
    near = difflib.get_close_matches(plain, kinds, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(kinds)}."
    raise ConfigError(f"there are no machines called {shown(name)}; {hint}")


_RATE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<prefix>[MGT])(?P<unit>bit|bps|b|B)(?:/s|ps)?")
_PREFIXES = {"M": 1e6, "G": 1e9, "T": 1e12}


def _rate(text: str) -> float:
    """Bytes a second."""
    match = _RATE.fullmatch(text.strip())
    number = 0.0 if match is None else float(match["number"])
    if match is None or not number:
        raise ConfigError(
            f"{shown(text.strip())} is no rate of a network; such are 10Gbit and 50GB (a second)."
        )
    return number * _PREFIXES[match["prefix"]] / (1 if match["unit"] == "B" else 8)


def _number(text: str | None, whole: str) -> int:
    if text is None:
        return 1
    # Python refuses to read numbers of thousands of digits.
    if not text.isdecimal() or len(text) > _MOST_DIGITS or not 1 <= int(text) <= MOST_NODES:
        raise ConfigError(
            f"{shown(text)} in {shown(whole)} is not a number of nodes: take 1 to {MOST_NODES}."
        )
    return int(text)


def _this_cpu() -> NodeKind:
    """The machine that this runs on: a rank for each core, with rates that are typical for one."""
    cores = cores_of_host()
    memory = host_memory_bytes() or _UNKNOWN_MEMORY
    core = Accelerator(
        name="CPU core",
        family="cpu",
        flops_per_s=dict.fromkeys(("float32", "bfloat16", "float16"), _CORE_FLOPS_PER_S),
        memory_bytes=memory // cores,
        memory_Bps=_CORE_MEMORY_BPS,
        source="typical",
    )
    return NodeKind(
        name=THIS_CPU,
        accelerator=core,
        num_accelerators=cores,
        link_Bps=_CPU_LINK_BPS,
        link_latency_s=_CPU_LINK_LATENCY_S,
        network_Bps=_CPU_NETWORK_BPS,
        network_latency_s=_CPU_NETWORK_LATENCY_S,
        memory_bytes=memory,
        cores=cores,
        source="typical",
    )
