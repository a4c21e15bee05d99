"""Makes ranks with the same parameters agree on them: process groups, initial values, gradients."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.comm.joining.process_group import group_of
from shardwright.mesh import Mesh
from shardwright.run.context import Context
from shardwright.torch.parameters.residency import Residency
from shardwright.torch.replicas.gradient_buckets import Reduced
from shardwright.torch.tensor_parallel.divided_tensor import local_of

__all__ = ["SharingGroups", "broadcast", "reduced_parameters", "synchronise"]

_SMALL_BYTES = 2**16  # nobody branches on the values of a larger tensor


class SharingGroups:
    """Process groups of the ranks that hold the same parameters, made once for each set of pipeline ranks.

    Ranks at different places along the tensor axis hold different parts, and are in different groups.
    """

    def __init__(self, context: Context):
        self._mesh: Mesh = context.mesh
        self._context = context
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def ranks(self, pipeline_ranks: Sequence[int], *, tensor_rank: int | None = None) -> tuple[int, ...]:
        """World ranks at these pipeline ranks, in all replicas, at one place along the tensor axis."""
        mesh, place = self._mesh, self._context.tensor_rank if tensor_rank is None else tensor_rank
        found = (mesh.rank_of(pp=p, rdp=d, share=place) for p in pipeline_ranks for d in range(mesh.data))
        return tuple(sorted(found))

    def make(self, wanted: Sequence[tuple[int, ...]]) -> None:
        """Makes the groups of these sets of pipeline ranks; collective over all ranks of the world."""
        for pipeline_ranks in sorted(set(wanted)):
            if pipeline_ranks in self._made:
                continue
            self._made[pipeline_ranks] = None
            for place in range(self._mesh.share):
                members = self.ranks(pipeline_ranks, tensor_rank=place)
                if len(members) == 1:
                    continue
                timeout_s = self._context.config.timeout_s
                group = group_of(members, use="shared parameters", timeout_s=timeout_s)
                if self._context.rank in members:
                    self._made[pipeline_ranks] = group

    def of(self, pipeline_ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of a set of pipeline ranks that contains this one; None for a single rank."""
        if len(pipeline_ranks) == 1:
            return self._context.groups.data
        return self._made[pipeline_ranks]


def reduced_parameters(
    residency: Residency,
    parameters: Mapping[str, nn.Parameter],
    aliased: set[str],
    groups: SharingGroups,
    *,
    stage_ranks: Sequence[int],
    rank: int,
    settles: bool,
) -> list[Reduced]:
    """The parameters of this rank whose gradients other ranks also contribute to, or may do so later."""
    found = []
    for name, parameter in parameters.items():
        ranks, stages = residency.ranks[name], residency.stages[name]
        if rank not in ranks:
            continue
        group = groups.of(tuple(ranks))
        if group is None and not settles:
            continue
        here = frozenset(stage for stage in stages if stage_ranks[stage] == rank)
        late = len(ranks) > 1 or len(here) > 1 or name in aliased
        found.append(Reduced(parameter, here, group, late=late, spare=not stages))
    return found


def synchronise(
    residency: Residency, tensors: Mapping[str, Tensor], groups: SharingGroups, *, rank: int
) -> bool:
    """Gives all holders of a parameter or buffer the values of the first of them."""
    changed = False
    for name, tensor in tensors.items():
        ranks = tuple(residency.ranks[name])
        group = groups.of(ranks) if rank in ranks else None
        if group is not None:
            changed = broadcast(tensor, groups.ranks(ranks)[0], group) or changed
    return changed


def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> bool:
    """Gives all ranks of a group the values that one of them has."""
    if tensor.is_meta or not tensor.numel():
        return False
    own = local_of(tensor).detach()
    before = own.clone() if own.nbytes <= _SMALL_BYTES else None
    dist.broadcast(own, source, group=group)
    return before is not None and not torch.equal(before, own)
