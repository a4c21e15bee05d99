"""Rules: how each operation of PyTorch runs on the parts of its tensors. One file a family of operations."""

import functools
from typing import Any

import torch

from shardwright.torch.tensor_parallel.call import RULES, Rule, name_of
from shardwright.torch.tensor_parallel.rules import (
    attention,
    elementwise,
    indexing,
    reductions,
    softmax,
    views,
)

__all__ = ["rule_of"]

_FAMILIES = (attention, elementwise, indexing, reductions, softmax, views)
"""Imported for the rules that they register."""


@functools.cache
def rule_of(func: Any) -> Rule | None:
    if func.namespace != "aten" or any(argument.is_out for argument in func._schema.arguments):
        return None
    name = name_of(func)
    found = RULES.get(name) or RULES.get(_out_of_place(name))
    if found is not None:
        return found
    if torch.Tag.nondeterministic_seeded in func.tags:
        return elementwise.draws_all
    if name.startswith(("_foreach_", "_fused_")):
        return elementwise.lists
    return elementwise.elementwise if torch.Tag.pointwise in func.tags else None


def _out_of_place(name: str) -> str:
    """``add`` for ``add_``, but ``__and__`` for itself."""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name
