"""Remembers the plan of the last run of a script, so that the next run gets the same.

The number of microbatches changes results: random masks, batch statistics, the weights of unequal
microbatches. So it stays what it was, as long as script, model, batch, ranks, machine and settings do.
Beside the plan stand the factors by which its units took longer in steps than planned (`PlanReview`), each
with the seconds that it corrects: a unit that was timed anew needs another factor, or none. A digest of the
code tells whether the model can be traced in the units of that plan, without a run that finds them.
"""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from torch import nn

from shardwright.cluster.host_memory import host_memory_bytes
from shardwright.errors import ShardwrightError, UsageError
from shardwright.files import UserFile, replace_file
from shardwright.plan import Plan
from shardwright.torch.counting.cost_counter import class_key
from shardwright.torch.measuring.cost_cache import cache_folder, machine_key
from shardwright.torch.run.context import Context

__all__ = ["LastPlan"]

log = logging.getLogger(__name__)

_KEPT = 200
"""Plans of one machine; those that were used last."""

_MOST_FACTOR = 1e6

_DRIFT = 0.15
"""By which the seconds of a unit may differ from those that its factor corrects, beside the other units'."""


class LastPlan:
    """The plan of the last run like this one, in a file beside the measured costs.

    Args:
        context: of the run.
        model: the whole model.
        samples: of a batch of one replica.
    """

    def __init__(self, context: Context, model: nn.Module, *, samples: int):
        self._context = context
        off = os.environ.get("SHARDWRIGHT_CACHE") == "off"
        name = Path(machine_key(context)) / f"{self._key(model, samples)}.json"
        self._file = None if off else cache_folder() / "plans" / name
        self._factors_file = None if off else cache_folder() / "units" / name
        self._code_file = None if off else cache_folder() / "code" / name
        self._code = _code_of(model)

    def read(self) -> Plan | None:
        """The plan; None where there was no such run, or its file cannot be read. On the first rank."""
        if self._file is None or self._context.config.plan_anew or not self._file.is_file():
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
            _keep(self._file, plan.to_json(), what="the plan")
            _keep(self._code_file, json.dumps(self._code), what="a digest of the script")

    @property
    def is_of_this_code(self) -> bool:
        """Whether the last run had the same script, classes and attributes. On the first rank."""
        try:
            return self._code_file is not None and json.loads(self._code_file.read_text()) == self._code
        except (OSError, ValueError):
            return False

    @property
    def is_kept(self) -> bool:
        """Whether the next run will know of this one."""
        return self._file is not None

    def read_factors(self, timed_s: Mapping[str, float]) -> dict[str, float]:
        """Factors on the seconds of unit calls, by label; none where no run has written any.

        Left out are factors of units that now take another share of all seconds. The sum may be another one:
        a machine that is busier, or less so, changes what its units take by one factor.

        Args:
            timed_s: seconds of unit calls now, without factors, by label.
        """
        file = self._factors_file
        if file is None or self._context.config.plan_anew or not file.is_file():
            return {}
        try:
            found = UserFile(file, what="factors of units", error=UsageError).read_json()
            factors = {str(label): (float(factor), float(s)) for label, (factor, s) in found.items()}
        except (ShardwrightError, TypeError, AttributeError, ValueError) as error:
            log.info("factors of units are not used: %s", error)
            return {}
        if not all(1 / _MOST_FACTOR <= factor <= _MOST_FACTOR and s > 0 for factor, s in factors.values()):
            return {}
        drifts = {label: timed_s[label] / s for label, (_, s) in factors.items() if label in timed_s}
        level = median(drifts.values()) if drifts else 1.0
        return {
            label: factors[label][0]
            for label, drift in drifts.items()
            if abs(drift - level) <= _DRIFT * level
        }

    def write_factors(self, factors: Mapping[str, float], *, timed_s: Mapping[str, float]) -> None:
        """Keeps factors on the seconds of unit calls for the next run. On the first rank.

        Args:
            factors: by label.
            timed_s: the seconds that they correct, by label.
        """
        if self._factors_file is not None:
            kept = {
                label: [float(f"{factor:.4g}"), timed_s[label]]
                for label, factor in factors.items()
                if timed_s.get(label)
            }
            _keep(self._factors_file, json.dumps(kept, indent=1), what="the times of units")

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
    """A digest of the script, and of the classes and attributes of the model."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    script = Path(main).read_bytes() if main and Path(main).is_file() else b""
    return hashlib.sha256(script + class_key(model).encode()).hexdigest()[:16]


def _keep(file: Path, text: str, *, what: str) -> None:
    """Writes a file of the cache, and removes those that were not used for longest."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, text)
        by_age = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in by_age[:-_KEPT]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be kept for the next run in %s: %s", what, file, error)
