"""Checks that a module can be wrapped, before any rank waits for another."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwright.errors import UsageError
from shardwright.run.context import Context
from shardwright.run.failure import first_cause_named
from shardwright.run.joint_calls import call_together
from shardwright.torch.counting.compiled_modules import without_compilers
from shardwright.torch.interception.compiled_code import refuse_wrappers
from shardwright.torch.interception.library_code import without_scripted
from shardwright.torch.parameters.delayed_initialization import refuse_half_built
from shardwright.torch.parameters.parameter_kinds import refuse_unsendable
from shardwright.torch.parameters.registration import agree_on_registration
from shardwright.torch.parameters.residency import refuse_released

__all__ = ["accepted"]


def accepted(module: nn.Module, current: Context) -> nn.Module:
    """A module of the script, without wrappers of compilers; collective over all ranks."""
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"DistributedModel wraps an nn.Module, not a {type(module).__name__}.{_instead(module)}"
        )
    if current.model is not None:
        raise UsageError(
            "a model is wrapped already, and a run has one. Put both into one nn.Module, and wrap that."
        )
    refuse_wrappers(module, alone=not current.mesh.spreads_model)
    module = without_scripted(without_compilers(module))
    _refuse_lazy(module)
    refuse_released(module)
    refuse_half_built(module)
    refuse_unsendable(module, current.groups.data)
    all_ranks = range(current.mesh.world_size)
    with first_cause_named(current), call_together("sw.DistributedModel(...)", all_ranks):
        agree_on_registration(module, current)
    for optimizer in current.optimizers:
        optimizer.check(module.parameters())
    return module


def _refuse_lazy(module: nn.Module) -> None:
    """Refuses parameters that get their shapes in a first forward."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(
                f"{name} has no shape yet: it gets one in the first forward. Call the model once on a "
                "sample, under torch.no_grad(), before DistributedModel."
            )


def _instead(given: Any) -> str:
    """What to pass, where it is known."""
    if isinstance(given, type) and issubclass(given, nn.Module):
        return f" Make one of the class: DistributedModel({given.__name__}(...))."
    if isinstance(given, Mapping):
        return " Build the model, wrap it, and give it these values: model.load_state_dict(values)."
    return " Pass the model itself, such as DistributedModel(Net())."
