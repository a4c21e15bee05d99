"""What is remembered between runs: the last plan, the memory of cost classes.

Counting it takes half of a trace: each class runs forward and backward once or twice more. What was counted
follows from the class alone, whatever the machine.

The number of microbatches changes results: random masks, batch statistics, the weights of unequal
microbatches. So it stays what it was, as long as script, model, batch, ranks, machine and settings do.
A digest of the code tells whether the model can be traced in the units of that plan, without a run that finds
them.
"""

import hashlib
import json
import logging
import os
import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn

from shardwright import __version__
from shardwright.cluster.named import host_memory_bytes
from shardwright.config.config import ANEW
from shardwright.errors import ShardwrightError
from shardwright.plan import Plan
from shardwright.run.context import Context
from shardwright.run.machine import CacheFile, cache_folder, keep, machine_key
from shardwright.torch.counting.cost_counter import class_key
from shardwright.torch.python_state.attribute_watch import plain_attributes
from shardwright.torch.tracing.working_memory import WorkingMemory

log = logging.getLogger(__name__)

# Another one for another way to count.
_FORMAT = 2


def memory_cache(context: Context) -> CacheFile[WorkingMemory]:
    """Temporary memory by cost class."""
    described = [_FORMAT, __version__, torch.__version__, context.device.type]
    key = hashlib.sha256(repr(described).encode()).hexdigest()[:16]
    return CacheFile(f"memory/{key}", WorkingMemory, what="counted memory")


_KEPT = 200
"""Plans of one machine; those that were used last."""


class LastPlan:
    """The plan of the last run like this one, in a file beside the measured costs."""

    def __init__(self, context: Context, model: nn.Module, *, samples: int):
        self._context = context
        off = os.environ.get("SHARDWRIGHT_CACHE") == "off"
        name = Path(machine_key(context)) / f"{self._key(model, samples)}.json"
        self._file = None if off else cache_folder() / "plans" / name
        self._code_file = None if off else cache_folder() / "code" / name
        self._code = _code_of(model) if context.rank == 0 and not off else ""

    def read(self) -> Plan | None:
        """The plan; None where there was no such run, or its file cannot be read. On the first rank."""
        if self._file is None or self._context.config.plan == ANEW or not self._file.is_file():
            return None
        try:
            plan = Plan.read(self._file, what="the plan of the last run")
            plan.check_world(self._context.mesh.world_size)
        except ShardwrightError as error:
            log.info("planned anew: %s", error)
            return None
        return plan

    def write(self, plan: Plan) -> None:
        """Keeps a plan for the next run. On the first rank."""
        if self._file is not None and self._code_file is not None:
            _keep(self._file, plan.to_json())
            _keep(self._code_file, json.dumps(self._code))

    @property
    def is_of_this_code(self) -> bool:
        """Whether the last run had the same script, classes and attributes. On the first rank."""
        try:
            return self._code_file is not None and json.loads(self._code_file.read_text()) == self._code
        except (OSError, ValueError):
            return False

    def _key(self, model: nn.Module, samples: int) -> str:
        config, mesh = self._context.config, self._context.mesh
        main = getattr(sys.modules["__main__"], "__file__", None)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        described = [
            main and str(Path(main).absolute()),
            [(name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in tensors],
            [type(module).__qualname__ for module in model.modules()],
            samples,
            host_memory_bytes(),
            repr(mesh),
            {name: repr(value) for name, value in config.pins.items()},
        ]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


def _code_of(model: nn.Module) -> str:
    """A digest of what the model does: its classes and attributes, the script with its arguments and modules.

    Packages that are installed count by the classes of the model alone.
    """
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    own = sorted(file for file in files if file and not file.startswith(installed))
    stats = [(file, found.st_size, found.st_mtime_ns) for file in own if (found := _stat(file)) is not None]
    attributes = sorted(map(repr, plain_attributes(list(model.modules())).items()))
    described = [stats, __version__, sys.argv[1:], class_key(model), attributes]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


def _stat(file: str | Path) -> os.stat_result | None:
    try:
        return os.stat(file)
    except OSError:
        return None


def _keep(file: Path, text: str) -> None:
    """Writes a file of the cache, and removes those that were not used for longest."""
    keep(file, text, what="the plan")
    # Another run may remove one meanwhile.
    ages = [(found.st_mtime, path) for path in file.parent.glob("*.json") if (found := _stat(path))]
    for _, old in sorted(ages)[:-_KEPT]:
        old.unlink(missing_ok=True)
