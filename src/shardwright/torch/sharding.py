"""Sharded data parallelism: replicas of a stage share its parameters, gradients and optimizer state.

Every rank of a shard group keeps some rows of each large parameter, their gradient, and what the optimizer
knows of them. Ranks of one host keep their rows in memory that all of them see, so that all rows are there
for all of them without a copy::

    host memory      | rows of rank 0 | rows of rank 1 | rows of rank 2 | rows of rank 3 |
    rank 1 computes with all of them, and updates its own

Nobody updates rows while another still computes with them: ranks meet when a step begins and when it ends.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, Replicate, Shard

from shardwright.comm.shared_rows import memory_of_node
from shardwright.shard_layout import ShardLayout
from shardwright.torch.context import Context
from shardwright.torch.sharded_parameter import ShardedParameter

__all__ = ["Sharding", "can_be_sharded"]


def can_be_sharded(parameter: Tensor, *, threshold: int) -> bool:
    """Whether a parameter is cut, or left whole on every rank.

    Args:
        parameter: of the model.
        threshold: elements below which it is left whole.
    """
    return (
        parameter.dim() > 0
        and parameter.numel() >= max(threshold, 1)
        and parameter.layout is torch.strided
        and parameter.is_contiguous()
    )


class Sharding:
    """The sharded parameters of this rank.

    Args:
        parameters: those to cut, by their first names; all ranks of the shard group have the same values.
        context: the run.

    Attributes:
        parameters: by id of the model's parameter.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], context: Context):
        assert context.shard_group is not None
        self._group = context.shard_group
        self._rank = dist.get_rank(self._group)
        self._token = torch.zeros(1, device=context.device)
        mesh, placements = _mesh_of(context)
        self.parameters: dict[int, ShardedParameter] = {}
        by_dtype: dict[torch.dtype, dict[str, nn.Parameter]] = {}
        for name, parameter in parameters.items():
            by_dtype.setdefault(parameter.dtype, {})[name] = parameter
        for dtype, alike in by_dtype.items():
            layout = ShardLayout(tuple(tuple(p.shape) for p in alike.values()), dist.get_world_size(self._group))
            memory = memory_of_node(self._group, layout.whole_size * dtype.itemsize).view(dtype)
            for index, (name, parameter) in enumerate(alike.items()):
                start = layout.whole_start(index)
                whole = memory[start : start + parameter.numel()].view(parameter.shape)
                own_rows = layout.rows(index, self._rank)
                rows = whole[own_rows.start : own_rows.stop]
                rows.copy_(parameter.detach()[own_rows.start : own_rows.stop])
                self.parameters[id(parameter)] = ShardedParameter(
                    name,
                    parameter,
                    whole=whole,
                    own_rows=own_rows,
                    rows=rows,
                    mesh=mesh,
                    placements=placements,
                )
        self._meet()
        self._is_whole = True

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self.parameters

    def of(self, parameters: Sequence[nn.Parameter]) -> list[ShardedParameter]:
        """Those of some parameters that are sharded."""
        return [self.parameters[id(p)] for p in parameters if id(p) in self.parameters]

    @contextmanager
    def whole(self, *, written: bool = False) -> Iterator[None]:
        """All rows are there; collective over the shard group.

        Args:
            written: all ranks give the parameters the same values meanwhile.
        """
        self.to_whole()
        try:
            yield
        finally:
            self.to_sharded(written=written)

    def to_whole(self) -> None:
        """Makes all rows there; collective over the shard group."""
        if self._is_whole:
            return
        self._meet()  # all have updated their rows
        for each in self.parameters.values():
            each.to_whole()
        self._is_whole = True

    def to_sharded(self, *, written: bool = False) -> None:
        """Leaves every rank its rows; collective over the shard group."""
        if not self._is_whole:
            return
        self._is_whole = False
        problem: Exception | None = None
        for each in self.parameters.values():
            try:
                each.to_sharded(written=written)
            except Exception as error:
                problem = problem or error
        self._meet()  # nobody computes any more
        if problem is not None:
            raise problem

    @contextmanager
    def for_optimizer(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Shows parameters as the rows of this rank."""
        chosen = self.of(parameters)
        for each in chosen:
            each.to_local()
        try:
            yield
        finally:
            for each in chosen:
                each.from_local()

    def cut_state(self, state: Mapping[Any, dict[str, Any]]) -> None:
        """Leaves of an optimizer's state what belongs to the rows of this rank."""
        for parameter, values in state.items():
            each = self.parameters.get(id(parameter))
            if each is None:
                continue
            for key, value in values.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    values[key] = value[each.own_rows.start : each.own_rows.stop].clone()

    def _meet(self) -> None:
        dist.all_reduce(self._token, group=self._group)


def _mesh_of(context: Context) -> tuple[DeviceMesh, tuple[Any, ...]]:
    """The ranks that share parameters: replicas of shards, times shards."""
    shard, replicas = context.shard_group, context.replica_group
    kind = context.device.type
    own = context.mesh.group("shard", context.rank)
    if replicas is None:
        return DeviceMesh.from_group(shard, kind, mesh_dim_names=("dp_shard",)), (Shard(0),)  # type: ignore[arg-type]
    ranks = context.mesh.group("dp", context.rank)
    grid = torch.tensor(sorted(ranks)).view(-1, len(own))
    mesh = DeviceMesh.from_group(
        [replicas, shard],  # type: ignore[list-item]
        kind,
        mesh=grid,
        mesh_dim_names=("dp_replicate", "dp_shard"),
    )
    return mesh, (Replicate(), Shard(0))
