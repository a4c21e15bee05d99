"""The part that this rank has of each parameter, where replicas share them: ``ds_tensor`` and its relatives.

Scripts add up norms over the ranks of ``optimizer.ds_param_shard_group``. So the parts of these ranks are
together the whole parameter, each element once; how it is cut is not promised.

::

    parameter.ds_shape, ds_numel, ds_id     of the whole
    parameter.ds_tensor.data, .ds_numel     of this rank's part
"""

from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.parameters.parameter_kinds import can_be_sharded
from shardwright.torch.startup import ScriptRun
from smdistributed.modelparallel.torch.state_mod import current_run


class PartOfParameter:
    """This rank's part of a parameter."""

    def __init__(self, parameter: nn.Parameter, model: DistributedModel):
        self._parameter = parameter
        self._model = model
        self.ds_numel = len(_range_of(parameter, current_run()))

    @property
    def data(self) -> Tensor:
        """The values of now, in one dimension."""
        return part_of(self._parameter, self._model)

    def numel(self) -> int:
        """Its elements."""
        return self.ds_numel

    def __getattr__(self, name: str) -> Any:
        """Whatever else a tensor has (``shape``, ``norm()``), of the values of now."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return getattr(self.data, name)


def describe_parts(model: DistributedModel) -> None:
    """Has each parameter tell of its part on this rank."""
    for number, parameter in enumerate(model.get_module().parameters()):
        described: Any = parameter
        described.ds_id = number
        described.ds_shape = parameter.shape
        described.ds_numel = parameter.numel()
        described.ds_tensor = PartOfParameter(parameter, model)


def part_of(parameter: nn.Parameter, model: DistributedModel, *, in_float32: bool = False) -> Tensor:
    """This rank's part of a parameter, in one dimension."""
    run, sharding = current_run(), model.replicas.sharding
    sharded = None if sharding is None else sharding.parameters.get(id(parameter))
    updated = model.replicas.updated_parts if in_float32 else None
    with torch.no_grad():
        master = None if updated is None else updated.master(parameter)
        here = parameter.detach() if sharded is None else sharded.rows
        own = _range_of(parameter, run)
        if master is not None and master.numel() == here.numel():
            here = master.detach()
        flat = here.reshape(-1)
        part = flat if sharded is not None else flat[own.start : own.stop]
        return part.float() if in_float32 else part


def _range_of(parameter: nn.Parameter, run: ScriptRun) -> range:
    """The elements of this rank's part, of the parameter in one dimension."""
    num_shards, shard = run.mesh.shard, run.data_rank % run.mesh.shard
    unit = 1
    if can_be_sharded(parameter, threshold=run.config.sdp_param_persistence_threshold):
        unit = parameter[0].numel() if parameter.shape[0] else 1  # whole rows
    size = -(-(parameter.numel() // unit) // num_shards) * unit
    return range(min(shard * size, parameter.numel()), min((shard + 1) * size, parameter.numel()))
