"""The units of a model: the layers that are placed whole, by the planner or ``with sw.partition(i):``.

A Keras model inside another is no unit: the layers in it are, for its own code is cheap glue. Where that
gives too few units for the stages, the layer with the most parameters is opened, too, as long as it has
layers of its own.

Placement by hand applies where `auto_partition` is false; everything else goes to `default_partition`. The
innermost context wins.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from shardwright.run.planning import check_partition, point_out_auto_partition
from shardwright.tensorflow import _private
from shardwright.tensorflow.recorder import LayerCall
from shardwright.tensorflow.variables import tf_variable


@dataclass(frozen=True, slots=True)
class UnitCalls:
    """The calls of units in a trace.

    Attributes:
        layers: the unit of each call, in order.
        labels: its label in a plan: ``name``, or ``name#k`` where it is called again.
        positions: number of a layer's call -> position of the unit call that it belongs to.
    """

    layers: tuple[Any, ...]
    labels: tuple[str, ...]
    positions: Mapping[int, int]

    def position(self, call: LayerCall) -> int | None:
        """The position of the unit call that a layer's call is in; None for code between units."""
        return self.positions.get(call.number)


def layer_names(model: Any) -> dict[int, str]:
    """The path of every layer inside a model, by its id, each once: ``encoder/block_1/dense``."""
    names: dict[int, str] = {}
    taken: set[str] = set()

    def name_inside(layer: Any, path: str) -> None:
        for inner in _private.layers_of(layer):
            if id(inner) in names:
                continue
            wanted = f"{path}{inner.name}"
            name, again = wanted, 1
            while name in taken:
                again += 1
                name = f"{wanted}_{again}"
            taken.add(name)
            names[id(inner)] = name
            name_inside(inner, f"{name}/")

    name_inside(model, "")
    return names


def choose_units(calls: Sequence[LayerCall], names: Mapping[int, str], *, wanted: int) -> UnitCalls:
    opened: set[int] = set()
    while True:
        found = _unit_calls(calls, names, opened)
        if len(found.layers) >= wanted:
            return found
        holding = {
            id(call.around.layer) for call in calls if call.around is not None and id(call.layer) in names
        }
        closed = [layer for layer in found.layers if id(layer) in holding]
        if not closed:
            return found
        opened.add(id(max(closed, key=_num_parameters)))


def _unit_calls(calls: Sequence[LayerCall], names: Mapping[int, str], opened: set[int]) -> UnitCalls:
    layers: list[Any] = []
    labels: list[str] = []
    positions: dict[int, int] = {}
    counts: dict[int, int] = {}
    for call in calls:
        if call.around is not None and call.around.number in positions:
            positions[call.number] = positions[call.around.number]
            continue
        if id(call.layer) not in names or id(call.layer) in opened or _is_model(call.layer):
            continue
        ordinal = counts.get(id(call.layer), 0)
        counts[id(call.layer)] = ordinal + 1
        positions[call.number] = len(layers)
        layers.append(call.layer)
        name = names[id(call.layer)]
        labels.append(f"{name}#{ordinal}" if ordinal else name)
    return UnitCalls(tuple(layers), tuple(labels), positions)


def _is_model(layer: Any) -> bool:
    return isinstance(layer, _private.keras_model_class())


def _num_parameters(layer: Any) -> int:
    return sum(prod(tf_variable(variable).shape.as_list()) for variable in layer.trainable_variables)


_PIN = "_shardwright_partition"
_OPEN: list[int] = []


@contextmanager
def partition(rank: int) -> Iterator[None]:
    """Places the layers that are created inside on a pipeline rank.

    Args:
        rank: pipeline rank, from 0.

    Raises:
        UsageError: there is no such pipeline rank.
    """
    check_partition(rank)
    point_out_auto_partition(of="layers", stacklevel=4)
    _OPEN.append(rank)
    try:
        with _private.new_layers_told(_remember):
            yield
    finally:
        _OPEN.pop()


def rank_of(layer: Any) -> int | None:
    """The pipeline rank on which the user placed this very layer, if so."""
    rank: int | None = vars(layer).get(_PIN)
    return rank


def _remember(layer: Any) -> None:
    vars(layer).setdefault(_PIN, _OPEN[-1])  # of several contexts the innermost is told first
