"""What is known of a family of Hugging Face models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from smdistributed.modelparallel.torch.nn.huggingface.parts import Part

Arguments = Callable[[Any, Any, int], Mapping[str, Any]]
"""Config, a layer of Hugging Face's and its number -> arguments of `DistributedTransformerLayer`."""


def nothing_else(config: Any) -> str:
    """Nothing that a distributed layer does not do."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models.

    Attributes:
        path: the same as in the names of a state, from the left end of a name or after a dot.
        parts: how the weights of a layer correspond.
        buffers: masks and tables of positions, by their names within a layer, or within a model.
        beyond: what a config asks for that a distributed layer does not do; empty for nothing.
    """

    name: str
    containers: tuple[str, ...]
    attribute: str
    path: str
    parts: tuple[Part, ...]
    arguments: Arguments
    buffers: tuple[str, ...] = ()
    beyond: Callable[[Any], str] = nothing_else
