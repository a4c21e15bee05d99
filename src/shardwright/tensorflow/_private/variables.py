"""Variables whose memory is given up, because another rank holds them."""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import tensorflow as tf

from shardwright.errors import UsageError

__all__ = ["given_back", "given_up"]


def given_up(variable: Any, is_allowed: Callable[[], bool], refusal: str) -> None:
    """Frees a variable's memory, and makes checkpoints leave it out: another rank holds it.

    A value without elements takes its place. (`DestroyResourceOp` does nothing while Python has the handle.)
    Reads go through `_read_variable_op`, `sparse_read` and `gather_nd`. Eager operations take ``_handle``
    themselves, or make such a read where that is no tensor.

    Args:
        variable: TensorFlow's own.
        is_allowed: whether it may be read and changed now, as in a step function that is being traced.
        refusal: text of the error of other reads. Other changes are left to the rank that holds it.
    """
    with tf.init_scope():
        empty = tf.zeros([0], variable.dtype)
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=empty, validate_shape=False)
    variable._shardwright_guard = is_allowed, refusal
    variable.__class__ = _guarded_class(cast(Any, type(variable)))


def given_back(variable: Any, value: Any) -> None:
    """Takes back `given_up`: the variable has a value here again."""
    variable.__class__ = type(variable).__mro__[1]
    del variable._shardwright_guard
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value, validate_shape=False)


@cache
def _guarded_class(own: Any) -> Any:
    def read(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_allowed, refusal = self._shardwright_guard
            if not is_allowed():
                raise UsageError(refusal)
            return getattr(super(guarded, self), name)(*args, **kwargs)

        return method

    def change(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_allowed, _ = self._shardwright_guard
            return getattr(super(guarded, self), name)(*args, **kwargs) if is_allowed() else self

        return method

    guarded = type(
        own.__name__,
        (own,),
        {
            **{name: read(name) for name in ("_read_variable_op", "sparse_read", "gather_nd")},
            **{name: change(name) for name in ("assign", "assign_add", "assign_sub")},
            "handle": property(lambda self: vars(self)["_handle"]),
            "_handle": property(lambda self: self.handle if self._shardwright_guard[0]() else None),
            "__repr__": lambda self: (
                f"<tf.Variable {self.name!r} shape={self.shape} dtype={self.dtype.name}, on another rank>"
            ),
            "_serialize_to_tensors": lambda self: {},
            "_restore_from_tensors": lambda self, restored: [],
        },
    )
    return guarded
