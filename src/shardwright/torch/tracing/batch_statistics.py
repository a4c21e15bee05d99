"""Layers whose training depends on how a batch is cut: their statistics are over the samples that they see.

::

    loop over the batch         x[0:32] ─► mean, variance of 32 samples
    loop over 8 microbatches    x[0:4]  ─► mean, variance of 4 samples, running statistics moved 8 times

Batch norms are known by their class, with subclasses of other libraries. Layers of a script's own are found
in the trace: they change a buffer of floating-point numbers, and reduce something over the samples.
"""

import logging
from collections.abc import Iterable

from torch import Tensor, nn

from shardwright.config import Config
from shardwright.errors import UsageError
from shardwright.planner import statistics_are_split, statistics_of_whole_batch
from shardwright.torch._private import BatchNormBase
from shardwright.torch.batch.batch import Batch
from shardwright.torch.counting.cost_counter import CostCounter
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.pytorch.tree import leaves
from shardwright.torch.tracing.calls.traced_call import Outcome

__all__ = ["BatchStatistics", "TracedStatistics", "is_of_spectral_norm", "layers_with_statistics"]

log = logging.getLogger(__name__)


def layers_with_statistics(model: nn.Module) -> list[str]:
    """Names of the batch norms that normalise, or update their running statistics, by what they see now."""
    return [name for name, module in model.named_modules() if _uses_batch(module)]


def _uses_batch(module: nn.Module) -> bool:
    if not isinstance(module, BatchNormBase):
        return False
    follows = module.track_running_stats and module.training
    # An instance norm has a mean for each sample, and only follows those of the batch.
    normalises = not _is_instance_norm(module) and (module.training or module.running_mean is None)
    return follows or normalises


def _is_instance_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)


class TracedStatistics:
    """Finds the layers while a step function is traced."""

    def __init__(self) -> None:
        self._units: list[tuple[str, Outcome]] = []
        self._norms: list[tuple[str, CostCounter]] = []
        self._reduced_between: set[int] = set()

    def note_unit(self, name: str, outcome: Outcome) -> None:
        """Records the call of a unit."""
        counted = outcome.cost
        if counted.normalises or (outcome.written_names and any(counted.reduced)):
            self._units.append((name, outcome))

    def note_operation(self, outcome: Outcome, *, line: str) -> None:
        """Records an operation between units."""
        if outcome.cost.normalises:
            self._norms.append((f"batch_norm at {line}", outcome.cost))
        if any(t.numel() > 1 for t in leaves(outcome.output) if isinstance(t, Tensor)):  # no loss
            self._reduced_between |= outcome.cost.reduced

    def layers(self, unit_map: UnitMap, state: Iterable[str], *, samples: int) -> tuple[str, ...]:
        """Names of the layers, in the order of the modules; of batch norms without a module, the lines.

        Args:
            unit_map: of the model.
            state: names of the buffers that the code between units changes.
            samples: of a microbatch.
        """

        def are_over_batch(reduced: Iterable[int]) -> bool:
            return any(size and size % samples == 0 for size in reduced)

        model = unit_map.model
        known = layers_with_statistics(model)
        found = set(known)
        for name, outcome in self._units:
            if not are_over_batch(outcome.cost.reduced):
                continue
            owners = _owners(unit_map, outcome.written_names)
            if samples > 1:  # every number is a multiple of one
                found |= owners
            if outcome.cost.normalises and not owners and not any(_is_inside(each, name) for each in known):
                found.add(name)
        if samples > 1 and are_over_batch(self._reduced_between):
            found |= _owners(unit_map, state)
        if not known:  # a module's own is one of these
            found.update(line for line, counted in self._norms if are_over_batch(counted.reduced))
        order = [name for name, _ in model.named_modules()]
        return tuple(dict.fromkeys((*(name for name in order if name in found), *sorted(found - set(order)))))


def _owners(unit_map: UnitMap, names: Iterable[str]) -> set[str]:
    """The modules, batch norms left out, that hold the buffers of floating-point numbers among these."""
    specs = [unit_map.specs[name] for name in names]
    floats = (spec.name for spec in specs if spec.is_buffer and "float" in spec.spec.dtype)
    places = (name.rpartition(".") for name in floats)
    return {path for path, _, key in places if not _is_known(unit_map.model.get_submodule(path), key)}


def is_of_spectral_norm(module: nn.Module, key: str) -> bool:
    """Whether a buffer is a vector of a spectral norm, which follows a weight in it."""
    of_hook = f"{key.rpartition('_')[0]}_orig" in module._parameters
    return of_hook or type(module).__name__ == "_SpectralNorm"


def _is_known(module: nn.Module, key: str) -> bool:
    """Whether a buffer is that of a batch norm or of a spectral norm."""
    return isinstance(module, BatchNormBase) or is_of_spectral_norm(module, key)


def _is_inside(name: str, unit: str) -> bool:
    return name == unit or name.startswith(f"{unit}.")


class BatchStatistics:
    """Says once, when a model is first trained, of which samples its statistics are.

    Args:
        config: whether they must be those of the batch.
        prints: whether this rank says it.
    """

    def __init__(self, config: Config, *, prints: bool):
        self._config = config
        self._prints = prints
        self._traced: tuple[str, ...] = ()
        self._is_done = False

    def note(self, layers: Iterable[str]) -> None:
        """Records layers that a trace has shown."""
        self._traced = tuple(dict.fromkeys((*self._traced, *layers)))

    def training_begins(self, model: nn.Module, batch: Batch, *, microbatches: int) -> None:
        """Checks a batch with gradients, before its first microbatch.

        Args:
            model: the user's.
            batch: that of this replica.
            microbatches: parts into which it is cut.

        Raises:
            UsageError: they must be those of the batch, and the batch is cut.
        """
        if self._is_done or not model.training:
            return
        self._is_done = True
        layers = tuple(dict.fromkeys((*layers_with_statistics(model), *self._traced)))
        if microbatches == 1 or not layers:
            return
        if self._config.batch_statistics == "batch":
            raise UsageError(statistics_of_whole_batch(layers, microbatches))
        if self._prints:
            samples = batch.num_samples or 0
            log.warning(
                "%s", statistics_are_split(layers, samples=-(-samples // microbatches), batch=samples)
            )
