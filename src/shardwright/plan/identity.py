"""The model that a plan is for: its fingerprint, its unit calls, and how those of another model differ."""

from collections import Counter
from collections.abc import Sequence

from pydantic import NonNegativeInt

from shardwright.files import Record
from shardwright.model_graph import ModelGraph

__all__ = ["ModelIdentity", "difference_of_units", "identity"]


class ModelIdentity(Record):
    """The model that a plan was made for.

    Attributes:
        fingerprint: hash of the names, shapes and types of all parameters and buffers.
        num_parameters: trained and frozen, ties counted once.
        units: labels of the unit calls in execution order: ``name``, or ``name#k`` for a repeated call.
    """

    fingerprint: str
    num_parameters: NonNegativeInt
    units: tuple[str, ...]


def identity(graph: ModelGraph) -> ModelIdentity:
    """The identity of a traced model, as a plan records it."""
    return ModelIdentity(
        fingerprint=graph.model_fingerprint,
        num_parameters=graph.num_parameters,
        units=graph.labels,
    )


def difference_of_units(expected: Sequence[str], found: Sequence[str]) -> str:
    """The difference between two lists of unit calls, as the part of a sentence."""
    twice = [unit for unit, count in Counter(found).items() if count > 1]
    if twice:
        return f"{len(twice)} of the model's units are placed more than once ({_sample(twice)})"
    missing = [unit for unit in expected if unit not in set(found)]
    extra = [unit for unit in found if unit not in set(expected)]
    if missing or extra:
        parts = []
        if missing:
            parts.append(f"{len(missing)} of the model's units are not in the stages ({_sample(missing)})")
        if extra:
            parts.append(f"the stages name {len(extra)} that the model does not have ({_sample(extra)})")
        return " and ".join(parts)
    for position, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return f"the order differs at position {position}: the model calls {a}, the stages have {b}"
    raise AssertionError("the two are equal")


def _sample(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
