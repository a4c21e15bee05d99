"""The replicas of a model: what they share, and the plan in effect."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.comm.joining.process_group import group_of
from shardwright.errors import UsageError
from shardwright.mesh import Mesh
from shardwright.placement import SHARDED_BUCKET_BYTES
from shardwright.quantities import format_bytes
from shardwright.run.context import Context
from shardwright.run.joint_calls import first_cause_named
from shardwright.torch.parameters.delayed_initialization import is_recorded
from shardwright.torch.parameters.parameter_kinds import can_be_sharded, gradient_dtype, low_precision
from shardwright.torch.parameters.residency import Residency
from shardwright.torch.pytorch.modules import ModelTree
from shardwright.torch.replicas.gradient_buckets import BucketMaker, Reduced
from shardwright.torch.replicas.reducer import GradientReducer
from shardwright.torch.replicas.replica_buffers import ReplicaBuffers, UpdatedParts, write_into
from shardwright.torch.tensor_parallel.divided_tensor import local_of

if TYPE_CHECKING:
    from shardwright.torch.sharding.sharding import Sharding


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
    values = own.contiguous()
    dist.broadcast(values, source, group=group)
    if values is not own and not torch.equal(values, own):
        write_into(own, values)
    return before is not None and not torch.equal(before, values)


log = logging.getLogger(__name__)


class Replicas:
    """This rank's part in data parallelism.

    Attributes:
        buffers: that replicas agree on; None without replicas, and before the first step.
        sharding: the shared parameters; None where none are, or as long as they are not.
        updated_parts: what optimizers update in the place of parameters; None where they update these.
    """

    def __init__(self, context: Context, module: nn.Module, *, bucket_bytes: int, overlap: bool):
        self._context = context
        self._module = module
        self._bucket_bytes = bucket_bytes
        self._overlap = overlap
        self._make_bucket: BucketMaker | None = None
        self._reducer: GradientReducer | None = None
        self.buffers: ReplicaBuffers | None = None
        self.sharding: Sharding | None = None
        self.updated_parts = _updated_parts(context)

    def shard(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Leaves this rank its rows of large parameters, where replicas share them; collective over these."""
        if self._context.groups.shard is None:
            return
        from shardwright.torch.sharding.sharding import Sharding  # DTensor takes long to import

        chosen = {name: parameter for name, parameter in parameters.items() if self._is_shared(parameter)}
        with torch.inference_mode(False):  # the first step may be an evaluation
            self.sharding = Sharding(self._module, chosen, self._context)

    def begin_with_buffers(self, tree: ModelTree) -> None:
        """The buffers are those of the first replica, in all of them."""
        current = self._context
        if current.groups.data is not None:
            self.buffers = ReplicaBuffers(
                tree,
                current.groups.data,
                ranks=current.holders,
                rank=current.rank,
                device=current.device,
                local=current.links.local_peers,
            )

    def filled_when_shared(self, parameters: Mapping[str, nn.Parameter]) -> set[str]:
        """Names of parameters that take no memory before they are shared."""
        if self._context.groups.shard is None or self._context.mesh.share > 1:
            return set()
        return {name for name, p in parameters.items() if self._is_shared(p) and is_recorded(p)}

    @contextmanager
    def all_rows(self, *, written: bool = False) -> Iterator[None]:
        """Has all rows of shared parameters at hand; collective over the ranks that share them."""
        with self._begun(None if self.sharding is None else self.sharding.whole(written=written)):
            yield

    @property
    def sums_of_rows(self) -> list[Tensor]:
        """Gradients that the batch has given to the rows of this rank."""
        if self.sharding is None:
            return []
        found = (each.gradient for each in self.sharding.parameters.values())
        return [gradient for gradient in found if gradient is not None]

    @contextmanager
    def rows_as_used(self) -> Iterator[None]:
        """Has rows of shared parameters come as they are used; collective over the ranks that share them."""
        with self._begun(None if self.sharding is None else self.sharding.as_used()):
            yield

    @contextmanager
    def _begun(self, rows: AbstractContextManager[None] | None) -> Iterator[None]:
        """Enters a context, and names what went wrong on another rank where that fails."""
        with ExitStack() as entered:
            if rows is not None:
                with first_cause_named(self._context):
                    entered.enter_context(rows)
            yield

    def shapes_at_hand(self) -> AbstractContextManager[None]:
        """Has shared parameters show their shapes, inside of a step, where nothing is computed."""
        return nullcontext() if self.sharding is None else self.sharding.shapes_at_hand()

    def saving(self) -> AbstractContextManager[Any]:
        """A context for what computes in a step."""
        return nullcontext() if self.sharding is None else self.sharding.saving()

    def make_reducer(self, members: Sequence[Reduced]) -> GradientReducer:
        """Makes the reducer of these parameters' gradients."""
        context, sharding = self._context, self.sharding
        if sharding is not None:
            assert context.groups.shard is not None
            members = [
                replace(m, sharded=sharding.parameters[id(m.parameter)], group=context.groups.shard)
                if m.parameter in sharding
                else m
                for m in members
            ]
        self._reducer = GradientReducer(
            members,
            divisor=context.mesh.data,
            bucket_bytes=self._bucket_bytes,
            sharded_bucket_bytes=SHARDED_BUCKET_BYTES,
            replica_group=context.groups.replica,
            in_every_backward=self._reduces_in_every_backward(members),
            overlap=self._overlap,
            make_bucket=self._make_bucket,
            settles=context.mesh.share > 1,
        )
        return self._reducer

    @property
    def digest_of_trained(self) -> int:
        """A digest that is equal on replicas that reduced gradients of the same parameters."""
        return 0 if self._reducer is None else self._reducer.digest

    @property
    def have_one_gradient(self) -> bool:
        """Whether all replicas have the same gradients after a step, so that each may look at some."""
        return self.sharding is None and self._make_bucket is None

    def reduce_by(self, make_bucket: BucketMaker) -> None:
        """Has buckets of whole gradients reduced by others than `SummedBucket`; before the first step."""
        if self._reducer is not None:
            raise UsageError("the model has made a step already. Register the hook before the first one.")
        self._make_bucket = make_bucket

    def _reduces_in_every_backward(self, members: Sequence[Reduced]) -> bool:
        """Whether no rank keeps whole gradients of shared parameters from one microbatch to the next."""
        context = self._context
        if (plan := context.plan) is not None:
            return plan.schedule.reduce_every_microbatch
        limit = context.config.memory_limit or (context.cluster and context.cluster.device.memory_bytes) or 0
        if not limit or (context.config.microbatches or 1) == 1:
            return False
        shared = [m.parameter for m in members if m.sharded is not None and m.parameter.requires_grad]
        whole = sum(parameter.numel() * gradient_dtype(parameter).itemsize for parameter in shared)
        # Values, gradient and two moments of a part, and the whole gradient.
        needed = whole + 4 * whole // context.mesh.shard
        if needed > limit:
            log.info(
                "gradients are reduced in every microbatch: whole ones would take %s of a memory of %s",
                format_bytes(whole),
                format_bytes(limit),
            )
        return needed > limit

    def _is_shared(self, parameter: nn.Parameter) -> bool:
        return can_be_sharded(parameter, threshold=self._context.config.sdp_param_persistence_threshold)


def _updated_parts(context: Context) -> UpdatedParts | None:
    group = context.groups.updating
    in_float32 = low_precision(context.config) is not None
    home = torch.device("cpu") if updates_on_host(context) else None
    if group is None and not in_float32 and home is None:
        return None
    return UpdatedParts(group, in_float32=in_float32, home=home)


def updates_on_host(context: Context) -> bool:
    """Whether updates are made in the host's memory (`offload_optimizer`)."""
    if not context.config.offload_optimizer:
        return False
    if context.device.type == "cpu":
        log.warning("offload_optimizer changes nothing on CPUs: their memory is the host's. Leave it out.")
        return False
    return True
