"""Assembles a checkpoint's document, everything but tensors, from what the ranks saved."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from shardwright.checkpoint.importing import STATE
from shardwright.checkpoint.manifest import Record
from shardwright.checkpoint.safe_files import parse
from shardwright.mesh import Mesh
from shardwright.torch.checkpoints.snapshot import RankDocument

PLAN = "plan.json"
"""The name of the file of the plan, beside those of `STATE` and `CONFIG`."""


class SavedLayout(Record):
    """The ranks that saved.

    Attributes:
        tensor: ranks that shared every layer of a stage.
        context: ranks that shared the sequences of a batch.
        expert: ranks that shared the experts of a stage.
    """

    world_size: PositiveInt
    pipeline: PositiveInt
    data: PositiveInt
    tensor: PositiveInt = 1
    context: PositiveInt = 1
    expert: PositiveInt = 1
    shard: PositiveInt
    placement: str

    @classmethod
    def of(cls, mesh: Mesh) -> Self:
        return cls(
            world_size=mesh.world_size,
            pipeline=mesh.pipeline,
            data=mesh.data,
            tensor=mesh.tensor,
            context=mesh.context,
            expert=mesh.expert,
            shard=mesh.shard,
            placement=mesh.placement,
        )

    def rank_of_replica(self, replica: int) -> int:
        """The first rank of a replica; they are counted round where there were fewer."""
        mesh = Mesh.of(**self.model_dump())
        return mesh.rank_of(rdp=replica % self.data)


class OptimizerDocument(Record):
    """An optimizer, but for the tensors of its state.

    Attributes:
        others: by parameter and key, what its state has that is no tensor.
    """

    groups: list[dict[str, Any]]
    members: list[list[str]]
    others: dict[str, Any]


class StateDocument(Record):
    """Everything but tensors.

    Attributes:
        calls: of step functions that trained, in all of the run: more than steps where a script accumulates
            gradients; None: as many.
        layout: the ranks that saved; None for a checkpoint that was imported.
        optimizers: in the order in which they were wrapped.
        loss_scale: of ``fp16``; None without.
        states: of schedulers, samplers and the like, by name, where all ranks had the same.
        states_of_ranks: by name and rank, where they had not.
        buffers: of those that a forward has given another shape or type: what they were at first.
    """

    version: Literal[1] = 1
    step: NonNegativeInt
    calls: NonNegativeInt | None = None
    layout: SavedLayout | None
    optimizers: list[OptimizerDocument] = Field(default_factory=list)
    loss_scale: dict[str, float | int | bool] | None = None
    extra_states: dict[str, Any] = Field(default_factory=dict)
    states: dict[str, Any] = Field(default_factory=dict)
    states_of_ranks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    random: dict[str, Any] = Field(default_factory=dict)
    buffers: dict[str, list[str | NonNegativeInt] | None] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _of_all_ranks(self) -> Self:
        number = 0 if self.layout is None else self.layout.world_size
        for name, by_rank in {**self.states_of_ranks, "random": self.random}.items():
            if len(by_rank) != number or any(str(rank) not in by_rank for rank in range(len(by_rank))):
                raise ValueError(f"{name} must have one entry for each of the {number} ranks that saved")
        return self

    @classmethod
    def joined(
        cls,
        step: int,
        mesh: Mesh,
        documents: Sequence[RankDocument],
        *,
        alike: Mapping[str, bool],
        calls: int | None = None,
    ) -> Self:
        first = documents[0]
        optimizers = [
            OptimizerDocument(
                groups=each["groups"],
                members=[
                    sorted({name for d in documents for name in d.optimizers[number]["members"][place]})
                    for place in range(len(each["groups"]))
                ],
                others={k: v for d in documents for k, v in d.optimizers[number]["others"].items()},
            )
            for number, each in enumerate(first.optimizers)
        ]
        return cls(
            step=step,
            calls=None if calls == step else calls,
            layout=SavedLayout.of(mesh),
            optimizers=optimizers,
            loss_scale=first.loss_scale,
            extra_states={name: state for d in documents for name, state in d.extra_states.items()},
            states={name: first.states[name] for name, same in alike.items() if same},
            states_of_ranks={
                name: {str(rank): d.states[name] for rank, d in enumerate(documents)}
                for name, same in alike.items()
                if not same
            },
            random={str(rank): d.random for rank, d in enumerate(documents)},
            buffers={name: kind for d in documents for name, kind in d.buffers.items()},
        )

    def to_bytes(self) -> bytes:
        """A file of it; what cannot be read again is refused."""
        content = json.dumps(self.to_content(), allow_nan=False).encode()
        parse(content, name=STATE)
        return content

    def to_content(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"calls"} if self.calls is None else None)
