"""Layers whose training depends on how a batch is cut, and statistics computed a second time.

::

    loop over the batch         x[0:32] ─► mean, variance of 32 samples
    loop over 8 microbatches    x[0:4]  ─► mean, variance of 4 samples, running statistics moved 8 times

Batch norms are known by their class, with subclasses of other libraries. Layers of a script's own are found
in the trace: they change a buffer of floating-point numbers, and reduce something over the samples.

The second forward updates them again. A plain loop does so right after the first one, a pipeline when other
microbatches have updated them in between::

    plain loop   F0 R0 B0  F1 R1 B1          s <- (1 - m) s + m x0, twice, then twice with x1
    pipeline     F0 F1  R0 B0  R1 B1         x0, x1, x0, x1

So both updates are made in the first forward, as one with the momentum 1 - (1 - m)^2, and none in the second.
That takes a batch norm that a microbatch calls once, under the checkpoint. Other buffers are left as they
are, with a warning; vectors of a spectral norm, by which the loss is another, are refused.
"""

import logging
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn

from shardwright.errors import TraceError
from shardwright.planner import statistics_are_split
from shardwright.torch._private import BatchNormBase
from shardwright.torch.batch.batch import Batch
from shardwright.torch.counting.cost_counter import CostCounter
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.pytorch.modules import outermost_checkpoint
from shardwright.torch.pytorch.tree import leaves
from shardwright.torch.tracing.traced_call import Outcome

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
        """Names of the layers, in the order of the modules; of batch norms without a module, the lines."""

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
    """Says once, when a model is first trained, of which samples its statistics are."""

    def __init__(self, *, prints: bool):
        self._prints = prints
        self._traced: tuple[str, ...] = ()
        self._is_done = False

    def note(self, layers: Iterable[str]) -> None:
        """Records layers that a trace has shown."""
        self._traced = tuple(dict.fromkeys((*self._traced, *layers)))

    def training_begins(self, model: nn.Module, batch: Batch, *, microbatches: int) -> None:
        """Checks a batch with gradients, before its first microbatch."""
        if self._is_done or not model.training:
            return
        self._is_done = True
        layers = tuple(dict.fromkeys((*layers_with_statistics(model), *self._traced)))
        if microbatches == 1 or not layers:
            return
        if self._prints:
            samples = batch.num_samples or 0
            log.warning(
                "%s", statistics_are_split(layers, samples=-(-samples // microbatches), batch=samples)
            )


_MOMENTUM = "momentum"
_REMEDY = (
    "Call sw.set_activation_checkpointing(module) in place of torch.utils.checkpoint: it changes buffers "
    "once."
)


class RepeatedBuffers:
    """Collects, in a trace, which buffers ``torch.utils.checkpoint`` changes a second time."""

    def __init__(self) -> None:
        self._again: dict[str, list[int]] = {}
        self._once: set[str] = set()
        self._undecided: list[tuple[FrameType, str]] = []

    def note(
        self,
        node: int,
        *,
        again: Iterable[str] = (),
        once: Iterable[str] = (),
        undecided: Iterable[str] = (),
        has_gradient: bool,
    ) -> None:
        """Records a call of a unit, or an operation between units."""
        frame = outermost_checkpoint()
        for name in again:
            self._again.setdefault(name, []).append(node)
        self._once.update(once)
        if frame is None:
            self._once.update(undecided)
            return
        self._undecided += [(frame, name) for name in undecided]
        if has_gradient:
            for name in [name for other, name in self._undecided if other is frame]:
                self._again.setdefault(name, []).append(node)
            self._undecided = [(other, name) for other, name in self._undecided if other is not frame]

    @property
    def are_undecided(self) -> bool:
        """Whether it depends on what comes next if some are changed a second time."""
        return bool(self._undecided)

    def names(self, contributing: Collection[int]) -> dict[str, bool]:
        """Name -> whether the buffer is changed once in the forward, and so a second time."""
        once = self._once.union(name for _, name in self._undecided)
        return {
            name: len(nodes) == 1 and name not in once
            for name, nodes in self._again.items()
            if any(node in contributing for node in nodes)
        }


class RecomputedStatistics:
    """Batch norms whose forward is recomputed."""

    def __init__(self, model: nn.Module, repeated: Sequence[Mapping[str, bool]]):
        names = dict.fromkeys(name for each in repeated for name in each)
        found = (_owner(model, name) for name in names if all(each.get(name) for each in repeated))
        self._places: list[dict[str, Any]] = [vars(m) for m in dict.fromkeys(found) if m is not None]
        self._own: list[float] = [place[_MOMENTUM] for place in self._places]
        self._both: list[float] = [1 - (1 - momentum) ** 2 for momentum in self._own]
        self._none = [0.0] * len(self._places)

    @contextmanager
    def updated(self, *, forward: bool) -> Iterator[None]:
        """Has a forward make both updates, and a backward none."""
        self._set(self._both if forward else self._none)
        try:
            yield
        finally:
            self._set(self._own)

    def _set(self, momenta: list[float]) -> None:
        for place, momentum in zip(self._places, momenta, strict=True):
            place[_MOMENTUM] = momentum


def refuse_recomputed_vectors(model: nn.Module, repeated: Iterable[str]) -> None:
    """Refuses that a spectral norm is computed again when further microbatches have changed its vectors."""
    for name in repeated:
        path, _, key = name.rpartition(".")
        if is_of_spectral_norm(model.get_submodule(path), key):
            raise TraceError(
                "the forward that torch.utils.checkpoint repeats in the backward computes a spectral norm "
                f"({name}) a second time. A single process does so before the next microbatch, a pipeline "
                f"after some more of them, and both its loss and its gradients would be others. {_REMEDY}"
            )


def warn_of_recomputed_buffers(model: nn.Module, repeated: Mapping[str, bool]) -> None:
    """Warns of buffers whose second change cannot be made in the first forward."""
    others = [
        name
        for name, just_so in repeated.items()
        if not _is_count(model, name) and not (just_so and _owner(model, name) is not None)
    ]
    if others:
        warnings.warn(
            f"the forward that torch.utils.checkpoint repeats in the backward changes buffers ({others[0]}"
            f"{f' and {len(others) - 1} more' if len(others) > 1 else ''}) a second time. A single process "
            "does so before the next microbatch, a pipeline after some more of them, so their values may "
            f"differ a little. {_REMEDY}",
            stacklevel=2,
        )


def _owner(model: nn.Module, buffer: str) -> nn.Module | None:
    """The batch norm that has a running mean or variance.

    None for another buffer, and where the momentum follows from a count (``momentum=None``).
    """
    path, _, key = buffer.rpartition(".")
    module = model.get_submodule(path)
    known = isinstance(module, BatchNormBase) and key in ("running_mean", "running_var")
    return module if known and isinstance(vars(module).get(_MOMENTUM), float | int) else None


def _is_count(model: nn.Module, buffer: str) -> bool:
    """Whether it counts batches, in whatever order."""
    path, _, key = buffer.rpartition(".")
    return key == "num_batches_tracked" and isinstance(model.get_submodule(path), BatchNormBase)
