"""Running statistics of batch norms that ``torch.utils.checkpoint`` computes a second time in the backward.

The second forward updates them again. A plain loop does so right after the first one, a pipeline when other
microbatches have updated them in between::

    plain loop   F0 R0 B0  F1 R1 B1          s <- (1 - m) s + m x0, twice, then twice with x1
    pipeline     F0 F1  R0 B0  R1 B1         x0, x1, x0, x1

So both updates are made in the first forward, as one with the momentum 1 - (1 - m)^2, and none in the second.
That takes a batch norm that a microbatch calls once, under the checkpoint. Other buffers are left as they
are, with a warning; vectors of a spectral norm, by which the loss is another, are refused.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn

from shardwright.errors import TraceError
from shardwright.torch._private import BatchNormBase
from shardwright.torch.pytorch.source_line import outermost_checkpoint
from shardwright.torch.tracing.batch_statistics import is_of_spectral_norm

__all__ = [
    "RecomputedStatistics",
    "RepeatedBuffers",
    "refuse_recomputed_vectors",
    "warn_of_recomputed_buffers",
]

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
        """Records a call of a unit, or an operation between units.

        Args:
            node: of the graph.
            again: names of buffers that are changed a second time if the call has a backward.
            once: names of those that are changed otherwise, too.
            undecided: names of those that are so if something with gradients comes after it.
            has_gradient: the result of the call has.
        """
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
        """Name -> whether the buffer is changed once in the forward, and so a second time.

        Args:
            contributing: the nodes that have a backward.
        """
        once = self._once.union(name for _, name in self._undecided)
        return {
            name: len(nodes) == 1 and name not in once
            for name, nodes in self._again.items()
            if any(node in contributing for node in nodes)
        }


class RecomputedStatistics:
    """Batch norms whose forward is recomputed.

    Args:
        model: the model.
        repeated: of each microbatch, the buffers that are changed a second time, and whether just so.
    """

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
    """Refuses that a spectral norm is computed again when further microbatches have changed its vectors.

    Args:
        model: the model.
        repeated: names of the buffers that are changed a second time.

    Raises:
        TraceError: one is.
    """
    for name in repeated:
        path, _, key = name.rpartition(".")
        if is_of_spectral_norm(model.get_submodule(path), key):
            raise TraceError(
                "the forward that torch.utils.checkpoint repeats in the backward computes a spectral norm "
                f"({name}) a second time. A single process does so before the next microbatch, a pipeline "
                f"after some more of them, and both its loss and its gradients would be others. {_REMEDY}"
            )


def warn_of_recomputed_buffers(model: nn.Module, repeated: Mapping[str, bool]) -> None:
    """Warns of buffers whose second change cannot be made in the first forward.

    Args:
        model: the model.
        repeated: from `RepeatedBuffers.names`.
    """
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
