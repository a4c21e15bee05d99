"""Unscales the gradients of a batch, and detects overflows."""

from collections.abc import Callable, Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.torch.loss_scale.loss_scaler import LossScaler
from shardwright.torch.parameters.sharded_tensor import own_part
from shardwright.torch.tensor_parallel.divided_tensor import local_of

__all__ = ["EarlierGradients", "GradientScaling"]


class EarlierGradients:
    """Puts aside the gradients of earlier batches, while those of another one change."""

    def __init__(self, parameters: Callable[[], Iterable[nn.Parameter]]):
        self._parameters = parameters
        self._earlier: dict[int, Tensor] = {}

    def begin(self, but: Collection[int] = ()) -> None:
        """Takes them out."""
        self._earlier.clear()
        for parameter in self._parameters():
            if parameter.grad is not None and id(parameter) not in but:
                self._earlier[id(parameter)] = parameter.grad
                parameter.grad = None

    def leave(self) -> None:
        """Adds them."""
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
