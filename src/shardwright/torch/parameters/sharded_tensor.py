"""A parameter, or its gradient, of which every rank of a shard group has some rows.

Between steps, scripts find it in ``model.parameters()`` and in ``parameter.grad``. It has the shape of the
whole. Element-wise operations work on each rank's rows; norms and sums communicate. Every other operation
gathers all rows and cuts the changed ones again, so all ranks must call it. A result that is no longer cut is
an ordinary tensor.

Where ranks share layers, too (tensor parallelism), the rows are those of this rank's part of the tensor::

    parameter 6 x 4     columns 0, 1 on two tensor ranks     rows 0..2 of these on two shard ranks
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.placement import Placement
from shardwright.torch._private.tensors import (
    disabled_torch_function,
    dtensor_of,
    make_wrapper,
    new_wrapper,
    spec_like,
)
from shardwright.torch.interception.glue import batch_is_running
from shardwright.torch.pytorch.functions import is_written, one_by_one, takes_several, written_arguments
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.pytorch.tree import leaves, map_tree
from shardwright.torch.tensor_parallel.divide import divided_alike, part_as
from shardwright.torch.tensor_parallel.divided_tensor import whole as whole_of
from shardwright.torch.tensor_parallel.group import TensorGroup
from shardwright.torch.tensor_parallel.spec import Spec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor  # takes long to import, and few runs need it

# Functions beside those that PyTorch calls pointwise.
_KEEPS_ROWS = frozenset(
    f"aten::{name}"
    for name in (
        *("detach", "alias", "clone", "_to_copy", "zeros_like", "ones_like", "empty_like", "full_like"),
        *("copy_", "zero_", "fill_"),
    )
)
_SUMS = ("aten::linalg_vector_norm", "aten::sum")


class ShardedTensor(torch.Tensor):
    """A tensor with its rows spread over ranks.

    Unlike a `DTensor` it can take the place of an ordinary parameter as the same Python object, so that
    optimizers and variables of the script keep it.

    Attributes:
        dtensor: the tensor, or this rank's part of a divided one; its local part is what this rank has.
        spec: how ranks share the tensor whose part that is; None where it is the tensor.
    """

    dtensor: "DTensor"
    spec: Spec | None
    outranks_divided = True  # among the arguments of an operation

    # What is asked in every iteration (`grad`, `requires_grad`) is answered without a detour through Python.
    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, dtensor: "DTensor", spec: Spec | None = None) -> "ShardedTensor":
        """Wraps a `DTensor`, in whose place it behaves the same."""
        made: ShardedTensor = (
            make_wrapper(cls, dtensor)
            if spec is None
            else new_wrapper(
                cls, spec.shape, strides=spec.strides, dtype=dtensor.dtype, device=dtensor.device
            )
        )
        made.dtensor = dtensor
        made.spec = spec
        return made

    def __init__(self, dtensor: "DTensor", spec: Spec | None = None) -> None:
        super().__init__()

    @property
    def local(self) -> Tensor:
        return self.dtensor._local_tensor

    def full(self) -> Tensor:
        """All rows; collective over the ranks that share them."""
        rows = self.dtensor.full_tensor()
        return rows if self.spec is None else whole_of(divided_alike(rows, self.spec))

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
        if takes_several(func) and len(args[0]) > 1:
            return one_by_one(func, args, kwargs)
        if _is_of_own_rows(func, args, kwargs):
            return _on_own_rows(func, args, kwargs)
        if func._schema.name in _SUMS and _sums_up(args, kwargs):
            return _summed_up(func, args, kwargs)
        return _gathered(func, args, kwargs)

    @property
    def data(self) -> Tensor:
        """The tensor without its history, in the same memory."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype is not self.dtype:
            raise UsageError(
                f"{user_line()}: .data of a parameter that ranks share, of shape {tuple(self.shape)} and "
                f"{self.dtype}, is given a tensor of shape {tuple(value.shape)} and {value.dtype}. Change "
                "shapes and types before the first step."
            )
        with torch.no_grad():
            self.copy_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = ShardedTensor(_dtensor(self).detach().clone(), self.spec)
        copied.requires_grad_(self.requires_grad)
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


class _GatheredView(torch.Tensor):
    """A view of a shared tensor: a part of a gathered copy, which is brought up to date before each use.

    What is written to it is cut again: all ranks must do it.

    Attributes:
        part: an ordinary tensor, a view of `whole`.
        owner: what it is a view of.
    """

    part: Tensor
    owner: ShardedTensor
    whole: Tensor
    outranks_divided = True

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, part: Tensor, owner: ShardedTensor, whole: Tensor) -> "_GatheredView":
        """Wraps a part."""
        made: _GatheredView = make_wrapper(cls, part)
        made.part, made.owner, made.whole = part, owner, whole
        return made

    def __init__(self, part: Tensor, owner: ShardedTensor, whole: Tensor) -> None:
        super().__init__()

    def full(self) -> Tensor:
        """The values; collective over the ranks that share them."""
        self.whole.copy_(self.owner.full())
        return self.part

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _gathered(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredView({self.part})"


def _refuse_in_step(func: Any, args: Any, kwargs: Any) -> None:
    """Refuses what would not wait for the rows of other ranks, and would leave no gradient."""
    shapes = [tuple(item.shape) for item in leaves((args, kwargs)) if isinstance(item, ShardedTensor)]
    raise UsageError(
        f"{user_line()}: {func} is given a parameter of shape {shapes[0]} that ranks share, and that is not "
        "read from the model: from a variable, or from a copy of the model that was made after the first "
        "step. Inside a step function read it from its module, as in model.module.weight; copy the model "
        "before the first step."
    )


def _local(item: Any) -> Any:
    return item.local if isinstance(item, ShardedTensor) else item


def _dtensor(item: Any) -> Any:
    return item.dtensor if isinstance(item, ShardedTensor) else item


def _is_of_own_rows(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the rows of a rank are all that a function takes for these rows of its result."""
    if torch.Tag.nondeterministic_seeded in func.tags or "out" in func._schema.overload_name:
        return False
    if torch.Tag.pointwise not in func.tags and func._schema.name not in _KEEPS_ROWS:
        return False
    tensors = [item for item in leaves((args, kwargs)) if isinstance(item, Tensor) and item.ndim]
    first = next(tensor for tensor in tensors if isinstance(tensor, ShardedTensor))
    written = [item for item in leaves(written_arguments(func, args, kwargs)) if isinstance(item, Tensor)]
    if any(not isinstance(tensor, ShardedTensor) for tensor in written):
        return False
    kinds = {(tensor.shape, _cut(tensor)) for tensor in tensors}
    return len(kinds) == 1 and isinstance(first, ShardedTensor)


def _on_own_rows(func: Any, args: Any, kwargs: Any) -> Any:
    first = next(item for item in leaves((args, kwargs)) if isinstance(item, ShardedTensor))
    result = func(*map_tree(_local, args), **map_tree(_local, kwargs))
    written = [item for item in leaves(written_arguments(func, args, kwargs)) if isinstance(item, Tensor)]
    if written:
        return written[0] if func._schema.returns else None

    def shown(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        return ShardedTensor(dtensor_of(item, spec_like(first.dtensor._spec, item)), first.spec)

    return map_tree(shown, result)


def _cut(item: Tensor) -> tuple[bool, Placement | None]:
    """A key that is equal for tensors of which this rank has the same elements, if they have one shape."""
    if not isinstance(item, ShardedTensor):
        return False, None
    return True, None if item.spec is None else item.spec.placement


def _summed_up(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A sum, or a norm, over all ranks that have elements of a tensor."""
    found: Tensor = func(*map_tree(_dtensor, args), **map_tree(_dtensor, kwargs)).full_tensor()
    spec = args[0].spec
    if spec is None:
        return found
    group: TensorGroup = spec.group
    if func._schema.name == "aten::sum":
        return group.reduce(found)
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    return group.reduce(found.pow(order)).pow(1 / order)


def _sums_up(args: Any, kwargs: Any) -> bool:
    """Whether a sum or a norm is one of all entries that sums over ranks add up to."""
    given = (*args[1:], *kwargs.values())
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    is_finite = not isinstance(order, int | float) or 0 < order < float("inf")
    return is_finite and not any(isinstance(item, list | tuple) for item in given) and True not in given


def _is_elementwise_of_lists(func: Any) -> bool:
    """Whether it changes lists of tensors element by element, as the updates of optimizers do."""
    name = func._schema.name
    return name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")) and is_written(
        func._schema.arguments[0]
    )


def _fit_one_by_one(args: tuple[Any, ...]) -> bool:
    """Whether tensors at the same place of the lists are cut alike, or not at all."""
    lists = [item for item in args if isinstance(item, list | tuple) and _has_tensors(item)]
    for together in zip(*lists, strict=False):
        if len({_cut(item) for item in together if item.ndim}) > 1:
            return False
    return True


def _has_tensors(items: Any) -> bool:
    return bool(items) and all(isinstance(item, Tensor) for item in items)


def _gathered(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a function on all rows; what it changes in place is cut again."""
    wholes: dict[int, tuple[ShardedTensor, Tensor]] = {}
    ordinary: dict[int, tuple[Tensor, Tensor]] = {}

    def gathered(item: Any) -> Any:
        if not isinstance(item, ShardedTensor | _GatheredView):
            return item
        if id(item) not in ordinary:
            ordinary[id(item)] = item, item.full()
            owner = item.owner if isinstance(item, _GatheredView) else item
            wholes[id(item)] = owner, item.whole if isinstance(item, _GatheredView) else ordinary[id(item)][1]
        return ordinary[id(item)][1]

    result = func(*map_tree(gathered, args), **map_tree(gathered, kwargs))
    for item in leaves(written_arguments(func, args, kwargs)):
        if isinstance(item, ShardedTensor | _GatheredView):
            owner, whole = wholes[id(item)]
            if whole.shape != owner.shape:
                raise UsageError(
                    f"{user_line()}: {func} changes the shape of a parameter that ranks share, from "
                    f"{tuple(owner.shape)} to {tuple(whole.shape)}. Do it before the first step."
                )
            owner.local.copy_(_own_rows(owner, whole))
    given = {id(tensor): item for item, tensor in ordinary.values()}
    source = next(iter(wholes.values())) if _gives_views(func) else None

    def shown(item: Any) -> Any:
        if id(item) in given:
            return given[id(item)]
        return _GatheredView(item, *source) if source is not None and isinstance(item, Tensor) else item

    return map_tree(shown, result)


def _gives_views(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _own_rows(item: ShardedTensor, whole: Tensor) -> Tensor:
    mesh, placements = item.dtensor.device_mesh, item.dtensor.placements
    part = whole if item.spec is None else part_as(whole, item.spec)
    replicated = type(item.dtensor).from_local(part, mesh, run_check=False)
    return replicated.redistribute(mesh, placements).to_local()


def own_part(gradient: Tensor) -> Tensor:
    """The rows of this rank, where ranks share a gradient."""
    part: Tensor = getattr(gradient, "local", gradient)
    return part
