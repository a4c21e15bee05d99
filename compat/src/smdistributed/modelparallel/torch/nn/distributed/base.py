"""What the distributed modules have in common."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from shardwright.errors import UsageError


class DistributedModule(nn.Module):
    """Base of modules that know how ranks share them.

    They are ordinary modules: sizes are those of the whole, and with tensor_parallel_degree 1 nothing is cut.
    With more, their parameters are cut where they say (`shardwright.torch.units.tensor_division`), and the
    ranks of a tensor-parallel group compute together what one would compute alone.

    Attributes:
        inputs: names of what the forward takes in one tuple, in each of its forms; empty: it takes a tensor.
    """

    inputs: tuple[tuple[str, ...], ...] = ()


def named_inputs(module: nn.Module, inputs: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """The inputs of a layer by their names; those that are not given are None.

    Args:
        inputs: what its forward was called with: one tuple, as in a sequence of layers, or its items.
    """
    given = tuple(inputs[0]) if len(inputs) == 1 and isinstance(inputs[0], tuple | list) else tuple(inputs)
    if not given or len(given) > len(names) or not isinstance(given[0], Tensor):
        kinds = ", ".join(type(item).__name__ for item in given)
        raise UsageError(
            f"smp.nn.{type(module).__name__} takes a tuple ({', '.join(names)}), and was called with "
            f"({kinds}). A class that stands for it needs a forward_hook which makes that tuple: see "
            "smp.tp_register."
        )
    return dict(zip(names, (*given, *(None,) * (len(names) - len(given))), strict=True))


def as_given(result: Tensor, inputs: Sequence[Any]) -> Any:
    """What a layer returns: a tuple like that it was called with, or a tensor for a tensor alone."""
    if len(inputs) == 1 and isinstance(inputs[0], Tensor):
        return result
    given = inputs[0] if len(inputs) == 1 else inputs
    return (result, *given[1:])
