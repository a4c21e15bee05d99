"""Tensors that other ranks hold, while a module around them gives first values to its part on this rank.

::

    root._init_weights(root):  for layer in self.layers: layer.weight.normal_()

    one process     draws  0 0 0 1 1 1 2 2 2 3 3 3
    rank 1 of 2     draws  . . . . . . 2 2 2 3 3 3     the dots are drawn, and thrown away

So what a module draws for one tensor does not depend on the ranks that hold the others. A tensor on the meta
device would not do: nothing is drawn for it, and some of PyTorch's initialisers leave it out. Others draw
again what lies too far from the mean, so that values count: what is being filled has memory, one at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch._private import disabled_torch_function, make_wrapper
from shardwright.torch.pytorch.functions import map_arguments, tensors_in, written_tensors
from shardwright.torch.pytorch.tree import map_tree

__all__ = ["Elsewhere"]


class Elsewhere:
    """The tensors of other ranks that a module finds in its parts."""

    def __init__(self, device: torch.device):
        self._device = device
        self._filled: _Memory | None = None

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Stands for a parameter or a buffer: whatever is written to it is lost."""
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        made = _StandIn(meta, _Memory(self, self._device))
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    def fills(self, memory: "_Memory") -> None:
        """From now on this one has memory, and no other."""
        if self._filled is not None and self._filled is not memory:
            self._filled.content = None
        self._filled = memory


class _Memory:
    """The memory of a stand-in and of its views: there from when it is filled until another one is."""

    def __init__(self, place: Elsewhere, device: torch.device):
        self.content: Tensor | None = None  # all of it, in one dimension
        self.device = device
        self._place = place

    def take(self, like: Tensor) -> None:
        """Takes memory for a tensor, or the one that a view looks at."""
        self._place.fills(self)
        if self.content is None:
            length = like.untyped_storage().nbytes() // like.element_size()
            self.content = torch.zeros(length, dtype=like.dtype, device=self.device)


class _StandIn(torch.Tensor):
    """See `Elsewhere`."""

    _meta: Tensor
    _memory: _Memory

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, meta: Tensor, memory: _Memory) -> "_StandIn":
        made: _StandIn = make_wrapper(cls, meta, device=memory.device)
        made._meta, made._memory = meta, memory
        return made

    def __init__(self, meta: Tensor, memory: _Memory) -> None:
        super().__init__()

    @property
    def data(self) -> Tensor:
        """The tensor without its history."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """What is put in its place is lost, too."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = written_tensors(func, args, kwargs)
        lost = [item for item in written if isinstance(item, cls)]
        if written and len(lost) == len(written):
            _write(lost, func, args, kwargs)
            return lost[0] if len(func._schema.returns) == 1 else tuple(lost)
        found = [item for item in tensors_in([*args, *kwargs.values()]) if isinstance(item, cls)]
        if not written and any(result.alias_info is not None for result in func._schema.returns):
            views = func(*map_arguments(_meta_of, args, {})[0], **kwargs)
            return map_tree(lambda item: _view(item, found[0]._memory), views)
        if not written and _looks_at_shapes_alone(func):
            return _on(_blank, func, args, kwargs)
        if any(item._memory.content is None for item in found):
            raise UsageError(
                "a model on the meta device gets first values, and one of its modules computes some of "
                f"them from those of a parameter that another rank holds ({func}). Build the model under "
                "sw.delay_param_initialization() instead."
            )
        return _on(_content, func, args, kwargs)


def _write(written: list["_StandIn"], func: Any, args: Any, kwargs: Any) -> None:
    """Writes to stand-ins that are being filled; what is written to others is lost."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        for item in written:
            item._memory.take(item._meta)
    used = [item for item in tensors_in([*args, *kwargs.values()]) if isinstance(item, _StandIn)]
    if all(item._memory.content is not None for item in used):
        _on(_content, func, args, kwargs)
    else:
        for item in written:
            item._memory.content = None  # nobody knows what it would be


def _on(tensor_of: Callable[["_StandIn"], Tensor], func: Any, args: Any, kwargs: Any) -> Any:
    own, named = map_arguments(
        lambda item: tensor_of(item) if isinstance(item, _StandIn) else item, args, kwargs
    )
    return func(*own, **named)


def _content(item: "_StandIn") -> Tensor:
    assert item._memory.content is not None
    meta = item._meta
    return item._memory.content.as_strided(meta.shape, meta.stride(), meta.storage_offset())


def _blank(item: "_StandIn") -> Tensor:
    """Laid out alike: the order of draws goes by it."""
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)


def _meta_of(item: Tensor) -> Tensor:
    return item._meta if isinstance(item, _StandIn) else item


def _view(item: Any, memory: _Memory) -> Any:
    return _StandIn(item, memory) if isinstance(item, Tensor) else item


def _looks_at_shapes_alone(func: Any) -> bool:
    name: str = func._schema.name.removeprefix("aten::")
    return name.startswith("new_") or name.endswith("_like")
