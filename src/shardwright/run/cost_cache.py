"""Caches measured costs between the runs of a machine."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shardwright.errors import UsageError
from shardwright.files import UserFile, replace_file
from shardwright.quantities import cores_of_host
from shardwright.run.context import Context
from shardwright.run.machine import device_name
from shardwright.run.timing import Timing

log = logging.getLogger(__name__)

# Another one for another meaning of what is in the file.
_FORMAT = 3

_MOST_S = 1e6


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


class CostCache:
    """The file with timings of cost classes on machines like this; none with ``SHARDWRIGHT_CACHE=off``."""

    def __init__(self, context: Context, *, framework: str = ""):
        self._off = os.environ.get("SHARDWRIGHT_CACHE") == "off"
        self._file = cache_folder() / "profile" / f"{machine_key(context, framework=framework)}.json"

    def read(self) -> dict[str, Timing]:
        """Timings by cost class; none where there is no file, or one that cannot be read."""
        if self._off:
            return {}
        if not self._file.exists():
            return {}
        try:
            found = UserFile(self._file, what="measured costs", error=UsageError).read_json()
            return {key: _timing(timing) for key, timing in found.items()}
        except (UsageError, TypeError, AttributeError, ValueError) as error:
            log.warning("%s: measured anew", error if isinstance(error, UsageError) else self._file)
            return {}

    def add(self, fresh: Mapping[str, Timing], *, to: Mapping[str, Timing]) -> None:
        """Keeps `fresh` timings beside those that it is added `to`, and no others."""
        if self._off:
            return
        content = {key: asdict(timing) for key, timing in {**to, **fresh}.items()}
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._file, json.dumps(content, indent=1))
        except OSError as error:
            log.warning("measured costs cannot be kept in %s: %s", self._file, error)


def _timing(found: Any) -> Timing:
    """A timing of the file."""
    timing = Timing(**found)
    if not isinstance(timing.inferred, bool):
        raise TypeError("inferred is no truth value")
    numbers = {name: value for name, value in asdict(timing).items() if name != "inferred"}
    seconds = [value for value in numbers.values() if value is not None]
    if any(isinstance(value, bool) or not 0 <= value <= _MOST_S for value in seconds):
        raise ValueError("seconds that are none")
    return timing
