"""A parameter, or the gradient of one, of which every rank of a shard group has some rows.

Between steps, this is what scripts find in ``model.parameters()`` and in ``parameter.grad``. It has the shape
of the whole. What is computed from such tensors alone (norms, sums, averages of the weights) PyTorch's
`DTensor` computes, which talks to the other ranks where it must, so all ranks must compute it; a result that
is cut no more is an ordinary tensor. Together with ordinary tensors it is gathered first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.errors import UsageError
from shardwright.torch._private import disabled_torch_function, make_wrapper
from shardwright.torch.glue import batch_is_running
from shardwright.torch.source_line import user_line
from shardwright.torch.tree import leaves, map_tree

__all__ = ["ShardedTensor"]


class ShardedTensor(torch.Tensor):
    """A tensor whose rows are spread over ranks.

    Unlike a `DTensor` it can take the place of an ordinary parameter as the same Python object, so that
    optimizers and variables of the script keep it.

    Attributes:
        dtensor: the tensor; its local part is what this rank has.
    """

    dtensor: DTensor

    # What is asked in every iteration (`grad`, `requires_grad`) is answered without a detour through Python.
    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, dtensor: DTensor) -> "ShardedTensor":
        """Wraps a `DTensor`, in whose place it behaves the same."""
        made: ShardedTensor = make_wrapper(cls, dtensor)
        made.dtensor = dtensor
        return made

    def __init__(self, dtensor: DTensor) -> None:
        super().__init__()

    @property
    def local(self) -> Tensor:
        """The rows of this rank."""
        return self.dtensor._local_tensor

    def full(self) -> Tensor:
        """All rows; collective over the ranks that share them."""
        return self.dtensor.full_tensor()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if batch_is_running():
            _refuse_in_step(func, args, kwargs)
        if _is_elementwise_of_lists(func) and _fit_one_by_one(args):
            # What optimizers do: the rows of a rank are all that it takes.
            func(*map_tree(_local, args), **map_tree(_local, kwargs))
            return None
        if func._schema.name.startswith("aten::_foreach_") and len(args[0]) > 1:
            return _one_by_one(func, args, kwargs)
        tensors = [item for item in leaves((args, kwargs)) if isinstance(item, Tensor)]
        if all(isinstance(tensor, ShardedTensor) or tensor.ndim == 0 for tensor in tensors):
            result = func(*map_tree(_dtensor, args), **map_tree(_dtensor, kwargs))
            written = _written(func, args, kwargs) if _gives_back_what_it_writes(func) else ()
            return written[0] if written else map_tree(_shown, result)
        return _gathered(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = ShardedTensor(_dtensor(self).detach().clone()).requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            vars(copied)["_is_param"] = True
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole: Any = self.full().detach()
        if isinstance(self, torch.nn.Parameter):
            whole = torch.nn.Parameter(whole, self.requires_grad)
        return whole.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"ShardedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {self.local.shape[0]} rows here: "
            f"{self.local})"
        )


def _refuse_in_step(func: Any, args: Any, kwargs: Any) -> None:
    """Refuses what would not wait for the rows of other ranks, and would leave no gradient."""
    shapes = [tuple(item.shape) for item in leaves((args, kwargs)) if isinstance(item, ShardedTensor)]
    raise UsageError(
        f"{user_line()}: {func} is given a parameter of shape {shapes[0]} that was kept in a variable, and "
        "ranks share it. Inside a step function read it from its module, as in model.module.weight."
    )


def _local(item: Any) -> Any:
    return item.local if isinstance(item, ShardedTensor) else item


def _dtensor(item: Any) -> Any:
    return item.dtensor if isinstance(item, ShardedTensor) else item


def _shown(item: Any) -> Any:
    """What a function of `DTensor` gave, as scripts see it."""
    if not isinstance(item, DTensor):
        return item
    if any(placement.is_shard() for placement in item.placements):
        return ShardedTensor(item)
    return item.full_tensor()


def _gives_back_what_it_writes(func: Any) -> bool:
    returned = func._schema.returns
    return len(returned) == 1 and _is_written(returned[0])


def _is_elementwise_of_lists(func: Any) -> bool:
    """Whether it changes lists of tensors element by element, as the updates of optimizers do."""
    name = func._schema.name
    return name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")) and _is_written(
        func._schema.arguments[0]
    )


def _fit_one_by_one(args: tuple[Any, ...]) -> bool:
    """Whether tensors at the same place of the lists are cut alike, or not at all."""
    lists = [item for item in args if isinstance(item, list | tuple) and _has_tensors(item)]
    for together in zip(*lists, strict=False):
        cut = {isinstance(item, ShardedTensor) for item in together if item.ndim}
        if len(cut) > 1:
            return False
    return True


def _has_tensors(items: Any) -> bool:
    return bool(items) and all(isinstance(item, Tensor) for item in items)


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Runs a function of lists on one tensor of each after the other."""
    results: list[Any] = []
    for index in range(len(args[0])):
        own = [item[index : index + 1] if isinstance(item, list | tuple) else item for item in args]
        results += func(*own, **kwargs) or ()
    return results or None


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that a function changes in place."""
    named = zip((argument.name for argument in func._schema.arguments), args, strict=False)
    given = {**dict(named), **kwargs}
    return [given.get(argument.name) for argument in func._schema.arguments if _is_written(argument)]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _gathered(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a function on all rows; what it changes in place is cut again."""
    wholes: dict[int, tuple[ShardedTensor, Tensor]] = {}

    def whole(item: Any) -> Any:
        if not isinstance(item, ShardedTensor):
            return item
        if id(item) not in wholes:
            wholes[id(item)] = item, item.full()
        return wholes[id(item)][1]

    whole_args, whole_kwargs = map_tree(whole, (args, kwargs))
    result = func(*whole_args, **whole_kwargs)
    for item in leaves(_written(func, args, kwargs)):
        if isinstance(item, ShardedTensor):
            item.local.copy_(_own_rows(item, wholes[id(item)][1]))
    by_whole = {id(gathered): item for item, gathered in wholes.values()}
    return map_tree(lambda item: by_whole.get(id(item), item), result)


def _own_rows(item: ShardedTensor, whole: Tensor) -> Tensor:
    """The rows of this rank."""
    mesh, placements = item.dtensor.device_mesh, item.dtensor.placements
    replicated = DTensor.from_local(whole, mesh, run_check=False)
    return replicated.redistribute(mesh, placements).to_local()
