"""Recomputation of modules, as ``smp.set_activation_checkpointing`` asks for it."""

import warnings

from torch import nn

import shardwright.torch as sw
from shardwright.errors import UsageError
from smdistributed.modelparallel.torch.module_proxy import unproxied


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Recomputes the activations of a module in the backward, instead of keeping them.

    Call it before the first step.

    Args:
        module: any module of the model. Of an `nn.Sequential`, or an `nn.ModuleList`, its children.
        strategy: for an `nn.Sequential`: ``"each"`` child by itself. ``"contiguous"`` and ``"group_N"`` do as
            ``"each"`` does, with a warning.
    """
    module = unproxied(module)
    if not isinstance(module, nn.ModuleList):
        sw.set_activation_checkpointing(
            module,
            preserve_rng_state=preserve_rng_state,
            pack_args_as_tuple=pack_args_as_tuple,
            strategy=strategy,
        )
        return
    if _group_size(strategy) != 1:
        warnings.warn(
            f"strategy {strategy!r} is for an nn.Sequential, and this is a list of {len(module)} modules, "
            "which the model calls itself: each is recomputed by itself.",
            stacklevel=2,
        )
    for child in module:
        sw.set_activation_checkpointing(child, preserve_rng_state=preserve_rng_state)


def runs_of(sequential: nn.Sequential, strategy: str) -> list[list[nn.Module]]:
    """The children that are recomputed together."""
    children = list(sequential)
    size = _group_size(strategy) or max(len(children), 1)
    return [children[first : first + size] for first in range(0, len(children), size)]


def _group_size(strategy: str) -> int:
    """Children that are recomputed together; 0 for all."""
    if strategy in ("each", "contiguous"):
        return 1 if strategy == "each" else 0
    prefix, _, number = str(strategy).partition("_")
    if prefix == "group" and number.isdigit() and int(number) > 0:
        return int(number)
    raise UsageError(f"strategy {strategy!r} is unknown. Use each, contiguous, or group_N such as group_2.")
