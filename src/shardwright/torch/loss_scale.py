"""Scales the loss, so that small 16-bit gradients do not round to zero; the same on all ranks.

The loss is multiplied by a factor before the backward, and gradients are divided by it in 32 bits. If a
gradient overflows on any rank of the job, no rank updates and a dynamic scale falls; it grows again after
many steps without overflow.

`torch.amp.GradScaler` looks for infinities in the gradients of its own rank. The stages of a pipeline hold
different gradients, and so do ranks that shard parameters: they would disagree on whether to step. This
scaler has them agree before any rank steps.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.run.context import context, is_initialized
from shardwright.torch.parameters.sharded_tensor import own_part
from shardwright.torch.tensor_parallel.divided_tensor import local_of


@dataclass(slots=True, kw_only=True)
class LossScaler:
    """A loss scale, and how it changes.

    Attributes:
        delayed_shift: overflows that it takes to fall.
        consecutive_hysteresis: an update without overflow forgets the overflows before it.
        overflow: the gradients of the last step, or of one that they were added to, overflowed on some rank.
    """

    scale: float = 2.0**16
    dynamic: bool = True
    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 1
    consecutive_hysteresis: bool = False
    overflow: bool = False
    _overflows_left: int = 0
    _good_updates: int = 0
    _is_judged: bool = True

    def __post_init__(self) -> None:
        if not self.scale > 0 or not self.min_scale > 0 or self.scale_factor <= 1:
            raise UsageError(
                f"a loss scale of {self.scale:g}, at least {self.min_scale:g}, with a factor of "
                f"{self.scale_factor:g} cannot work: scales are above 0 and the factor is above 1."
            )
        self._overflows_left = self.delayed_shift

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on as another one was when ``dataclasses.asdict`` was made of it."""
        for name in (field.name for field in fields(self)):
            if name in saved:
                setattr(self, name, saved[name])

    def gradients_came(self, *, overflow: bool) -> None:
        self.overflow = overflow or (self.overflow and not self._is_judged)
        self._is_judged = False

    def begin_update(self) -> bool:
        """Adapts the scale, once for each step; tells whether the update is to be made."""
        if not self._is_judged:
            self._is_judged = True
            if self.dynamic:
                self._adapt()
        return not self.overflow

    def _adapt(self) -> None:
        if self.overflow:
            self._good_updates = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale / self.scale_factor, self.min_scale)
                self._overflows_left = 1
            return
        self._good_updates += 1
        if self.consecutive_hysteresis:
            self._overflows_left = self.delayed_shift
        if self._good_updates % self.scale_window == 0:
            self._overflows_left = self.delayed_shift
            self.scale *= self.scale_factor


def scaler_of(
    static: float | None, dynamic: bool | None, arguments: Mapping[str, Any] | None
) -> LossScaler | None:
    """The scaler that `DistributedOptimizer` is asked for; None for the default."""
    if static is None and dynamic is None and not arguments:
        return None
    wanted = dict(arguments or {})
    is_dynamic = static is None if dynamic is None else dynamic
    first = wanted.pop("init_scale", LossScaler().scale if is_dynamic else static or 1.0)
    allowed = ("scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")
    unknown = [name for name in wanted if name not in allowed]
    if unknown:
        raise UsageError(
            f"dynamic_loss_args has {unknown[0]!r}, and may have init_scale, {', '.join(allowed)}."
        )
    return LossScaler(scale=float(first), dynamic=is_dynamic, **wanted)


class EarlierGradients:
    """Puts aside the gradients of earlier batches, while those of another one change."""

    def __init__(self, parameters: Callable[[], Iterable[nn.Parameter]]):
        self._parameters = parameters
        self._earlier: dict[int, Tensor] = {}

    def begin(self, but: Collection[int] = ()) -> None:
        self._earlier.clear()
        for parameter in self._parameters():
            if parameter.grad is not None and id(parameter) not in but:
                self._earlier[id(parameter)] = parameter.grad
                parameter.grad = None

    def leave(self) -> None:
        for parameter in self._parameters() if self._earlier else ():
            earlier = self._earlier.pop(id(parameter), None)
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)


class GradientScaling:
    """Unscales the gradients of batches with a scaled loss."""

    def __init__(
        self, scaler: LossScaler, parameters: Callable[[], Iterable[nn.Parameter]], device: torch.device
    ):
        self.scaler = scaler
        self._parameters = parameters
        self._device = device
        self._earlier = EarlierGradients(parameters)

    def begin(self, reduced: Collection[int]) -> None:
        """Puts aside the gradients of earlier batches, which have no scale any more."""
        self._earlier.begin(reduced)

    def finish(self, reduced: Collection[int], sums: Iterable[Tensor], *, trained: bool) -> None:
        """Divides by the scale, and tells the scaler whether any gradient of the job has overflowed.

        Collective over all ranks, if the batch trained.
        """
        if not trained:
            self.leave()
            return
        gradients = list(sums)
        for parameter in self._parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            if id(parameter) not in reduced:
                gradient.div_(self.scaler.scale)
            gradients.append(gradient)
        self.scaler.gradients_came(overflow=self._any_overflow(gradients))
        self.leave()

    def leave(self) -> None:
        """Adds the gradients of earlier batches."""
        self._earlier.leave()

    def _any_overflow(self, gradients: list[Tensor]) -> bool:
        # Each rank looks at what it has, before all tell each other.
        bad = [~local_of(own_part(gradient)).isfinite().all() for gradient in gradients]
        found = torch.stack(bad).any().float() if bad else torch.zeros(())
        found = found.reshape(1).to(self._device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` under the name that scripts of other libraries look for.

    While a model is spread over stages, PyTorch's own and classes made from it agree over ranks, too.
    """


@contextmanager
def scalers_agree() -> Iterator[None]:
    """Has all scalers of this process agree with those of the other ranks of the replica."""
    original = torch.amp.GradScaler._unscale_grads_

    def unscale(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found = original(self, *args, **kwargs)
        if not is_initialized():
            return found
        current = context()
        all_groups = (current.groups.shard, current.groups.pipeline, current.groups.tensor)
        groups = [group for group in all_groups if group is not None]
        if not groups:
            return found
        # A rank without parameters has nothing to look at, but takes part in the verdict.
        verdicts = found or {current.device: torch.zeros((), dtype=torch.float32, device=current.device)}
        for verdict in verdicts.values():
            for group in groups:
                dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=group)
        return verdicts

    torch.amp.GradScaler._unscale_grads_ = unscale  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.amp.GradScaler._unscale_grads_ = original  # type: ignore[method-assign]


class _Scaling:
    scaler: torch.amp.GradScaler | None = None


def scaling_begins() -> None:
    """A step begins, in which no loss was scaled yet."""
    _Scaling.scaler = None


def losses_were_scaled() -> bool:
    """Whether a scaler has scaled a loss since: then it leaves out by itself what overflows."""
    return _Scaling.scaler is not None


def scale_of_losses() -> float:
    """The factor of the scaler that has scaled losses since; 1 without one."""
    return 1.0 if _Scaling.scaler is None else float(_Scaling.scaler.get_scale())


@contextmanager
def scaling_noted() -> Iterator[None]:
    """Has all scalers of this process note that they scale a loss."""
    original = torch.amp.GradScaler.scale

    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        if self.is_enabled():
            _Scaling.scaler = self
        return original(self, outputs)

    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.amp.GradScaler.scale = original  # type: ignore[method-assign]
