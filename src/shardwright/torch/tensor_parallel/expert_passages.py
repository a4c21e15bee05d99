"""Steps of autograd between what ranks share and what each of them computes with.

=============== ================================== =========================================
function        forward                            backward
=============== ================================== =========================================
`entered`       all of tensors, and this rank's    a summand of the gradients of tensors, and
                parts of parameters                those of the parts, placed like these
`summed`        summands                           all of the gradients
`own_part`      this rank's part of a cut tensor   its gradient, placed like the tensor
`placed_like`   a tensor of which this is a part   this rank's part of its gradient
=============== ================================== =========================================

Where ranks form a grid, tensors are cut along one axis of it, and what a rank finds is a summand along the
other: each rank has other experts.

All ranks have to go through a backward alike, and a rank may find nothing to compute: no token takes its
experts, or the expert is another rank's. So what enters is one step of autograd, and gives a zero, too.
Whoever adds that to a result has gradients for all that has entered, zeros for what is not used.

A unit that is recomputed runs its forward again as soon as a backward asks for what it has kept, up to what
it kept last. So a step at the end of the experts keeps a number and asks for it (`keep_a_number`): a rank
without tokens would else go on to the next exchange, while all others repeat those of the forward.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.placement import PARTIAL_SUM, Cut
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of, whole, wrap
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.placing import at_hand, placed
from shardwright.torch.tensor_parallel.spec import Spec, spec_of


class Entered(NamedTuple):
    """What a rank computes with.

    Attributes:
        items: those given, with ordinary tensors that have all elements.
        zero: without dimensions; belongs to what comes out, see above.
    """

    items: list[Any]
    parts: list[Tensor]
    zero: Tensor


def entered(items: Sequence[Any], parameters: Sequence[DividedTensor]) -> Entered:
    """Gathers tensors, and takes this rank's parts of parameters. All ranks of the group call it."""
    group = parameters[0]._spec.group
    places = [place for place, each in enumerate(items) if _has_gradient(each)]
    found = _Entered.apply(group, len(places), *(items[each] for each in places), *parameters)  # type: ignore[no-untyped-call]
    made = [whole(each) if isinstance(each, Tensor) and not _has_gradient(each) else each for each in items]
    for place, tensor in zip(places, found, strict=False):
        made[place] = tensor
    return Entered(made, list(found[len(places) : -1]), found[-1])


def summed(tensors: Sequence[Tensor], entered: Entered, group: TensorGroup) -> list[Tensor]:
    """The sums over the ranks to which this one adds tensors. All ranks of the group call it."""
    if not tensors:
        return []
    connected = [each + entered.zero.to(each.dtype) for each in tensors]
    return list(_Summed.apply(group, *connected))  # type: ignore[no-untyped-call]


def summand(data: Tensor, group: TensorGroup) -> DividedTensor:
    """A sum over the ranks, to which this one has so much to add."""
    if group.grid is not None:
        assert group.grid.inner is not None
        data, group = summand(data, group.grid.inner), group.grid
    return wrap(data, spec_of(group, PARTIAL_SUM, data, shape=data.shape, strides=data.stride()))


def own_part(tensor: DividedTensor) -> Tensor:
    """This rank's part of a cut tensor, as an ordinary one."""
    part: Tensor = _OwnPart.apply(tensor)  # type: ignore[no-untyped-call]
    return part


def placed_like(part: Tensor, other: DividedTensor) -> DividedTensor:
    """The tensor of which ranks have parts, placed as another one of its shape."""
    tensor: DividedTensor = _PlacedLike.apply(part, other._spec)  # type: ignore[no-untyped-call]
    return tensor


def keep_a_number(ctx: Any, like: Tensor) -> None:
    """Has autograd keep something of a step, on every rank: see above."""
    ctx.save_for_backward(like.new_zeros(()))


def ask_for_the_number(ctx: Any) -> None:
    """Has a unit that is recomputed run again by now."""
    assert len(ctx.saved_tensors) == 1


def _has_gradient(item: Any) -> bool:
    return isinstance(item, Tensor) and item.is_floating_point()


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, num_given: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        parameters = tensors[num_given:]
        ctx.group, ctx.specs = group, [each._spec for each in parameters]  # type: ignore[attr-defined]
        own = [local_of(each).detach() for each in parameters]
        return *(_all_of(each) for each in tensors[:num_given]), *own, own[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        *of_all, _ = gradients
        num_given = len(of_all) - len(ctx.specs)
        of_given = (summand(each.contiguous(), ctx.group) for each in of_all[:num_given])
        of_parts = map(_placed_as, ctx.specs, of_all[num_given:])
        return None, None, *of_given, *of_parts


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        keep_a_number(ctx, tensors[0])
        return tuple(summand(each.detach().contiguous(), group) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ask_for_the_number(ctx)
        return None, *(None if each is None else whole(each) for each in gradients)


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DividedTensor) -> Tensor:
        ctx.spec = tensor._spec
        return whole(tensor._local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _placed_as(ctx.spec, _of_own_experts(gradients[0].contiguous(), ctx.spec.group))


class _PlacedLike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, spec: Spec) -> Tensor:
        ctx.spec = spec
        return _placed_as(spec, _of_own_experts(part.detach().clone(), spec.group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        spec = ctx.spec
        return whole(placed(gradients[0], spec.placement, spec.group)._local), None


def _of_own_experts(part: Tensor, group: TensorGroup) -> Tensor:
    """A rank's part of a tensor; a summand of it where other ranks have the same tokens."""
    return part if group.inner is None else summand(part, group.inner)


def _all_of(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DividedTensor) or not isinstance(tensor._spec.placement, Cut):
        return whole(tensor).detach()
    # Others need it whole, too; none of them may write to what is kept for all.
    return at_hand(tensor).clone()


def _placed_as(spec: Spec, part: Tensor) -> DividedTensor:
    own = spec_of(spec.group, spec.placement, part, shape=spec.shape, strides=spec.strides)
    return wrap(part, own)
