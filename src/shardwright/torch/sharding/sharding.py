"""Shards parameters, gradients and optimizer state over the replicas of a stage.

Every rank of a shard group keeps some rows of each large parameter, of its gradient and of its optimizer
state. Ranks of one host keep their rows in shared memory, so that each reads all rows without a copy::

    host memory      | rows of rank 0 | rows of rank 1 | rows of rank 2 | rows of rank 3 |
    rank 1 computes with all of them, and updates its own

Rows of other hosts arrive parcel by parcel while the first modules already compute. No rank updates rows that
another still computes with: ranks meet at the start and at the end of a step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from shardwright.errors import UsageError
from shardwright.run.context import Context
from shardwright.torch._private.tensors import outside_of_functions
from shardwright.torch.interception.glue import refuse_inside_step
from shardwright.torch.parameters.delayed_initialization import recorded_values
from shardwright.torch.parameters.parameter_kinds import watch_parameters
from shardwright.torch.parameters.sharded_tensor import ShardedTensor
from shardwright.torch.pytorch.modules import all_modules, user_line
from shardwright.torch.sharding.arrivals import AllAtOnce, InTurns
from shardwright.torch.sharding.parcel import Parcel, parcels_of
from shardwright.torch.sharding.shard_memory import memory_for
from shardwright.torch.sharding.sharded_parameter import ShardedParameter
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of


class Sharding:
    """The sharded parameters of this rank.

    Attributes:
        parameters: by id of the model's parameter.
        is_whole: all rows of all parameters are there, or on their way.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        context: Context,
    ):
        assert context.groups.shard is not None
        assert context.groups.data is not None
        self._group = context.groups.shard
        self._data_group = context.groups.data
        self._first_replica = context.holders[0]
        self._token = torch.zeros(1, device=context.device)
        self._mesh, self._placements = _mesh_of(context)
        self._device = context.device
        most = context.config.sdp_max_live_parameters
        size = sum(map(_elements_of_a_rank, parameters.values()))
        names = parcels_of(parameters, most=max(1, most // 4) if size > most else size)
        self._parcels = [self._pack(number, each, parameters) for number, each in enumerate(names)]
        self.parameters = {id(s.parameter): s for parcel in self._parcels for s in parcel.parameters}
        self._number_of = {
            id(s.parameter): number for number, parcel in enumerate(self._parcels) for s in parcel.parameters
        }
        to_come: dict[int, int] = {}
        self._at_once = AllAtOnce(self._parcels, to_come)
        self._as_used = AllAtOnce(self._parcels, to_come)
        if any(parcel.memory.gathers for parcel in self._parcels):
            if size > most:
                _refuse_parts_in_turns(parameters, size, most)
                self._as_used = InTurns(self._parcels, to_come, most=most, bring=self._bring)
            for module in all_modules(model):
                watch_parameters(module, to_come, self._use)
        self._arrivals = self._at_once
        if context.mesh.pipeline == 1:  # a model over stages is called in steps only
            model.register_forward_pre_hook(_RefusesGradients(self))
        self.is_whole = False
        self.to_whole()

    def _pack(self, number: int, names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> Parcel:
        chosen = [parameters[name] for name in names]
        shapes = [tuple(local_of(parameter).shape) for parameter in chosen]
        memory = memory_for(shapes, chosen[0].dtype, self._group, self._device, number=number)
        packed = []
        for index, (name, parameter) in enumerate(zip(names, chosen, strict=True)):
            own_rows, rows = memory.layout.rows(index, dist.get_rank(self._group)), memory.rows(index)
            rows.copy_(self._values_of(parameter)[own_rows.start : own_rows.stop])
            packed.append(
                ShardedParameter(
                    name,
                    parameter,
                    whole=None if memory.gathers else memory.whole(index),
                    own_rows=own_rows,
                    rows=rows,
                    mesh=self._mesh,
                    placements=self._placements,
                )
            )
        return Parcel(packed, memory)

    def _values_of(self, parameter: nn.Parameter) -> Tensor:
        """All rows, as the first replica has them; those that nobody has memory for are made now."""
        if not parameter.is_meta:
            return local_of(parameter).detach()
        recorded = recorded_values(parameter)
        assert recorded is not None
        values = recorded.to(self._device)
        dist.broadcast(values, self._first_replica, group=self._data_group)
        return values

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self.parameters

    # ---- forms ----

    @contextmanager
    def whole(self, *, written: bool = False) -> Iterator[None]:
        """All rows are there; collective over the shard group."""
        refuse_inside_step("all rows of shared parameters are asked for", "Do it between two steps.")
        self._begin(self._at_once)
        self._at_once.use_all()
        try:
            yield
        finally:
            self.to_sharded(written=written)

    @contextmanager
    def as_used(self) -> Iterator[None]:
        """All rows are there when they are used; collective over the shard group."""
        self.to_whole()
        try:
            with self.saving():
                yield
        finally:
            self.to_sharded()

    def to_whole(self) -> None:
        """Has all rows come until they are used; collective over the shard group."""
        self._begin(self._as_used)

    def _begin(self, arrivals: AllAtOnce) -> None:
        if self.is_whole:
            return
        self._meet()  # all have updated their rows
        self._arrivals = arrivals
        for parcel in self._parcels:
            parcel.begin(self._bring)
        self.is_whole = True
        arrivals.begin()

    def saving(self) -> AbstractContextManager[Any]:
        """A context for what computes in a step."""
        return self._arrivals.saving()

    @contextmanager
    def shapes_at_hand(self) -> Iterator[None]:
        """Has all parameters show their shapes, without bringing rows for that."""
        to_come = self._arrivals.to_come
        coming = dict(to_come)
        to_come.clear()
        away = [each for parcel in self._parcels if not parcel.is_here for each in parcel.parameters]
        for each in away:
            each.show_shape()
        try:
            yield
        finally:
            for each in away:
                each.go(self._bring)
            to_come.update(coming)

    def _bring(self, tensors: Sequence[Tensor]) -> None:
        """Has all rows at hand of the shared parameters among some tensors."""
        numbers = {self._number_of[id(tensor)] for tensor in tensors if id(tensor) in self._number_of}
        self._use(*sorted(numbers))

    def _use(self, *numbers: int) -> None:
        with outside_of_functions():  # code between units is watched, and may be inside of `torch.func.grad`
            self._arrivals.use(*numbers)

    def to_sharded(self, *, written: bool = False) -> None:
        """Leaves every rank its rows; collective over the shard group."""
        if not self.is_whole:
            return
        self.is_whole = False
        for parcel in self._parcels:
            parcel.settle()
        problem: Exception | None = None
        for each in self.parameters.values():
            try:
                each.to_sharded(written=written)
            except Exception as error:
                problem = problem or error
        self._end()
        self._meet()  # nobody computes any more
        if problem is not None:
            raise problem

    def leave(self) -> None:
        """Leaves a step that failed in its middle on this rank: others need not be there."""
        for parcel in self._parcels:
            parcel.leave()
        for each in self.parameters.values():
            each.leave()
        self._end()
        self.is_whole = False

    def _end(self) -> None:
        for arrivals in (self._arrivals, self._as_used):
            arrivals.end()

    @contextmanager
    def for_optimizer(
        self, parameters: Sequence[nn.Parameter], state: Mapping[Any, dict[str, Any]]
    ) -> Iterator[None]:
        """Shows parameters as the rows of this rank."""
        self._cut_state(state)
        chosen = [self.parameters[id(p)] for p in parameters if id(p) in self.parameters]
        for each in chosen:
            each.to_local()
        try:
            yield
        finally:
            for each in chosen:
                each.from_local()

    def _cut_state(self, state: Mapping[Any, dict[str, Any]]) -> None:
        """Leaves of an optimizer's state what belongs to the rows of this rank."""
        for parameter, values in state.items():
            each = self.parameters.get(id(parameter))
            if each is None:
                continue
            for key, value in values.items():
                if isinstance(value, ShardedTensor):
                    values[key] = value.local
                elif isinstance(value, Tensor) and value.shape == parameter.shape != each.rows.shape:
                    values[key] = each.rows_of(value).clone()

    def _meet(self) -> None:
        dist.all_reduce(self._token, group=self._group)


class _RefusesGradients:
    """A hook of the user's model that refuses calls with gradients between steps; copies lose it."""

    def __init__(self, sharding: Sharding):
        self._sharding = sharding

    def __call__(self, *_: Any) -> None:
        if not self._sharding.is_whole and torch.is_grad_enabled():
            raise UsageError(
                f"{user_line()}: the ranks share the parameters of the model, so that what is computed with "
                "gradients belongs inside a function decorated with @sw.step. For an evaluation outside, "
                "call the DistributedModel under torch.no_grad(), on all ranks."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> Any:
        return _give_nothing, ()


def _give_nothing() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    """The hook of a copied model: it does nothing."""


def _refuse_parts_in_turns(parameters: Mapping[str, nn.Parameter], size: int, most: int) -> None:
    """Refuses to release rows of divided parameters: what autograd saves of these holds all rows."""
    if any(isinstance(parameter, DividedTensor) for parameter in parameters.values()):
        raise UsageError(
            f"sdp_max_live_parameters is {most}, this rank computes with {size} elements of shared "
            "parameters, and ranks share layers (tensor_parallel_degree): rows of parts of layers cannot "
            f"come and go. Set sdp_max_live_parameters to {size} or more, or tensor_parallel_degree 1."
        )


def _mesh_of(context: Context) -> tuple[DeviceMesh, tuple[Any, ...]]:
    """The ranks that share parameters: replicas of shards, times shards."""
    shard, replicas = context.groups.shard, context.groups.replica
    kind = context.device.type
    if replicas is None:
        return DeviceMesh.from_group(shard, kind, mesh_dim_names=("dp_shard",)), (Shard(0),)  # type: ignore[arg-type]
    ranks = sorted(context.holders)
    mesh = DeviceMesh.from_group(
        [replicas, shard],  # type: ignore[list-item]
        kind,
        mesh=torch.tensor(ranks).view(-1, context.mesh.shard),
        mesh_dim_names=("dp_replicate", "dp_shard"),
    )
    return mesh, (Replicate(), Shard(0))


def _elements_of_a_rank(parameter: Tensor) -> int:
    """About as many as this rank has; on all ranks that share the parameter, the same number."""
    if isinstance(parameter, DividedTensor):
        return -(-parameter.numel() // parameter._spec.group.num_ranks)
    return parameter.numel()
