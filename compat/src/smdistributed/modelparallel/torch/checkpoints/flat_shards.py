"""Parameters in flat shards: the form in which partial checkpoints of sharded data parallelism have weights.

Tools that merge such checkpoints rely on it. Each parameter is flattened and cut into as many parts of the
same length as there are shards, the last one filled up with zeros; a shard has one part of each parameter of
a group, one behind the other::

    parameter of 5 elements, 2 shards      part 0: a b c      part 1: d e 0
    shard 0 of a group      | part 0 of the first parameter | part 0 of the second | ...

How the parameters were cut while they were trained does not matter.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardwright.errors import CorruptCheckpointError

Shape = Sequence[int]


def part_size(numel: int, num_shards: int) -> int:
    """Elements of a part, with those that fill it up.

    >>> part_size(5, 2)
    3
    """
    return -(-numel // num_shards)


def flat_part(whole: Tensor, shard: int, num_shards: int) -> Tensor:
    """A part of a parameter.

    >>> flat_part(torch.arange(5), 1, 2)
    tensor([3, 4, 0])
    """
    size = part_size(whole.numel(), num_shards)
    own = whole.reshape(-1)[shard * size : (shard + 1) * size]
    part = own.new_zeros(size)
    part[: own.numel()] = own
    return part


def parameters_in(
    shards: Sequence[Sequence[Tensor]], shapes: Sequence[Mapping[str, Shape]], *, source: str
) -> Iterator[tuple[str, Tensor]]:
    """The parameters that all shards have together.

    Args:
        shapes: of each group, its parameters by name, in the order in which they lie there.
    """
    num_shards = len(shards)
    if any(len(shard) != len(shapes) for shard in shards):
        raise CorruptCheckpointError(
            f"{source} has {len(shapes)} groups of parameters, and shards of "
            f"{', '.join(map(str, sorted({*map(len, shards)})))} groups."
        )
    for number, group in enumerate(shapes):
        flats = [shard[number].reshape(-1) for shard in shards]
        place = 0
        wanted = sum(part_size(torch.Size(shape).numel(), num_shards) for shape in group.values())
        for index, flat in enumerate(flats):
            if flat.numel() != wanted:
                raise CorruptCheckpointError(
                    f"{source}: shard {index} has {flat.numel()} elements of group {number}, and its "
                    f"parameters need {wanted} of {num_shards} shards each."
                )
        for name, shape in group.items():
            numel = torch.Size(shape).numel()
            size = part_size(numel, num_shards)
            whole = torch.cat([flat[place : place + size] for flat in flats])[:numel]
            yield name, whole.view(torch.Size(shape))
            place += size
