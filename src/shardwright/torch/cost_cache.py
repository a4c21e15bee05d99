"""Measured costs, kept between the runs of a machine."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from shardwright.torch.context import Context
from shardwright.torch.machine import cores_of_host, device_name
from shardwright.torch.measure import Timing

__all__ = ["CostCache", "cache_folder", "machine_key"]

log = logging.getLogger(__name__)

# Another one for another meaning of what is in the file.
_FORMAT = 3


def cache_folder() -> Path:
    """Where measured costs are kept: ``$SHARDWRIGHT_CACHE``, else ``$XDG_CACHE_HOME/shardwright``."""
    if own := os.environ.get("SHARDWRIGHT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwright"


def machine_key(context: Context) -> str:
    """The same for machines on which units cost the same: device, versions, ranks and cores of a host."""
    described = [
        _FORMAT,
        device_name(context.device),
        torch.__version__,
        torch.get_num_threads(),
        context.local_size,
        cores_of_host(),
    ]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


class CostCache:
    """The file with the timings of cost classes on machines like this; none with ``SHARDWRIGHT_CACHE=off``.

    Args:
        context: of the run, whose machine is meant.
    """

    def __init__(self, context: Context):
        self._off = os.environ.get("SHARDWRIGHT_CACHE") == "off"
        self._file = cache_folder() / "profile" / f"{machine_key(context)}.json"

    def read(self) -> dict[str, Timing]:
        """Timings by cost class; none where there is no file, or one that cannot be read."""
        if self._off:
            return {}
        try:
            return {key: Timing(**found) for key, found in json.loads(self._file.read_text()).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def add(self, fresh: Mapping[str, Timing], *, to: Mapping[str, Timing]) -> None:
        """Keeps `fresh` timings beside those that it is added `to`, and no others."""
        if self._off:
            return
        content = {key: asdict(timing) for key, timing in {**to, **fresh}.items()}
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._file.with_suffix(f".tmp-{os.getpid()}")
            temporary.write_text(json.dumps(content, indent=1))
            temporary.replace(self._file)
        except OSError as error:
            log.warning("measured costs cannot be kept in %s: %s", self._file, error)
