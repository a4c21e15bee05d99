"""The table that says which kernel each layer took, and why not a fused one."""

from collections.abc import Iterable

from torch import nn

from shardwright.torch.attention.kernels import Choice
from shardwright.torch.attention.marks import Choices, left_alone

__all__ = ["attention_table", "kernels_of"]


def kernels_of(model: nn.Module) -> dict[str, Choice]:
    """What the attention of each layer is computed by, by the name of its module."""
    found = {name: Choices.of(module) or left_alone(module) for name, module in model.named_modules()}
    return {name: choice for name, choice in found.items() if choice is not None}


def attention_table(model: nn.Module) -> str:
    """The table, with one line for layers that took the same; empty without such layers."""
    rows: dict[Choice, list[str]] = {}
    for name, choice in kernels_of(model).items():
        rows.setdefault(choice, []).append(name)
    if not rows:
        return ""
    cells = [(_names(names), choice.kernel, choice.why_not_fused) for choice, names in rows.items()]
    widths = [max(len(row[column]) for row in cells) for column in (0, 1)]
    return "\n".join(
        f"  {layers:<{widths[0]}}  {kernel:<{widths[1]}}  {why}".rstrip() for layers, kernel, why in cells
    )


def _names(names: Iterable[str]) -> str:
    first, *rest = names
    return first if not rest else f"{first} ... {rest[-1]} ({1 + len(rest)})"
