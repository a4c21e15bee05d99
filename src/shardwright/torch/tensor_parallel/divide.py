"""Divides parameters over ranks, and tells what a rank saves of each.

::

    cut 0 (r0:2 r1:2 r0:1 r1:1)      pieces of rank 0: rows 0 to 1 of the tensor, row 4
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.checkpoint.boxes import Box
from shardwright.errors import UsageError
from shardwright.placement import WHOLE, Cut, PartialSum, Placement, Whole
from shardwright.torch._private.tensors import memory_of, put_in_place
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.tensor_parallel.divided_tensor import (
    DividedTensor,
    all_parts,
    divided,
    local_of,
    placement_of,
    whole,
    wrap,
)
from shardwright.torch.tensor_parallel.group import Collectives, Prices, ProcessGroupCollectives, TensorGroup
from shardwright.torch.tensor_parallel.redistribution import replaced
from shardwright.torch.tensor_parallel.spec import Spec, put_in_order, spec_of


def cut_of(tensor: Tensor) -> Cut | None:
    """How ranks share a tensor; None for a whole one."""
    placement = placement_of(tensor)
    return placement if isinstance(placement, Cut) else None


def pieces(tensor: DividedTensor) -> Iterator[tuple[Box, Tensor]]:
    """The pieces that this rank has of a cut tensor: where each lies, and a view of its elements."""
    local = tensor._local.detach()
    return in_whole(Box.whole(local.shape), local, tensor._spec)


def in_whole(box: Box, elements: Tensor, spec: Spec) -> Iterator[tuple[Box, Tensor]]:
    """The pieces of a box of this rank's part of a cut tensor: where each lies in the whole, and a view."""
    cut, start = spec.placement, 0
    assert isinstance(cut, Cut)
    dim = cut.dim
    first, last = box.offset[dim], box.offset[dim] + box.shape[dim]
    for a, b in cut.intervals(spec.group.rank):
        low, high = max(first, start), min(last, start + b - a)
        if low < high:
            offset, shape = list(box.offset), list(box.shape)
            offset[dim], shape[dim] = a + low - start, high - low
            yield Box(tuple(offset), tuple(shape)), elements.narrow(dim, low - first, high - low)
        start += b - a


def all_elements(state: Any) -> Any:
    """A tree with all tensors whole; the tree itself where they are. All ranks of the group call it."""
    items, structure = flatten(state)
    if not any(isinstance(item, DividedTensor) for item in items):
        return state
    return structure.rebuild([whole(item) if isinstance(item, DividedTensor) else item for item in items])


def joined(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """The whole tensor."""
    taken = [0] * len(parts)
    pieces = []
    for rank, length in cut.runs:
        pieces.append(parts[rank].narrow(cut.dim, taken[rank], length))
        taken[rank] += length
    return torch.cat(pieces, dim=cut.dim)


def placed_like(whole: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, of which each rank keeps what it has of another of the same shape."""
    if isinstance(whole, DividedTensor) or not isinstance(other, DividedTensor) or whole.shape != other.shape:
        return whole
    spec = other._spec
    return divided(whole.to(local_of(other).device), spec.placement, spec.group)


_DATA: Any = torch.Tensor.data


def _assign(tensor: Tensor, value: Tensor) -> None:
    # PyTorch would give it the memory of the value, and a divided tensor has none of its own.
    if isinstance(value, DividedTensor) and not isinstance(tensor, DividedTensor):
        value = whole(value.detach()).clone()  # what was gathered may be kept for others
    _DATA.__set__(tensor, value)


# What a divided tensor has beside that of an ordinary one.
_OWN = tuple(DividedTensor.__annotations__)


def tensor_group(
    ranks: dist.ProcessGroup | Collectives | None = None, *, prices: Prices | None = None
) -> TensorGroup:
    if ranks is None or isinstance(ranks, dist.ProcessGroup):
        ranks = ProcessGroupCollectives(ranks)
    # Here, because few runs divide layers: it brings the rules of all operations along.
    from shardwright.torch.tensor_parallel.deciding import decide

    # From now on, a whole tensor takes all elements of what is assigned to its `data`.
    torch.Tensor.data = property(_DATA.__get__, _assign)  # type: ignore[assignment]
    return TensorGroup(ranks, decide, prices=prices)


def divide(module: nn.Module, placements: Mapping[str, Placement], group: TensorGroup) -> None:
    """Leaves each rank its part of a module's parameters and buffers.

    The module's code stays as it is. Parameters become tensors of the same shape that hold one rank's part.
    Tied parameters stay tied; each of their names may have the placement, or one of them.
    """
    places = _places(module)
    if unknown := sorted(set(placements) - set(places)):
        raise UsageError(
            f"placements name {unknown}, which the module does not have. It has {sorted(places)}."
        )
    chosen: dict[int, tuple[str, Placement]] = {}
    for name, placement in placements.items():
        owner, key = places[name]
        tensor = _tensors_of(owner)[key]
        _check(name, tensor, placement, group)
        earlier = chosen.setdefault(id(tensor), (name, placement))
        if earlier[1] != placement:
            raise UsageError(
                f"{earlier[0]} and {name} are one parameter, but are placed as {earlier[1]} and as "
                f"{placement}. Give both names the same placement, or only one of them."
            )
    made: dict[int, Tensor] = {}
    for owner, key in places.values():
        tensor = _tensors_of(owner)[key]
        name_and_placement = chosen.get(id(tensor))
        if name_and_placement is None or isinstance(name_and_placement[1], Whole):
            continue
        if id(tensor) not in made:
            made[id(tensor)] = _divided(tensor, name_and_placement[1], group)
        _put(owner, key, made[id(tensor)])


def divide_parameter(parameter: nn.Parameter, placement: Cut, group: TensorGroup) -> None:
    """Leaves this rank its part of a parameter, which stays the same object: also in optimizers and lists."""
    of_gradient = getattr(parameter, "grad_dtype", None)
    put_divided_in_place(parameter, _divided(parameter, placement, group))
    vars(parameter)["_is_param"] = True  # what `isinstance` looks for, of classes beside nn.Parameter
    if of_gradient is not None and of_gradient is not parameter.dtype:
        parameter.grad_dtype = of_gradient


def put_divided_in_place(tensor: Tensor, other: Tensor) -> None:
    """Makes a tensor another one, as `put_in_place` does, where one may be divided: its part goes along."""
    put_in_place(tensor, other)
    mine, theirs = vars(tensor), vars(other)
    was_mine = {name: mine.pop(name) for name in _OWN if name in mine}
    mine.update((name, theirs.pop(name)) for name in _OWN if name in theirs)
    theirs.update(was_mine)


def shown_whole(tensor: DividedTensor) -> DividedTensor:
    """Has a cut tensor be an ordinary one with all elements, for everybody who has it.

    All ranks of its group call it. The gradient stays.
    """
    full, gradient = whole(tensor), tensor.grad
    values = nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full
    put_divided_in_place(tensor, values)
    tensor.grad = gradient
    return values  # type: ignore[return-value]


def shown_in_parts(tensor: Tensor, kept: DividedTensor) -> None:
    """Has it be cut again; each rank keeps its part of what the elements are now."""
    gradient = tensor.grad
    with torch.no_grad():
        for box, own in pieces(kept):
            own.copy_(tensor.detach()[box.slices])
    put_divided_in_place(tensor, kept)
    tensor.grad = gradient


def divided_alike(part: Tensor, like: DividedTensor | Spec) -> DividedTensor:
    """A tensor of which this rank has a part, placed as another one."""
    spec = like if isinstance(like, Spec) else like._spec
    own = spec_of(spec.group, spec.placement, part, shape=spec.shape, strides=spec.strides)
    return wrap(part, own)


def part_as(tensor: Tensor, like: Spec) -> Tensor:
    """This rank's part of a tensor, if it is placed as another one; collective if it is placed otherwise."""
    if not isinstance(tensor, DividedTensor):
        return divided(tensor, like.placement, like.group)._local
    if tensor._spec.placement != like.placement:
        tensor = _redistributed(tensor, like.placement)
    return tensor._local


def placed_again(part: Tensor, cut: Cut, like: Tensor, group: TensorGroup) -> Tensor:
    """A tensor whose parts ranks have kept, placed as another one; whole where its shape is another.

    All ranks of the group call it.
    """
    shape = torch.Size((*part.shape[: cut.dim], cut.size, *part.shape[cut.dim + 1 :]))
    alike = shape == like.shape
    strides = like.stride() if alike else torch.empty(shape, device="meta").stride()
    part = put_in_order(part, strides)
    tensor = wrap(part, spec_of(group, cut, part, shape=shape, strides=strides))
    if not (alike and isinstance(like, DividedTensor)):
        return whole(tensor)
    spec = like._spec
    if spec.group is not group:
        return divided(whole(tensor), spec.placement, spec.group)
    return whole(tensor) if isinstance(spec.placement, Whole) else _redistributed(tensor, spec.placement)


def _places(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    found = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None:
                found[f"{prefix}.{key}" if prefix else key] = owner, key
    return found


def _tensors_of(owner: nn.Module) -> dict[str, Tensor]:
    return {**owner._parameters, **owner._buffers}  # type: ignore[dict-item]


def _put(owner: nn.Module, key: str, tensor: Tensor) -> None:
    kind = owner._parameters if key in owner._parameters else owner._buffers
    kind[key] = tensor  # type: ignore[assignment]


def _check(name: str, tensor: Tensor, placement: Placement, group: TensorGroup) -> None:
    if isinstance(placement, PartialSum):
        raise UsageError(f"{name} cannot be placed as a partial sum. Cut it, or keep it whole.")
    if isinstance(placement, Cut):
        size = tensor.shape[placement.dim] if placement.dim < tensor.dim() else None
        if size != placement.size:
            raise UsageError(
                f"{name} has shape {tuple(tensor.shape)}, so {placement} does not fit: its runs have "
                f"{placement.size} slices, dimension {placement.dim} has {size}."
            )
        if any(run.rank >= group.num_ranks for run in placement.runs):
            raise UsageError(
                f"{name}: {placement} names ranks that the group of {group.num_ranks} does not have."
            )


def _divided(tensor: Tensor, placement: Placement, group: TensorGroup) -> Tensor:
    part = divided(tensor.detach(), placement, group)
    if isinstance(tensor, nn.Parameter):
        group.lasting.add(memory_of(part._local))
        return nn.Parameter(part, requires_grad=tensor.requires_grad)
    return part


def settle_gradients(parameters: Iterable[Tensor]) -> None:
    """Gives each gradient the placement of its parameter: once a step, after the last backward.

    Gradients of whole parameters may be sums that are still pending over the ranks: those of a type are added
    up together. All ranks of the group call it with the same parameters.
    """
    pending: dict[tuple[TensorGroup, torch.dtype], list[Tensor]] = {}
    parameters = list(parameters)
    _settle_outer(parameters)
    for parameter in parameters:
        gradient = parameter.grad
        target = parameter._spec.placement if isinstance(parameter, DividedTensor) else WHOLE
        if isinstance(gradient, DividedTensor):
            spec = gradient._spec
            if spec.is_pending and isinstance(target, Whole):
                pending.setdefault((spec.group, spec.dtype), []).append(parameter)
            elif isinstance(target, Whole):
                parameter.grad = whole(gradient)
            elif spec.placement != target:
                parameter.grad = _redistributed(gradient, target)
        elif gradient is not None and isinstance(parameter, DividedTensor):
            parameter.grad = divided(gradient, parameter._spec.placement, parameter._spec.group)
    for (group, _), together in pending.items():
        _settle_together(group, together)


def _settle_outer(parameters: Iterable[Tensor]) -> None:
    """Settles what is pending over an outer group: gradients become those of its inner group's tensors.

    All ranks of the outer group first have their summands placed as the parameter is.
    """
    pending: dict[tuple[TensorGroup, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DividedTensor) or gradient._spec.group.inner is None:
            continue
        spec = gradient._spec
        if not spec.is_pending:
            parameter.grad = all_parts(gradient)
            continue
        summand = gradient._local
        if isinstance(parameter, DividedTensor):
            summand = part_as(summand, parameter._spec)
        elif isinstance(summand, DividedTensor) and not summand._spec.is_pending:
            summand = whole(summand)
        pending.setdefault((spec.group, spec.dtype), []).append((parameter, summand))
    for (group, _), together in pending.items():
        summands = [local_of(summand) for _, summand in together]
        total = group.reduce(torch.cat([each.reshape(-1) for each in summands]))
        sums = torch.split(total, [each.numel() for each in summands])
        for (parameter, summand), own in zip(together, sums, strict=True):
            gradient = torch.empty_like(local_of(summand)).copy_(own.view(local_of(summand).shape))
            like = next((each for each in (parameter, summand) if isinstance(each, DividedTensor)), None)
            parameter.grad = gradient if like is None else divided_alike(gradient, like)


def _settle_together(group: TensorGroup, parameters: list[Tensor]) -> None:
    """Adds up pending gradients in one message."""
    summands = [parameter.grad._local for parameter in parameters]  # type: ignore[union-attr]
    if len(summands) == 1:
        parameters[0].grad = whole(parameters[0].grad)  # type: ignore[arg-type]
        return
    total = group.reduce(torch.cat([each.reshape(-1) for each in summands]))
    sizes = [each.numel() for each in summands]
    for parameter, summand, own in zip(parameters, summands, torch.split(total, sizes), strict=True):
        parameter.grad = torch.empty_like(summand).copy_(own.view(summand.shape))


def _redistributed(tensor: DividedTensor, target: Placement) -> DividedTensor:
    spec = tensor._spec
    part = replaced(
        spec.group,
        tensor._local,
        shape=spec.shape,
        strides=spec.strides,
        source=spec.placement,
        target=target,
    )
    return wrap(part, spec_of(spec.group, target, part, shape=spec.shape, strides=spec.strides))
