"""Placements that the author of a module has chosen; nothing is searched for them.

::

    pin(layer.query, "weight", Pin(dim=0, block=head_size))      rows, whole heads
    pin(layer.dense, "weight", Pin(dim=1, block=head_size))      columns
    pinned_placements(model, num_ranks=2)                        name of a parameter -> placement

A pin names no rank, so that a module can be built, copied and pickled before anyone knows how many there are.
"""

from dataclasses import astuple, dataclass

from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.placement import WHOLE, Cut, Placement

_MARK = "_shardwright_pins"


@dataclass(frozen=True, slots=True)
class Pin:
    """Where a parameter is to be cut, for any number of ranks.

    Attributes:
        dim: the dimension; None keeps the parameter whole.
        block: so many slices stay together: the channels of a head.
    """

    dim: int | None
    block: int = 1

    def placement(self, shape: tuple[int, ...], *, num_ranks: int) -> Placement:
        """The placement of a parameter of this shape; whole, if there are fewer blocks than ranks.

        Example:
            >>> from shardwright.torch.tensor_parallel.pinned import Pin
            >>> str(Pin(dim=0, block=4).placement((12, 8), num_ranks=2))
            'cut 0 (r0:4 r1:8)'
        """
        if self.dim is None:
            return WHOLE
        num_blocks = shape[self.dim] // self.block
        if num_blocks < num_ranks:
            return WHOLE
        return Cut.even(self.dim, num_blocks, num_ranks=num_ranks).times(self.block)


def pin(module: nn.Module, name: str, where: Pin) -> None:
    """Pins a parameter of a module."""
    # No class of ours, so that a pickled module needs no shardwright.
    vars(module).setdefault(_MARK, {})[name] = astuple(where)


def pin_whole(module: nn.Module) -> None:
    """Keeps the own parameters of a module whole; those of its children are as they are."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            pin(module, name, Pin(dim=None))


def pinned_placements(model: nn.Module, *, num_ranks: int) -> dict[str, Placement]:
    """The placements of all pinned parameters; a tied one is there under each of its names.

    Where only one of its names is pinned to a cut, that counts.
    """
    chosen: dict[int, tuple[str, Placement]] = {}
    for prefix, module in model.named_modules():
        for key, (dim, block) in vars(module).get(_MARK, {}).items():
            parameter = module._parameters.get(key)
            if parameter is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            placement = _placement(name, parameter, Pin(dim, block), num_ranks)
            first, earlier = chosen.setdefault(id(parameter), (name, placement))
            if WHOLE not in (earlier, placement) and earlier != placement:
                raise UsageError(
                    f"{first} and {name} are one parameter, but are pinned as {earlier} and as {placement}. "
                    "Pin one of them."
                )
            if earlier == WHOLE:
                chosen[id(parameter)] = name, placement
    return {
        name: chosen[id(parameter)][1]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in chosen
    }


def _placement(name: str, parameter: Tensor, where: Pin, num_ranks: int) -> Placement:
    shape = tuple(parameter.shape)
    if where.dim is not None and (where.dim >= len(shape) or shape[where.dim] % where.block):
        raise UsageError(
            f"{name} has shape {shape}, which cannot be cut along dimension {where.dim} in blocks of "
            f"{where.block}."
        )
    return where.placement(shape, num_ranks=num_ranks)
