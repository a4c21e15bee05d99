"""Decides how an operation runs on the parts of its tensors.

Of all candidates of the operation's rule, and of the one that is always right (gather everything, and let
every rank do it all), the cheapest wins: time to change placements, plus this rank's share of the work, plus
the sum that a pending result takes later. All ranks know all shapes and placements, so they decide alike.
"""

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.errors import UsageError
from shardwright.placement import PARTIAL_SUM, WHOLE, PartialSum, Whole
from shardwright.torch._private.tensors import FakeTensor, change_shape_only, is_composite, new_fake_mode
from shardwright.torch.pytorch.functions import (
    map_arguments,
    one_by_one,
    takes_several,
    written_tensors,
)
from shardwright.torch.tensor_parallel.call import (
    Call,
    Candidate,
    Form,
    Input,
    candidates_of,
    map_tensors,
    tensors_of,
)
from shardwright.torch.tensor_parallel.decision import Composed, Decision, returned_arguments
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, whole, wrap
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.nested_decision import NestedDecision, decided_by_kind
from shardwright.torch.tensor_parallel.rules import rule_of

_GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default


def grouped_product_without_data(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """An empty result of a grouped product; None for other operations, and where the usual kernel will do."""
    if func is not _GROUPED_PRODUCT or args[0].dtype == torch.bfloat16:
        return None
    if not (args[0].is_meta or isinstance(args[0], FakeTensor)):
        return None
    left, right = args[:2]
    groups = args[2] if len(args) > 2 else kwargs.get("offs")
    shape = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim():
        shape = [left.shape[0] if groups is None else groups.shape[0], *shape]
    return torch.empty(shape, dtype=kwargs.get("out_dtype") or left.dtype, device=left.device)


class GroupedProductsOfAllTypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside a mode of tensors without data: gives grouped products of all types their results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DividedTensor in types:
            return NotImplemented  # its parts come by
        found = grouped_product_without_data(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if found is None else found


_VIEWS = {f"{name}_": name for name in ("as_strided", "squeeze", "t", "transpose", "unsqueeze")}
_OTHER_MEMORY = ("resize_", "resize_as_", "set_", "resize_output_")


class _ReshapedInPlace:
    """Makes a tensor a view of what it was; whoever else sees its memory stays as it is."""

    fast = None

    def __init__(self, func: Any, name: str):
        if name in _OTHER_MEMORY:
            self.run = self._refuse  # type: ignore[method-assign]
        else:
            self._view = getattr(torch.ops.aten, _VIEWS[name])
        self._func = func

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the operation; all ranks of the group do so."""
        tensor: DividedTensor = args[0]
        before = wrap(tensor._local, tensor._spec)
        before._seen = tensor._seen
        if tensor._spec.copied:
            before._copy = tensor._copy
        view = self._view(before, *args[1:], **kwargs)
        change_shape_only(self._func, args, kwargs)
        for each in tensor.alike():  # its aliases keep their shape
            each._seen = True
        tensor._local, tensor._spec = view._local, view._spec
        if view._spec.copied:
            tensor._copy = view._copy
        return tensor

    def _refuse(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
        tensor = args[0]
        if not isinstance(tensor, DividedTensor):
            raise UsageError(
                f"{self._func} cannot give an ordinary tensor the memory of one that ranks share."
            )
        raise UsageError(
            f"{self._func} would give a tensor of shape {tuple(tensor.shape)} other memory, but "
            f"{tensor._spec.group.num_ranks} ranks share it. Make a new tensor, or keep this parameter whole."
        )


class _OfTwoGroups:
    """Runs an operation on tensors of two groups: each pair of lists by itself, others with whole tensors."""

    fast = None

    def __init__(self, func: Any):
        self._func = func

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the operation; all ranks of the grid do so."""
        func = self._func
        if takes_several(func) and len(args[0]) > 1:
            return one_by_one(func, args, dict(kwargs))
        keeps_experts = any(map(_is_of_expert, written_tensors(func, args, kwargs)))

        def in_one_group(tensor: Tensor) -> Tensor:
            is_kept = not isinstance(tensor, DividedTensor) or _is_of_expert(tensor) == keeps_experts
            return tensor if is_kept else whole(tensor)

        own_args, own_kwargs = map_arguments(in_one_group, args, kwargs)
        return func(*own_args, **own_kwargs)


def _is_of_expert(tensor: Tensor) -> bool:
    return isinstance(tensor, DividedTensor) and tensor._spec.group.grid is not None


_LAST_RESORT = 1000
"""Times as dear as it is: a parameter cut to save memory is gathered where nothing else can be done."""


def decide(group: TensorGroup, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """How an operation with these arguments runs. Their values do not count, only what the key has."""
    for tensor in tensors_of(args, kwargs):
        if isinstance(tensor, DividedTensor) and tensor._spec.group not in (group, group.inner):
            if group.grid is not None or tensor._spec.group.grid is not None:
                return _OfTwoGroups(func)
            raise UsageError(f"{func} got tensors of two tensor-parallel groups. Gather one: whole(tensor).")
    if group.is_inner and rule_of(func) is None and is_composite(func):
        return Composed(func)  # no autograd above has taken it apart: an outer group's rule has called it
    if group.routes_tokens and (found := decided_by_kind(group, func, args, kwargs)) is not None:
        return found
    call = Call(func, args, kwargs, group)
    if call.name in _VIEWS or call.name in _OTHER_MEMORY:
        return _ReshapedInPlace(func, call.name)
    call.outputs = _outputs_without_data(func, args, kwargs)
    chosen, has_rule = choose(call)
    kind = Decision if group.inner is None else NestedDecision
    return kind(call, chosen, args, has_rule=has_rule)


def choose(call: Call) -> tuple[Candidate, bool]:
    """The cheapest way to run an operation with known results, and whether its rule knows a way at all."""
    found = _candidates(call) if call.outputs else []
    fitting = [each for each in found if _leaves_written(call, each)]
    whole = Candidate((WHOLE,) * len(call.inputs), (WHOLE,) * len(call.outputs))
    return min([whole, *fitting], key=functools.partial(_time_s, call)), bool(found)


def _candidates(call: Call) -> list[Candidate]:
    rule = rule_of(call.func)
    if not call.inputs and _takes_a_tensor(call.func):
        return []  # PyTorch hands a number as it is: the conjugate of 1j, in the backward of a product
    found = None if rule is None else rule(call)
    if isinstance(found, Form):
        call.flops = found.flops
        return candidates_of(call, found)
    return found or []


@functools.cache
def _takes_a_tensor(func: Any) -> bool:
    return any("Tensor" in str(argument.type) for argument in func._schema.arguments)


def _leaves_written(call: Call, candidate: Candidate) -> bool:
    """Whether what is written stays placed as it is: other tensors may share its memory."""
    if any(candidate.inputs[index] != call.inputs[index].placement for index in call.written):
        return False
    for name, placement in zip(returned_arguments(call.func), candidate.outputs, strict=False):
        if name is not None and isinstance(call[name], Input) and placement != call[name].placement:
            return False
    return True


def _time_s(call: Call, candidate: Candidate) -> float:
    """Estimated seconds of a candidate, the same on all ranks."""
    group = call.group
    # Those preferred win among equals.
    time_s = candidate.exchange_s - (1e-9 if candidate.preferred else 0.0)
    for one, target in zip(call.inputs, candidate.inputs, strict=True):
        has_sum = one.is_known and not call.is_view and not call.written
        if not (has_sum and isinstance(target, Whole)):
            factor = _LAST_RESORT if one.lasts and group.between is not None else 1
            time_s += factor * group.time_s(one.shape, one.dtype.itemsize, one.placement, target)
    work = 0
    for meta, placement in zip(call.outputs, candidate.outputs, strict=True):
        if meta is not None:
            work += meta.numel() * meta.dtype.itemsize
            if isinstance(placement, PartialSum) and not group.prices.sums_wait:
                time_s += group.time_s(meta.shape, meta.dtype.itemsize, PARTIAL_SUM, WHOLE)
    if call.flops is None:
        return time_s + candidate.share * work / group.prices.memory_Bps
    return time_s + candidate.share * call.flops / group.prices.flops_per_s


def _outputs_without_data(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor | None]:
    """The results as tensors without data; empty if they depend on data, or there is no such kernel."""
    # Convolutions and their like keep that order, but not on the meta device, which is faster for all others.
    keeps_order = any(map(_lies_channels_last, tensors_of(args, kwargs)))
    device = None if keeps_order else torch.device("meta")
    without_data = functools.partial(_without_data, device=device)
    try:
        with new_fake_mode() if keeps_order else nullcontext():
            own_args = tuple(map_tensors(without_data, value) for value in args)
            own_kwargs = {name: map_tensors(without_data, value) for name, value in kwargs.items()}
            if device is not None and isinstance(own_kwargs.get("device"), torch.device):
                own_kwargs["device"] = device
            product = grouped_product_without_data(func, own_args, own_kwargs)
            results = func(*own_args, **own_kwargs) if product is None else product
    except Exception:
        return []  # the operation runs whole, where it raises what is really wrong with it
    flat = list(results) if isinstance(results, list | tuple) else [results]
    return [each if isinstance(each, Tensor) else None for each in flat]


def _lies_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() in (4, 5) and tensor.stride(1) == 1 and not tensor.is_contiguous()


def _without_data(tensor: Tensor, device: torch.device | None) -> Tensor:
    """A tensor of the same shape and strides on a device; None for its own."""
    size = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    num_elements = max(size, 0) + tensor.storage_offset()
    memory = torch.empty(num_elements, dtype=tensor.dtype, device=device or tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
