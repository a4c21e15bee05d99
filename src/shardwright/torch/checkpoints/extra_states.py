"""Saves and loads what modules keep outside parameters and buffers: ``get_extra_state``."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shardwright.errors import CheckpointError
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.script_run import script_run
from shardwright.torch.tensor_parallel.parts import all_elements

__all__ = ["check_extra_states", "own_extra_states", "set_extra_states"]


def own_extra_states(model: DistributedModel) -> dict[str, Any]:
    """States of the modules that this rank runs, by name of the module; one rank saves each."""
    run = script_run()
    if run.data_rank:
        return {}
    own = {
        name: all_elements(module.get_extra_state())
        for name, module in _with_extra_states(model)
        if model.runs_here(name)
    }
    return own if run.is_first_holder else {}


def check_extra_states(model: DistributedModel, states: Mapping[str, Any]) -> None:
    """Refuses a checkpoint in which other modules have saved something than do here."""
    modules = dict(_with_extra_states(model))
    different = sorted(modules.keys() ^ states.keys())
    if different:
        raise CheckpointError(
            f"the checkpoint has extra states of {len(states)} modules, and this model has {len(modules)} "
            f"with get_extra_state(); they differ in {', '.join(map(repr, different[:5]))}. Build the model "
            "as it was when it was saved."
        )


def set_extra_states(model: DistributedModel, states: Mapping[str, Any]) -> None:
    """Gives modules their saved extra state; modules without one stay as they are."""
    for name, module in _with_extra_states(model):
        if name in states:
            module.set_extra_state(states[name])


def _with_extra_states(model: DistributedModel) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.get_module().named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module
