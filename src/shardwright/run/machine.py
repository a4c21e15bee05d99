"""Describes the current machines as a `Cluster`, and caches what was measured on them."""

import hashlib
import json
import logging
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.cluster import Cluster, Device, Link
from shardwright.cluster.named import host_memory_bytes
from shardwright.comm.joining.process_group import tell_all, tell_from
from shardwright.comm.local_peers import LocalPeers
from shardwright.comm.transport import Transport
from shardwright.errors import UsageError
from shardwright.files import UserFile, replace_file
from shardwright.quantities import cores_of_host
from shardwright.run.context import Context
from shardwright.run.memory import give_back_freed_memory
from shardwright.run.timing import Timing

_SMALL_BYTES, _LARGE_BYTES = 4 * 1024, 1024 * 1024
# Networks take bursts faster than what follows them: where a large message takes less than this, a larger one
# is timed.
_LONG_S, _LARGER_BYTES = 0.02, 8 * 1024 * 1024
_MESSAGES = 5
# Products of a few milliseconds, on CPUs and GPUs, tell how fast hosts are; by less they differ by chance.
_PRODUCT_SIZE = (512, 4096)
_PRODUCTS = 15
_UNLIKE = 1.2

T = TypeVar("T")
_Number = TypeVar("_Number", int, float)


class UpdateCosts(NamedTuple):
    """How fast a rank updates parameters."""

    bytes_a_second: float = 0.0
    parameter_s: float = 0.0


def present_cluster(
    context: Context, update_costs: Callable[[Context], UpdateCosts] | None = None
) -> Cluster:
    """Describes the machines of this job; collective over all ranks.

    Links are timed with a few messages between the first two ranks of a host, and between the first two
    hosts.
    """
    estimates = context.config.profile == "estimated"
    cores = cores_of_host() // max(1, torch.get_num_threads()) if context.device.type == "cpu" else 0
    shared = context.from_first_rank(
        lambda: context.links.transport is not None and bool(context.links.transport.local)
    )
    local = context.links.local_peers if shared else None
    intra = _time_link(context, 1, local) if context.local_size > 1 else None
    per_node = context.local_size
    inter = _time_link(context, per_node, local) if context.mesh.world_size > per_node else None
    if context.links.local_peers is not None:
        context.links.local_peers.shrink()  # the model's messages may be smaller than those
    give_back_freed_memory()
    update = UpdateCosts()
    if update_costs is not None and not estimates:
        found = context.from_all_ranks(tuple(update_costs(context)))
        update = UpdateCosts(*min((each for each in found if each[0]), default=update))
    return Cluster(
        device=Device(
            name=device_name(context.device),
            memory_bytes=_least(context, memory_of_rank(context)),
            update_Bps=update.bytes_a_second,
            update_s=update.parameter_s,
        ),
        ranks_per_node=per_node,
        cores_per_node=max(1, cores) if context.device.type == "cpu" else 0,
        intra_node=intra or inter or Link(latency_s=0.0, bandwidth_Bps=1e12),
        inter_node=inter or intra or Link(latency_s=0.0, bandwidth_Bps=1e12),
        slowness=_slowness(context),
    )


def _least(context: Context, mine: _Number) -> _Number:
    """Of what all ranks have: a plan must suit each of them. What is 0 is not known, and does not count."""
    found = context.from_all_ranks(mine)
    return min((each for each in found if each), default=mine)


def _slowness(context: Context) -> tuple[float, ...]:
    """The slowness of hosts against the mean of all ranks; empty if they are alike, or there is one."""
    per_node, world_size = context.local_size, context.mesh.world_size
    if world_size <= per_node or context.config.profile == "estimated":
        return ()
    dist.barrier()
    seconds = tell_all(seconds_of_products(context.device))
    mean = statistics.fmean(seconds)
    hosts = [seconds[first : first + per_node] for first in range(0, world_size, per_node)]
    found = tuple(statistics.fmean(host) / mean for host in hosts)
    return found if max(found) > _UNLIKE * min(found) else ()


def seconds_of_products(device: torch.device) -> float:
    """The median of some matrix products, while all ranks do the same."""
    size = _PRODUCT_SIZE[device.type == "cuda"]
    matrix = torch.ones(size, size, device=device)
    return statistics.median(seconds_of(lambda: matrix @ matrix, device, runs=_PRODUCTS))


def seconds_of(call: Callable[[], object], device: torch.device, *, runs: int) -> list[float]:
    """Seconds of some calls behind a first one, which warms up."""
    times = []
    for _ in range(1 + runs):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start)
    return times[1:]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """A name for people: the GPU's, or the CPU's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def memory_of_rank(context: Context) -> int:
    """Memory that one rank may use: the GPU's, or its share of the host's, or of its container's."""
    if context.device.type == "cuda":
        return int(torch.cuda.get_device_properties(context.device).total_memory)
    return host_memory_bytes() // context.local_size


def _time_link(context: Context, other: int, local: LocalPeers | None) -> Link:
    """Sends messages of two sizes to and fro, the way of the pipeline's; the same result on every rank."""
    pair = (0, other)
    transport = None
    if context.rank in pair:
        transport = Transport(pair, rank=pair.index(context.rank), local=local)

    def timed(num_bytes: int) -> tuple[float, float]:
        return _time_messages(context, transport, num_bytes)

    small_s, _ = timed(_SMALL_BYTES)
    large_bytes = _LARGE_BYTES
    large_s, busy_s = timed(large_bytes)
    if large_s < _LONG_S:
        large_bytes = _LARGER_BYTES
        large_s, busy_s = timed(large_bytes)
    bandwidth = (large_bytes - _SMALL_BYTES) / max(large_s - small_s, 1e-9)
    return Link(
        latency_s=max(small_s - _SMALL_BYTES / bandwidth, 0.0),
        bandwidth_Bps=bandwidth,
        occupancy=min(1.0, busy_s / large_s) if context.device.type == "cpu" else 0.0,
    )


def _time_messages(context: Context, transport: Transport | None, num_bytes: int) -> tuple[float, float]:
    """Seconds of a message one way, and those for which it keeps a core busy: as the first rank has them."""
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=context.device)
    times, busy_times = [], []
    for _ in range(_MESSAGES + 1):
        start, worked = time.perf_counter(), time.process_time()
        if transport is not None:
            _to_and_fro(transport, message, begins=context.rank == 0)
        _wait(context.device)
        times.append((time.perf_counter() - start) / 2)
        busy_times.append((time.process_time() - worked) / 2)
    measured = (min(times[1:]), statistics.median(busy_times[1:]))  # the first one opens the connection
    message_s, busy_s = tell_from(0, measured)
    return float(message_s), float(busy_s)


def _to_and_fro(transport: Transport, message: Tensor, *, begins: bool) -> None:
    other = 1 if begins else 0
    if begins:
        transport.send(message, other)
    transport.post_receive(message.shape, other, dtype=message.dtype, device=message.device).wait()
    if not begins:
        transport.send(message, other)
    transport.flush()


log = logging.getLogger(__name__)

# Another one for another meaning of what is in the file.
_FORMAT = 3


def cache_folder() -> Path:
    """The folder of measured costs: ``$SHARDWRIGHT_CACHE``, else ``$XDG_CACHE_HOME/shardwright``."""
    if own := os.environ.get("SHARDWRIGHT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwright"


def machine_key(context: Context, *, framework: str = "") -> str:
    """The same for machines on which units cost the same: device, versions, ranks and cores of a host."""
    described: list[Any] = [
        _FORMAT,
        device_name(context.device),
        torch.__version__,
        torch.get_num_threads(),
        context.local_size,
        cores_of_host(),
        *([framework] if framework else []),
    ]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


class CacheFile(Generic[T]):
    """What runs have found out, by name, for later ones; no file with ``SHARDWRIGHT_CACHE=off``."""

    def __init__(self, name: str, kind: Callable[..., T], *, what: str):
        self._file = None if os.environ.get("SHARDWRIGHT_CACHE") == "off" else cache_folder() / f"{name}.json"
        self._kind, self._what = kind, what

    def read(self) -> dict[str, T]:
        """All entries; none where there is no file, or one that cannot be read."""
        if self._file is None or not self._file.exists():
            return {}
        try:
            found = UserFile(self._file, what=self._what, error=UsageError).read_json()
            return {key: self._entry(numbers) for key, numbers in found.items()}
        except (UsageError, TypeError, AttributeError, ValueError) as error:
            log.warning("%s: found out anew", error if isinstance(error, UsageError) else self._file)
            return {}

    def _entry(self, numbers: Any) -> T:
        entry: Any = self._kind(**numbers)
        for field in fields(entry):
            value = getattr(entry, field.name)
            is_sound = isinstance(value, bool) if field.type is bool else type(value) in (int, float)
            if value is not None and not (is_sound and 0 <= value < math.inf):
                raise ValueError(f"{field.name} is {value}")
        found: T = entry
        return found

    def write(self, entries: Mapping[str, T]) -> None:
        """Keeps these entries, and no others."""
        if self._file is not None:
            content: dict[str, Any] = {key: asdict(each) for key, each in entries.items()}  # type: ignore[call-overload]
            keep(self._file, json.dumps(content, indent=1), what=self._what)


def keep(file: Path, text: str, *, what: str) -> None:
    """Writes a file of the cache, if that can be written to."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, text)
    except OSError as error:
        log.warning("%s cannot be kept for later runs in %s: %s", what, file, error)


def cost_cache(context: Context, *, framework: str = "") -> CacheFile[Timing]:
    """Timings of cost classes on machines like this."""
    key = machine_key(context, framework=framework)
    return CacheFile(f"profile/{key}", Timing, what="measured costs")
