"""Scales the loss, so that small 16-bit gradients do not round to zero.

The loss is multiplied by a factor before the backward, and gradients are divided by it in 32 bits. If a
gradient overflows on any rank of the job, no rank updates and a dynamic scale falls; it grows again after
many steps without overflow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shardwright.errors import UsageError

__all__ = ["LossScaler", "scaler_of"]


@dataclass(slots=True, kw_only=True)
class LossScaler:
    """A loss scale, and how it changes.

    Attributes:
        scale: what the loss is multiplied by now.
        scale_factor: by which it falls and grows.
        scale_window: updates without overflow after which it grows.
        min_scale: where it stops to fall.
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
        """Records the gradients of a step."""
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
