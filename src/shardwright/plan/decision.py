"""The decisions of a plan: the grid of ranks, the order of work, and the units of each stage."""

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    field_validator,
    model_validator,
)

from shardwright.files import Record
from shardwright.mesh import Mesh, canonical_placement
from shardwright.model_graph import ModelGraph
from shardwright.plan.prediction import Seconds
from shardwright.quantities import MOST_MICROBATCHES, MOST_RANKS, MOST_STAGES_OF_RANK

Degree = Annotated[int, Field(ge=1, le=MOST_RANKS)]
_DEGREES = ("pipeline", "data", "shard", "tensor", "context", "expert")
_Microbatches = Annotated[int, Field(ge=1, le=MOST_MICROBATCHES)]


class MeshPlan(Record):
    """Degrees of parallelism, and the order in which ranks are laid out.

    Attributes:
        pipeline: ranks that share one replica of the model.
        data: replicas.
        shard: replicas that share their parameters; 1 where each has all of them.
        tensor: ranks that share every layer of a stage; files name it where it is not 1, as the next two.
        context: ranks that share the sequences of a batch.
        expert: ranks that share the experts of a stage.
        placement_strategy: permutation of ``D``, ``P``, ``T``; the rightmost varies fastest over the ranks.
    """

    left_out: ClassVar = ("tensor", "context", "expert")

    pipeline: Degree = 1
    data: Degree = 1
    shard: Degree = 1
    tensor: Degree = 1
    context: Degree = 1
    expert: Degree = 1
    placement_strategy: str = "DPT"

    @field_validator("placement_strategy")
    @classmethod
    def _permutation(cls, value: str) -> str:
        return canonical_placement(value)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self._num_ranks > MOST_RANKS:
            raise ValueError(
                f"the product of degrees is {self._num_ranks} ranks, but at most {MOST_RANKS} go"
            )
        if self.data % self.shard:
            raise ValueError(f"shard is {self.shard}, but it must divide data, which is {self.data}")
        if min(self.tensor, self.context, self.expert) > 1:
            raise ValueError("tensor, context and expert are above 1, but two of them go together at most")
        return self

    @classmethod
    def of(cls, mesh: Mesh) -> Self:
        return cls(**{name: getattr(mesh, name) for name in _DEGREES}, placement_strategy=mesh.placement)

    @property
    def grid(self) -> Mesh:
        """The ranks that the plan needs."""
        degrees = {name: getattr(self, name) for name in _DEGREES}
        return Mesh.of(world_size=self._num_ranks, **degrees, placement=self.placement_strategy)

    @property
    def _num_ranks(self) -> int:
        return prod(getattr(self, name) for name in _DEGREES if name != "shard")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that ask for it."""
        return {
            "pipeline_parallel_degree": self.pipeline,
            "data_parallel_degree": self.data,
            "sharded_data_parallel_degree": self.shard,
            "tensor_parallel_degree": self.tensor,
            "context_parallel_degree": self.context,
            "expert_parallel_degree": self.expert,
            "placement_strategy": self.placement_strategy,
        }


class SchedulePlan(Record):
    """The order of work.

    Attributes:
        kind: name of the schedule family.
        microbatches: parts into which a batch is split.
        active_microbatches: bound on microbatches in flight; None where the schedule itself bounds them.
        reduce_every_microbatch: gradients of parameters that replicas share are reduced between these in
            every backward, else once a batch.
    """

    kind: Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"]
    microbatches: _Microbatches
    active_microbatches: _Microbatches | None = None
    reduce_every_microbatch: bool = False


class StagePlan(Record):
    """One stage: consecutive unit calls, and the pipeline rank that runs them.

    Attributes:
        rank: pipeline rank, from 0.
        units: labels of unit calls in execution order; may be empty.
        recompute: labels of those whose activations are recomputed in the backward.
        offload: labels of those whose kept tensors are offloaded; where they are recomputed, their inputs.
    """

    rank: Annotated[int, Field(ge=0, lt=MOST_RANKS)]
    units: tuple[str, ...]
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()


class ModelIdentity(Record):
    """The model that a plan was made for.

    Attributes:
        fingerprint: hash of the names, shapes and types of all parameters and buffers.
        num_parameters: trained and frozen, ties counted once.
        units: labels of the unit calls in execution order: ``name``, or ``name#k`` for a repeated call.
    """

    fingerprint: str
    num_parameters: NonNegativeInt
    units: tuple[str, ...]


def identity(graph: ModelGraph) -> ModelIdentity:
    """The identity of a traced model, as a plan records it."""
    return ModelIdentity(
        fingerprint=graph.model_fingerprint,
        num_parameters=graph.num_parameters,
        units=graph.labels,
    )


def difference_of_units(expected: Sequence[str], found: Sequence[str]) -> str:
    """The difference between two lists of unit calls, as the part of a sentence."""
    twice = [unit for unit, count in Counter(found).items() if count > 1]
    if twice:
        return f"{len(twice)} of the model's units are placed more than once ({_sample(twice)})"
    missing = [unit for unit in expected if unit not in set(found)]
    extra = [unit for unit in found if unit not in set(expected)]
    if missing or extra:
        parts = []
        if missing:
            parts.append(f"{len(missing)} of the model's units are not in the stages ({_sample(missing)})")
        if extra:
            parts.append(f"the stages name {len(extra)} that the model does not have ({_sample(extra)})")
        return " and ".join(parts)
    for position, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return f"the order differs at position {position}: the model calls {a}, the stages have {b}"
    raise AssertionError("the two are equal")


def _sample(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


class Alternative(Record):
    """A runner-up, and its predicted cost."""

    schedule: str
    microbatches: _Microbatches
    stages: Annotated[int, Field(ge=1, le=MOST_RANKS * MOST_STAGES_OF_RANK)]
    step_s: Seconds
    peak_bytes: NonNegativeInt
    verdict: str
