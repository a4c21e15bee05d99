"""Recomputation by hand, in the place of ``torch.utils.checkpoint``: modules, and no functions."""

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed_around_units

from shardwright.errors import UsageError
from shardwright.torch.backward.activation_checkpointing import call_recomputed
from shardwright.torch.interception.glue import active_handler
from smdistributed.modelparallel.torch.module_proxy import unproxied
from smdistributed.modelparallel.torch.recomputation import runs_of
from smdistributed.modelparallel.torch.state_mod import current_run


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """Calls a module, and has its activations computed again in the backward instead of kept."""
    module = unproxied(module)
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"checkpoint takes an nn.Module and its arguments, not a {type(module).__name__}. Put what it "
            "does into the forward of a module."
        )
    return _called([module], module, args, kwargs, preserve_rng_state=preserve_rng_state)


def checkpoint_sequential(
    sequential: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Calls the children of an `nn.Sequential` one after the other, and recomputes them by a strategy.

    Args:
        strategy: ``"each"`` child by itself, ``"contiguous"`` all together, or ``"group_N"`` N at a time.
        pack_args_as_tuple: a child gets a tuple as its one argument; else a tuple is its arguments.
    """
    sequential = unproxied(sequential)
    if not isinstance(sequential, nn.Sequential):
        raise UsageError(f"checkpoint_sequential takes an nn.Sequential, not a {type(sequential).__name__}.")
    value = input
    for run in runs_of(sequential, strategy):
        call = _InSequence(run, spreads=not pack_args_as_tuple)
        value = _called(run, call, (value,), {}, preserve_rng_state=preserve_rng_state)
    return value


class _InSequence:
    """Calls modules one after the other.

    Args:
        spreads: a tuple that one of them gives is the arguments of the next.
    """

    def __init__(self, modules: list[nn.Module], *, spreads: bool):
        self._modules = modules
        self._spreads = spreads

    def __call__(self, value: Any) -> Any:
        for module in self._modules:
            value = module(*value) if self._spreads and isinstance(value, tuple) else module(value)
        return value


def _called(
    modules: list[nn.Module],
    call: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    preserve_rng_state: bool,
) -> Any:
    if active_handler() is not None and current_run().mesh.pipeline > 1:
        # Around units, some of which are on other ranks.
        return recomputed_around_units(
            call, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs
        )
    around = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    return call_recomputed(around, call, args, kwargs, preserve_rng_state=preserve_rng_state)
