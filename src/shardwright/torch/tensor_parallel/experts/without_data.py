"""The shapes of what an expert of another rank finds."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.errors import UsageError
from shardwright.torch._private import fake_mode_is_active, new_fake_mode, unset_fake_temporarily
from shardwright.torch.pytorch.tree import Structure

__all__ = ["Slot", "in_slots", "results_without_data"]


class Slot(NamedTuple):
    """Where a module has a parameter."""

    module: nn.Module
    key: str
    parameter: Any  # nn.Parameter, which is a `DividedTensor`


@contextmanager
def in_slots(slots: Sequence[Slot], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside, modules have other tensors in the place of their parameters."""
    try:
        for (module, key, _), tensor in zip(slots, tensors, strict=True):
            module._parameters[key] = tensor  # type: ignore[assignment]
        yield
    finally:
        for module, key, parameter in slots:
            module._parameters[key] = parameter


def results_without_data(
    forward: Callable[..., Any], given: Sequence[Any], structure: Structure, slots: Sequence[Slot]
) -> Any:
    """What an expert gives, without data. The random numbers that it draws are drawn."""
    device, is_alone = slots[0].parameter.device, slots[0].parameter._spec.group.is_alone
    # Types depend on autocast, which goes by the device, and so does which kernel draws.
    goes_by_device = torch.is_autocast_enabled(device.type) or device.type != "cpu"
    fakes = new_fake_mode() if goes_by_device and not fake_mode_is_active() else nullcontext()
    target = device if goes_by_device else torch.device("meta")

    def like(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=target)

    with torch.no_grad(), fakes, _Draws(device, is_alone=is_alone):
        args, kwargs = structure.rebuild([like(each) for each in given])
        with in_slots(slots, [like(slot.parameter) for slot in slots]):
            try:
                return forward(*args, **kwargs)
            except (NotImplementedError, RuntimeError) as error:
                raise UsageError(
                    "an expert of a list does not run on tensors without data, of which ranks that do not "
                    f"have it learn the shape of what it gives ({type(error).__name__}: {error}). Route "
                    "tokens outside of it, or set expert_parallel_degree to 1."
                ) from error


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws the random numbers that the rank with the expert draws: generators stay alike on all ranks."""

    def __init__(self, device: torch.device, *, is_alone: bool):
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._is_alone = device, is_alone

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not self._is_alone:
            with unset_fake_temporarily():
                own_kwargs = {key: self._with_data(value) for key, value in kwargs.items()}
                func(*(self._with_data(each) for each in args), **own_kwargs)
        return func(*args, **kwargs)

    def _with_data(self, value: Any) -> Any:
        """Zeros in the place of a tensor, and this rank's device in the place of none."""
        if isinstance(value, torch.device):
            return self._device
        if not isinstance(value, Tensor):
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self._device)
        return made.zero_()
