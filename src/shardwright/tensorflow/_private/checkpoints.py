"""What TensorFlow's own checkpoints have of objects."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

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
