"""Variables whose memory is given up, and what TensorFlow's own checkpoints have of objects."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2
from tensorflow.python.ops import resource_variable_ops

from shardwright.errors import UsageError

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


@dataclass(frozen=True, slots=True)
class SavedObject:
    """What a file has of an object.

    Attributes:
        number: of its place in the file.
        has_value: it has values of the object itself; of a variable that its rank did not hold it has none.
        num_slots: of an optimizer that keeps its slots in one list, how many are in the file.
    """

    number: int
    has_value: bool
    num_slots: int


def saved_graph(path: str) -> Any:
    """What a file knows of the objects that were saved."""
    reader = tf.train.load_checkpoint(path)
    if not reader.has_tensor(_GRAPH):
        return None
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(reader.get_tensor(_GRAPH))
    return graph


def saved_objects(checkpoint: Any, graph: Any) -> Iterator[tuple[Any, SavedObject]]:
    """The objects of a ``tf.train.Checkpoint`` that a file has, too.

    TensorFlow matches them by the names of attributes. An object comes several times if it has several
    names, which may lead to different places of the file.
    """
    view = tf.train.TrackableView(checkpoint)
    seen: set[tuple[int, int]] = set()
    root = getattr(checkpoint, "root", None)  # whose attributes are those of the file then
    root = root() if isinstance(root, weakref.ref) else root  # as legacy Keras gives it
    pending = [(checkpoint, 0), *([] if root is None else [(root, 0)])]
    while pending:
        held, number = pending.pop()
        if (id(held), number) in seen:
            continue
        seen.add((id(held), number))
        node = graph.nodes[number]
        yield held, SavedObject(number, bool(node.attributes), _num_slots(graph, node))
        numbers = {child.local_name: child.node_id for child in node.children}
        pending += [(child, numbers[name]) for name, child in view.children(held).items() if name in numbers]


def _num_slots(graph: Any, node: Any) -> int:
    """Optimizers have counter and learning rate in that list as well, and under names of their own."""
    numbers = {child.local_name: child.node_id for child in node.children}
    if "_variables" not in numbers:
        return 0
    listed = {child.node_id for child in graph.nodes[numbers["_variables"]].children}
    return len(listed - set(numbers.values()))


def without_autocast(variable: Any) -> Any:
    """TensorFlow's variable inside of legacy Keras' `AutoCastVariable` of mixed precision; any other itself.

    That one is a `tf.Variable`, too, and has neither a handle of its own nor memory.
    """
    return variable._variable if type(variable).__name__ == "AutoCastVariable" else variable


def made_without_value(options: Mapping[str, Any], *, fewest_elements: int = 2) -> Any:
    """A variable that gets its value later, and no memory until then."""
    make = options.get("initial_value")
    if not callable(make):
        return None
    with tf.Graph().as_default():  # what it will look like
        like = make()
    if not like.shape.is_fully_defined() or like.shape.num_elements() < fewest_elements:
        return None
    names = "trainable", "name", "constraint", "synchronization", "aggregation"
    given = {name: options[name] for name in names if options.get(name) is not None}
    dtype = options.get("dtype") or like.dtype
    return resource_variable_ops.UninitializedVariable(shape=like.shape, dtype=dtype, **given)


def given_up(
    variable: Any,
    is_allowed: Callable[[], bool],
    refusal: str,
    take: Callable[[Any], None] | None = None,
    is_left_out: Callable[[], bool] = lambda: False,
) -> None:
    """Frees a variable's memory: another rank holds it.

    A value without elements takes its place. (`DestroyResourceOp` does nothing while Python has the handle.)
    Reads go through `_read_variable_op`, `sparse_read` and `gather_nd`. Eager operations take ``_handle``
    themselves, or make such a read where that is no tensor.
    """
    with tf.init_scope():
        empty = tf.zeros([0], variable.dtype)
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=empty, validate_shape=False)
    variable._shardwright_guard = is_allowed, refusal, take, is_left_out
    variable.__class__ = _guarded_class(cast(Any, type(variable)))


def given_back(variable: Any, value: Any) -> None:
    """Takes back `given_up`: the variable has a value here again; with None it will get one."""
    variable.__class__ = type(variable).__mro__[1]
    del variable._shardwright_guard
    if value is not None:
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value, validate_shape=False)


@cache
def _guarded_class(own: Any) -> Any:
    def read(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_allowed, refusal, *_ = self._shardwright_guard
            if not is_allowed():
                raise UsageError(refusal)
            return getattr(super(guarded, self), name)(*args, **kwargs)

        return method

    def change(name: str) -> Any:
        def method(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            is_allowed, refusal, take, _ = self._shardwright_guard
            if is_allowed():
                return getattr(super(guarded, self), name)(value, *args, **kwargs)
            if take is not None and name != "assign":
                raise UsageError(refusal)
            if take is not None:
                take(value)
            return self

        return method

    def saved(self: Any) -> dict[str, Any]:
        _, refusal, _, is_left_out = self._shardwright_guard
        if not is_left_out():
            raise UsageError(refusal)
        return {}

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
            "_serialize_to_tensors": saved,
            "_restore_from_tensors": lambda self, restored: [],
        },
    )
    return guarded
