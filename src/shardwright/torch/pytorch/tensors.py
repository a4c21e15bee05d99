"""Tensors: order in memory, copies of contents and of objects with tensors, autocast, gradients of arguments.

Values do not depend on the layout, but random draws do (a dropout mask is filled in memory order), and so
does what code may do with the tensor (`Tensor.view`). So a tensor has the same layout on the receiving rank
as on the sending one: a message has its dims in memory order, from the widest stride to the narrowest::

    channels last    (n, c, h, w), strides (c h w, 1, c w, c)    order (0, 2, 3, 1), sent as (n, h, w, c)
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwright.comm._private import uses_gpus
from shardwright.errors import TraceError
from shardwright.torch._private.tensors import TorchFunctionMode

Order = tuple[int, ...]


def order_of(tensor: Tensor) -> Order | None:
    """Dims from the widest stride to the narrowest; None where they are counted so, or entries share memory.

    >>> order_of(torch.empty(2, 3, 4, 5, memory_format=torch.channels_last))
    (0, 2, 3, 1)
    >>> order_of(torch.empty(2, 3)), order_of(torch.empty(2, 1).expand(2, 3))
    (None, None)
    """
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    sizes, strides = tensor.shape, tensor.stride()
    if any(stride == 0 and size > 1 for size, stride in zip(sizes, strides, strict=True)):
        return None
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], sizes[dim] == 1))
    return None if order == sorted(order) else tuple(order)


def in_memory_order(tensor: Tensor, order: Order | None) -> Tensor:
    """The tensor with its dims in memory order, as it is sent."""
    return tensor if order is None else tensor.detach().permute(order)


def from_memory_order(tensor: Tensor, order: Order | None) -> Tensor:
    """The tensor that was sent, with its dims as they are counted.

    >>> sent = in_memory_order(torch.empty(2, 3, 4, 5, memory_format=torch.channels_last), (0, 2, 3, 1))
    >>> sent.shape, from_memory_order(sent, (0, 2, 3, 1)).stride()
    (torch.Size([2, 4, 5, 3]), (60, 1, 15, 3))
    """
    # Detached: autograd takes it for a tensor of its own, and not for a view.
    return tensor if order is None else tensor.permute([order.index(dim) for dim in sorted(order)]).detach()


_MOST_BYTES = 2**30


def has_content(tensor: Tensor) -> bool:
    """Whether it has data in a memory of its own; False for parameters and other kinds of tensors."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_meta or tensor.is_inference() or tensor.is_quantized)


class TensorContents:
    """Copies the memory of tensors, once for those that share it."""

    def __init__(self, most_bytes: float = _MOST_BYTES) -> None:
        self._bytes_left = most_bytes
        self._kept: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._tensors: list[tuple[Tensor, Tensor, int, int]] = []  # it, an alias, its version and memory

    def keep(self, tensor: Tensor) -> None:
        """Records a tensor that `has_content`."""
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key not in self._kept:
            # One dimension over all of it: views may have holes, or one entry many times.
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
            fits = whole.nbytes <= self._bytes_left
            self._bytes_left -= whole.nbytes if fits else 0
            self._kept[key] = (whole, whole.clone() if fits else None)
        self._tensors.append((tensor, tensor.detach(), tensor._version, key))

    def restore(self) -> TraceError | None:
        """Restores tensors, also their shape, type and memory; returns an error if one has no copy."""
        error = None
        for tensor, alias, version, key in self._tensors:
            whole, content = self._kept[key]
            if alias.untyped_storage().nbytes() != whole.nbytes:  # `resize_` may change it in place
                alias.untyped_storage().resize_(whole.nbytes)
            if _placed(tensor) != _placed(alias):
                tensor.data = alias
            if content is None and tensor._version != version:
                error = TraceError(
                    f"a tensor of {whole.nbytes / 2**30:.1f} GiB, in an attribute of a module or in an "
                    "object that it holds, is changed in place when the model is traced, and is too large "
                    "to be put back. Register it as a buffer: "
                    "module.register_buffer(name, tensor, persistent=False)."
                )
        for whole, content in self._kept.values():
            if content is not None and not torch.equal(whole, content):
                whole.copy_(content)
        return error


def _placed(tensor: Tensor) -> tuple[Any, ...]:
    """What a tensor is, and where in which memory."""
    memory = tensor.untyped_storage()._cdata
    return memory, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


class KeptTensor:
    """A saved tensor as it is. It must not be changed in place before the backward, as without hooks."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor, *, version: int | None = None):
        # A tensor with its history would keep itself alive.
        self._tensor = tensor.detach()
        self._version = version_of(tensor) if version is None else version

    def get(self) -> Tensor:
        """The tensor, for the backward."""
        refuse_changed(self._tensor, self._version, shape=self._tensor.shape)
        return self._tensor


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; of inference tensors nobody counts it."""
    return 0 if tensor.is_inference() else tensor._version


def refuse_changed(tensor: Tensor, version: int, *, shape: torch.Size) -> None:
    """Refuses a saved tensor that has changed since, as PyTorch does without hooks."""
    now = version_of(tensor)
    if now != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {tuple(shape)} and {tensor.dtype} is at version {now}; expected "
            f"version {version} instead."
        )


Nodes = Mapping[int, torch.autograd.graph.Node]


def gradient_nodes(items: Sequence[Any]) -> Nodes:
    """The autograd nodes that take gradients of tensors, by position; of those that require gradients.

    A view that was made under no_grad says so when its base does, and gets none.
    """
    with torch.enable_grad():
        return {
            position: torch.autograd.graph.get_gradient_edge(item).node
            for position, item in enumerate(items)
            if isinstance(item, Tensor) and item.requires_grad
            if not (item._is_view() and item.grad_fn is None)
        }


def base_nodes(items: Sequence[Any]) -> Nodes:
    """The autograd nodes that take gradients of the bases of these views, by position.

    A view that is changed in place is made anew of its base: what it was before is no longer on the way.
    """
    bases = [item._base if isinstance(item, Tensor) else None for item in items]
    return gradient_nodes(bases)


def unreached(arguments: Nodes, results: Iterable[Any], bases: Nodes | None = None) -> frozenset[int]:
    """Positions of the arguments that require gradients, and get none from any of the results.

    >>> x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> unreached(gradient_nodes([x, y]), [x * 2 + y.detach()])
    frozenset({1})
    """
    if not arguments:
        return frozenset()
    changed = bases or {}
    own, given = list(gradient_nodes(list(results)).values()), {*arguments.values(), *changed.values()}
    behind: list[torch.autograd.graph.Node] = []
    seen: set[torch.autograd.graph.Node] = set()
    for pending in (own, behind):
        # What lies behind an argument was there before the call: all of the model, which is seldom needed.
        while pending and not (pending is behind and seen.issuperset(arguments.values())):
            node = pending.pop()
            if node not in seen:
                seen.add(node)
                further = behind if node in given else pending
                further += [following for following, _ in node.next_functions if following is not None]
    return frozenset(
        position
        for position, node in arguments.items()
        if node not in seen and not (position in changed and changed[position] in seen)
    )


AutocastState = tuple[tuple[str, bool, torch.dtype], ...]
"""For each kind of device: whether it is enabled, and its type."""


@cache
def _devices() -> tuple[str, ...]:
    # Not at import: the driver starts a thread when it is asked for GPUs.
    return ("cpu", "cuda") if uses_gpus() else ("cpu",)


def autocast_state() -> AutocastState:
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _devices())


@contextmanager
def autocast_as(state: AutocastState) -> Iterator[None]:
    with ExitStack() as stack:
        for device, enabled, dtype in state:
            if enabled or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield


class Replacing(TorchFunctionMode):
    """Decides what `deepcopy` puts in the place of a tensor."""

    def __init__(self, replace: Callable[[Tensor], Tensor]):
        super().__init__()
        self._replace = replace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__deepcopy__":  # of Tensor, or of a kind of it
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        memo[id(tensor)] = new = self._replace(tensor)
        return new


def copy_of_object(item: Any, replace: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """A copy of something that a call may change (a cache of keys and values), with other tensors inside.

    `deepcopy` alone refuses tensors that were computed. What cannot be copied (a lock, a file) is given back
    itself.
    """
    try:
        with Replacing(replace):
            return copy.deepcopy(item)
    except Exception:
        return item
