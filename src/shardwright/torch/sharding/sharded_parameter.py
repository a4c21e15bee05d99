"""A parameter of which this rank keeps some rows, and the forms that it takes in turn.

Any computation with it first gathers its rows; the Python object then is an ordinary parameter. A query of
its shape or gradient gathers nothing.

::

    between steps          ShardedTensor           rows of this rank, shape of the whole
    inside of a step       AbsentParameter         none, as long as nothing is computed with it
                           ordinary tensor         all rows
    while a step is traced ordinary tensor         none, on the meta device
    in optimizer.step()    ordinary tensor         rows of this rank, shape of these

It stays the same Python object: optimizers, ties and variables of the script keep referring to it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardwright.errors import UsageError
from shardwright.torch._private.tensors import dtensor_of, put_in_place, spec_like, without_subclass_functions
from shardwright.torch.parameters.parameter_kinds import gradient_dtype, set_gradient_dtype
from shardwright.torch.parameters.sharded_tensor import ShardedTensor
from shardwright.torch.pytorch.functions import OF_GRADIENT, is_metadata
from shardwright.torch.pytorch.tree import leaves, map_tree
from shardwright.torch.tensor_parallel.divide import divided_alike, part_as, put_divided_in_place
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of

Bring = Callable[[Sequence[Tensor]], None]
"""Has all rows of the parameters among some tensors at hand."""

_PLACE = "_shardwright_absent"


class _Shown(Protocol):
    """The holder of a parameter's forms: see `ShardedParameter`."""

    @property
    def parameter(self) -> Tensor:
        """In its present form."""

    @property
    def holder(self) -> Tensor:
        """The tensor that has the gradient."""


def _accessors(*names: str) -> set[Any]:
    found = (getattr(Tensor, name, None) for name in names)
    return {
        accessor
        for each in found
        for kind in ("__get__", "__set__")
        if (accessor := getattr(each, kind, None))
    }


_OF_HOOKS = frozenset(_accessors("_backward_hooks", "_post_accumulate_grad_hooks"))


class AbsentParameter(ShardedTensor):
    """A parameter whose rows are gathered when they are needed.

    `becomes_absent` makes a parameter that is a `ShardedTensor` one of these.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OF_GRADIENT:  # it belongs to the form of the parameter that computes
            sharded, _ = vars(args[0])[_PLACE]
            return func(sharded.holder, *args[1:])
        if is_metadata(func) or func in _OF_HOOKS:
            with without_subclass_functions():
                return func(*args, **kwargs)
        args, kwargs = _brought((args, kwargs))
        return func(*args, **kwargs)


@contextmanager
def absent_arguments_brought() -> Iterator[None]:
    """Has custom functions (`torch.autograd.Function`) find their arguments at hand.

    Their `apply` takes tensors past `__torch_function__`, as do the functions of reentrant checkpoints.
    """
    kind: Any = torch.autograd.Function
    original = kind.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(item, AbsentParameter) for item in args):
            args = _brought(args)
        return MethodType(original.__func__, cls)(*args, **kwargs)

    kind.apply = classmethod(apply)
    try:
        yield
    finally:
        kind.apply = original


def _brought(given: Any) -> Any:
    """Arguments with all rows at hand of the parameters among them.

    What a checkpoint has saved while rows were absent is another Python object than the parameter.
    """
    absent = next(item for item in leaves(given) if isinstance(item, AbsentParameter))
    _, bring = vars(absent)[_PLACE]
    given = map_tree(_parameter_of, given)
    bring([item for item in leaves(given) if isinstance(item, Tensor)])
    return given


def _parameter_of(item: Any) -> Any:
    return vars(item)[_PLACE][0].parameter if isinstance(item, AbsentParameter) else item


def becomes_absent(parameter: Tensor, sharded: _Shown, bring: Bring) -> None:
    """Has a parameter bring its rows when they are needed."""
    vars(parameter)[_PLACE] = sharded, bring
    parameter.__class__ = AbsentParameter


def becomes_present(parameter: Tensor) -> None:
    """Takes back `becomes_absent`; nothing happens where that was not called."""
    if type(parameter) is AbsentParameter:
        parameter.__class__ = ShardedTensor  # type: ignore[assignment]
        del vars(parameter)[_PLACE]


class Form(Enum):
    """The current form of a sharded parameter."""

    SHARDED = "sharded"
    WHOLE = "whole"
    SHAPE = "shape"
    LOCAL = "local"


class ShardedParameter:
    """A parameter of the model that is cut into shards.

    It begins in the form `Form.WHOLE`.

    Attributes:
        spec: how ranks share the parameter, whose part has these rows; None where they do not.
        gradient: of these, what the batch that runs has added; None where that is nothing.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        *,
        whole: Tensor | None,
        own_rows: range,
        rows: Tensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
    ):
        self.name = name
        self.parameter = parameter
        self.own_rows = own_rows
        self.rows = rows
        self.gradient: Tensor | None = None
        self._bring: Bring | None = None
        self.spec = parameter._spec if isinstance(parameter, DividedTensor) else None
        self.part_shape = tuple(local_of(parameter).shape)
        if parameter.is_meta:
            real = nn.Parameter(rows.new_empty(0), parameter.requires_grad)
            set_gradient_dtype(real, gradient_dtype(parameter))
            put_in_place(parameter, real)
        self._without_rows = _without_memory(self.part_shape, rows)
        self._form = Form.WHOLE
        # What writes to its neighbours in memory does not count as a change of it.
        self._compute_with(self._without_rows if whole is None else whole)
        dtensor = DTensor.from_local(
            rows,
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(self.part_shape),
            stride=local_of(parameter).stride(),
        )
        self._spec = dtensor._spec
        self._others: dict[Form, Tensor] = {
            Form.SHARDED: ShardedTensor(dtensor, self.spec).requires_grad_(parameter.requires_grad),
            Form.LOCAL: nn.Parameter(rows, parameter.requires_grad),
        }
        for other in self._others.values():
            set_gradient_dtype(other, gradient_dtype(parameter))
        # What the other form has as attributes goes with the Python object, which is always this one.
        vars(parameter).update(dtensor=dtensor, spec=self.spec, _is_param=True)
        self._dtype = parameter.dtype
        self._version = parameter._version

    @property
    def holder(self) -> Tensor:
        """The tensor that computes, and gets the gradient: another Python object where rows are absent."""
        return self.parameter if self._form is Form.WHOLE else self._others[Form.WHOLE]

    def begin(self, bring: Bring | None) -> None:
        """At the beginning of a step."""
        if self.parameter.dtype != self._dtype:
            raise UsageError(
                f"{self.name} was {self._dtype} when it was spread over the ranks that share it, and is "
                f"{self.parameter.dtype} now. Cast the model before the first step."
            )
        self._version = self.holder._version
        self._bring = bring
        if bring is None:
            self.come()
        else:
            self._show(Form.SHARDED)
            becomes_absent(self.parameter, self, bring)

    def come(self, whole: Tensor | None = None) -> None:
        """All rows have arrived."""
        if whole is not None:
            self._compute_with(whole)
        becomes_present(self.parameter)
        self._show(Form.WHOLE)
        if self.parameter._backward_hooks is not None:
            # Hooks that were registered between steps belong to the form that it had then.
            self.parameter._backward_hooks = self.parameter._backward_hooks
        if self._bring is not None:
            # A checkpoint may have saved the other form.
            becomes_absent(self._others[Form.SHARDED], self, self._bring)

    def go(self, bring: Bring) -> None:
        """Releases the gathered rows; the next computation gathers them again."""
        self._show(Form.SHARDED)
        self._compute_with(self._without_rows)
        becomes_absent(self.parameter, self, bring)

    def to_sharded(self, *, written: bool = False) -> None:
        """At the end of a step; the gradient is that of the rows of this rank."""
        holder = self.holder
        changed = holder._version != self._version and not written
        if written and self.rows.data_ptr() != self.rows_of(self.parameter).data_ptr():
            self.rows.copy_(self.rows_of(self.parameter.detach()))
        holder.grad = None
        becomes_present(self.parameter)
        self._show(Form.SHARDED)
        gradient, self.gradient = self.gradient, None
        if gradient is not None:
            self._add(gradient)
        if changed:
            raise UsageError(
                f"the step function changes the parameter {self.name} in place, and ranks share it: each "
                "would change it once more. Change it between two steps, or set "
                "sharded_data_parallel_degree 1."
            )

    def leave(self) -> None:
        """Leaves a step that failed in its middle: as before it, with the gradients of earlier steps."""
        self.holder.grad = None
        self.gradient = None
        becomes_present(self.parameter)
        self._show(Form.SHARDED)

    def forget_rows(self) -> None:
        """Between steps: the rows of other ranks take no memory for it any more."""
        self._compute_with(self._without_rows)

    def show_shape(self) -> None:
        """Shows the whole shape while rows are not at hand and nobody computes with them; `go` ends it."""
        becomes_present(self.parameter)
        if Form.SHAPE not in self._others:
            shape = torch.empty(self.parameter.shape, dtype=self._dtype, device="meta")
            self._others[Form.SHAPE] = nn.Parameter(shape, self.parameter.requires_grad)
        self._show(Form.SHAPE)

    def to_local(self) -> None:
        """Before the optimizer: the rows of this rank, with their gradient."""
        gradient = self.parameter.grad
        self._show(Form.LOCAL)
        self.parameter.grad = None if gradient is None else self.rows_of(gradient)

    def from_local(self) -> None:
        """Behind the optimizer, which may have cleared the gradient."""
        cleared = self.parameter.grad is None
        self.parameter.grad = None
        self._show(Form.SHARDED)
        if cleared:
            self.parameter.grad = None

    def _show(self, form: Form) -> None:
        """Gives it another form."""
        if form is self._form:
            return
        if form in self._others:
            becomes_present(self._others[form])
        trained = self.parameter.requires_grad
        other = self._others[form]
        if self.spec is None:
            put_in_place(self.parameter, other)
        else:
            put_divided_in_place(self.parameter, other)
        del self._others[form]
        self._others[self._form] = other
        self._form = form
        if self.parameter.requires_grad is not trained:
            self.parameter.requires_grad_(trained)

    def _add(self, gradient: Tensor) -> None:
        present = self.parameter.grad
        if present is not None and self.spec is not None and not isinstance(present, ShardedTensor):
            gradient, present = gradient + self.rows_of(present), None  # a script has set it
        if present is None:
            self.parameter.grad = self.around(gradient)
        else:
            self.rows_of(present).add_(gradient)

    def _compute_with(self, memory: Tensor) -> None:
        """Has the form that computes find all rows in this memory."""
        holder = self.holder
        holder.data = memory if self.spec is None else divided_alike(memory, self.spec)

    def around(self, rows: Tensor) -> ShardedTensor:
        """A tensor with the shape of the whole, of which every rank gives its rows."""
        return ShardedTensor(dtensor_of(rows, spec_like(self._spec, rows)), self.spec)

    def rows_of(self, tensor: Tensor) -> Tensor:
        """The rows of this rank of a tensor with the shape of the whole."""
        if isinstance(tensor, ShardedTensor):
            return tensor.local
        if self.spec is not None:
            tensor = part_as(tensor, self.spec)
        return tensor[self.own_rows.start : self.own_rows.stop]


def _without_memory(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor that has a shape, and no data to read."""
    made = like.new_empty(shape)
    made.untyped_storage().resize_(0)
    return made
