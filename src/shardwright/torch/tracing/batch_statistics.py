"""Batch norms, whose training depends on how a batch is cut, and buffers that change a second time.

::

    loop over the batch         x[0:32] ─► mean, variance of 32 samples
    loop over 8 microbatches    x[0:4]  ─► mean, variance of 4 samples, running statistics moved 8 times

Batch norms are known by their class, with subclasses of other libraries, calls of ``F.batch_norm`` by a
trace.
"""

import logging
import warnings
from collections.abc import Iterable

from torch import nn

from shardwright.errors import TraceError
from shardwright.planner import statistics_are_split
from shardwright.torch._private.modules import BatchNormBase
from shardwright.torch.batch.batch import Batch

log = logging.getLogger(__name__)

_INSTANCE_NORMS = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d


def layers_with_statistics(model: nn.Module, traced: Iterable[str] = ()) -> tuple[str, ...]:
    """Names of the batch norms that normalise, or update their running statistics, by what they see now.

    Of what a trace has seen to normalise, units with such a module are left out, and lines that may be its.
    """
    known = [name for name, module in model.named_modules() if _uses_batch(module)]
    names = {name for name, _ in model.named_modules()}
    units = [each for each in traced if each in names]
    found = [unit for unit in units if not any(f"{name}.".startswith(f"{unit}.") for name in known)]
    lines = [each for each in traced if each not in names and not known]
    return (*known, *found, *lines)


def _uses_batch(module: nn.Module) -> bool:
    if not isinstance(module, BatchNormBase):
        return False
    follows = module.track_running_stats and module.training
    # An instance norm has a mean for each sample, and only follows those of the batch.
    normalises = not isinstance(module, _INSTANCE_NORMS) and (module.training or module.running_mean is None)
    return follows or normalises


def is_of_spectral_norm(module: nn.Module, key: str) -> bool:
    """Whether a buffer is a vector of a spectral norm, which follows a weight in it."""
    of_hook = f"{key.rpartition('_')[0]}_orig" in module._parameters
    return of_hook or type(module).__name__ == "_SpectralNorm"


class BatchStatistics:
    """Says once, when a model is first trained, of which samples its statistics are."""

    def __init__(self, *, prints: bool):
        self._prints = prints
        self._is_done = False

    def training_begins(
        self, model: nn.Module, batch: Batch, *, microbatches: int, traced: Iterable[str] = ()
    ) -> None:
        """Checks a batch with gradients, before its first microbatch."""
        if self._is_done or not model.training:
            return
        self._is_done = True
        layers = tuple(dict.fromkeys((*layers_with_statistics(model), *traced)))
        if microbatches == 1 or not layers:
            return
        if self._prints:
            samples = batch.num_samples or 0
            log.warning(
                "%s", statistics_are_split(layers, samples=-(-samples // microbatches), batch=samples)
            )


_REMEDY = (
    "Call sw.set_activation_checkpointing(module) in place of torch.utils.checkpoint: it changes buffers "
    "once."
)


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


def warn_of_recomputed_buffers(model: nn.Module, repeated: Iterable[str]) -> None:
    """Warns of buffers that the second forward changes again, behind the first ones of other microbatches."""
    others = [name for name in repeated if not _is_count(model, name)]
    if others:
        warnings.warn(
            f"the forward that torch.utils.checkpoint repeats in the backward changes buffers ({others[0]}"
            f"{f' and {len(others) - 1} more' if len(others) > 1 else ''}) a second time. A single process "
            "does so before the next microbatch, a pipeline after some more of them, so their values may "
            f"differ a little. {_REMEDY}",
            stacklevel=2,
        )


def _is_count(model: nn.Module, buffer: str) -> bool:
    """Whether it counts batches, in whatever order."""
    path, _, key = buffer.rpartition(".")
    return key == "num_batches_tracked" and isinstance(model.get_submodule(path), BatchNormBase)
