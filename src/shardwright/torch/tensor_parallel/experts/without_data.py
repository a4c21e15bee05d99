"""The shapes of what an expert of another rank finds."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.errors import UsageError
from shardwright.torch._private import fake_mode_is_active, new_fake_mode
from shardwright.torch.pytorch.tree import Structure
from shardwright.torch.tensor_parallel.call import name_of

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
    """What an expert gives, without data.

    Args:
        forward: calls it.
        given: leaves of its arguments.
        structure: of these.
        slots: of its parameters, of which this rank has nothing.

    Raises:
        UsageError: it draws random numbers, or looks at values.
    """
    device = slots[0].parameter.device
    # Types depend on autocast, which goes by the device.
    is_cast = torch.is_autocast_enabled(device.type)
    fakes = new_fake_mode() if is_cast and not fake_mode_is_active() else nullcontext()
    target = device if is_cast else torch.device("meta")

    def like(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=target)

    with torch.no_grad(), fakes, _NoDraws():  # type: ignore[no-untyped-call]
        args, kwargs = structure.rebuild([like(each) for each in given])
        with in_slots(slots, [like(slot.parameter) for slot in slots]):
            try:
                return forward(*args, **kwargs)
            except (NotImplementedError, RuntimeError) as error:
                if isinstance(error, UsageError):
                    raise
                raise UsageError(
                    "an expert of a list does not run on tensors without data, of which ranks that do not "
                    f"have it learn the shape of what it gives ({type(error).__name__}: {error}). Route "
                    "tokens outside of it, or set expert_parallel_degree to 1."
                ) from error


class _NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses random numbers: only the rank that has the expert would draw them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UsageError(
                f"an expert of a list draws random numbers ({name_of(func)}), and only the rank that has it "
                "would draw them. Draw outside of the experts, or set expert_parallel_degree to 1."
            )
        return func(*args, **(kwargs or {}))
