"""Remembers the temporary memory of cost classes between runs.

Counting it takes half of a trace: each class runs forward and backward once or twice more. What was counted
follows from the class alone, whatever the machine.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import astuple

import torch

from shardwright import __version__
from shardwright.errors import UsageError
from shardwright.files import UserFile, replace_file
from shardwright.run.context import Context
from shardwright.run.cost_cache import cache_folder
from shardwright.torch.tracing.calls.working_memory import WorkingMemory

__all__ = ["MemoryCache"]

log = logging.getLogger(__name__)

# Another one for another way to count.
_FORMAT = 1


class MemoryCache:
    """The file with the temporary memory of cost classes; none with ``SHARDWRIGHT_CACHE=off``.

    Args:
        context: of the run.
    """

    def __init__(self, context: Context):
        self._off = os.environ.get("SHARDWRIGHT_CACHE") == "off"
        described = [_FORMAT, __version__, torch.__version__, context.device.type]
        key = hashlib.sha256(repr(described).encode()).hexdigest()[:16]
        self._file = cache_folder() / "memory" / f"{key}.json"

    def read(self) -> dict[str, WorkingMemory]:
        """Temporary memory by cost class; none where there is no file, or one that cannot be read.

        Without gradients there is none, either: what was counted has a backward.
        """
        if self._off or not torch.is_grad_enabled() or not self._file.exists():
            return {}
        try:
            found = UserFile(self._file, what="counted memory", error=UsageError).read_json()
            return {key: _memory(numbers) for key, numbers in found.items()}
        except (UsageError, TypeError, AttributeError, ValueError) as error:
            log.warning("%s: counted anew", error if isinstance(error, UsageError) else self._file)
            return {}

    def write(self, memory: Mapping[str, WorkingMemory]) -> None:
        """Keeps what is known, which `read` has given a part of."""
        if self._off or not torch.is_grad_enabled():
            return
        known = {key: astuple(each) for key, each in memory.items() if each.weight_bytes is not None}
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._file, json.dumps(known, indent=1))
        except OSError as error:
            log.warning("counted memory cannot be kept in %s: %s", self._file, error)


def _memory(numbers: list[int]) -> WorkingMemory:
    """What the file says of a class.

    Raises:
        TypeError, ValueError: it says something else.
    """
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("bytes that are none")
    work_bytes, weight_bytes, split_work_bytes = numbers
    return WorkingMemory(work_bytes, weight_bytes, split_work_bytes)
