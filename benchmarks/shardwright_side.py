"""Our side: the library, with stages that it chooses or with given ones."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from torch import Tensor

import shardwright.torch as sw
from models import Layered, Task
from shardwright.config import Config
from shardwright.mesh import Mesh
from shardwright.plan import MeshPlan, Plan, SchedulePlan, StagePlan, identity
from shardwright.planner import Candidates, build_chain, make_plan
from shardwright.planner.draft import make_draft
from shardwright.planner.fabric import Fabric
from shardwright.planner.objective import Demands
from shardwright.planner.option_plan import predict
from shardwright.planner.workload import Workload
from shardwright.run.context import context, set_context
from shardwright.schedule import place_stages

__all__ = ["STAGES_PER_RANK", "Ours"]

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "interleaved_1f1b": 2, "zb_v": 2}
"""The library's schedule families, with the stages on each rank that are compared."""


class Ours:
    """One plan of the library on one model. Several may live in one process; each has its own context.

    Args:
        task: what is trained.
        model: a copy is wrapped.
        settings: for ``sw.init``.
        stages: names of the submodules of each stage; None leaves the planner free.
    """

    def __init__(
        self,
        task: Task,
        model: Layered,
        settings: Mapping[str, Any],
        *,
        stages: Sequence[Sequence[str]] | None = None,
    ):
        self.batch = task.batch()
        set_context(None)
        sw.init({"run_dir": "off", "log_interval": 10**6, **settings})
        self.model = sw.DistributedModel(copy.deepcopy(model))
        self.context = context()
        self.loss: float | None = None

        @sw.step
        def train_step(model: sw.DistributedModel, x: Tensor, y: Tensor) -> Tensor:
            loss = task.loss(model(x), y)
            model.backward(loss)
            return loss

        self._train_step = train_step
        planner = _fixed(stages) if stages else make_plan
        with mock.patch("shardwright.torch.measuring.planning.make_plan", planner):
            self.step()

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        assert self.context.plan is not None
        return self.context.plan

    @property
    def executor(self) -> Any:
        """What ran the last step, with its timeline."""
        return self.model._engine._placed.executor

    def step(self) -> None:
        """Forward and backward of one batch; afterwards every rank knows the loss."""
        set_context(self.context)
        self.model.zero_grad(set_to_none=True)
        self.loss = float(self._train_step(self.model, *self.batch).reduce_mean())


def _fixed(stages: Sequence[Sequence[str]]) -> Any:
    """A planner without freedom: the pinned schedule on the given stages, priced by the measured profile."""

    def plan_of(
        candidates: Candidates, *, cluster: Any, config: Config, mesh: Mesh, optimizer_factor: float, **_: Any
    ) -> Plan:
        ((microbatches, (graph, profile)),) = candidates.items()
        chain = build_chain(graph, profile).uncontracted()
        stage_of = [_stage_of(label, stages) for label in chain.labels]
        cuts = (*(stage_of.index(stage) for stage in range(len(stages))), len(stage_of))
        workload = Workload(
            chain,
            num_microbatches=microbatches,
            fabric=Fabric(cluster=cluster, mesh=mesh),
            demands=Demands(recompute="none", optimizer_factor=optimizer_factor),
        )
        ranks = place_stages(
            config.pipeline, num_ranks=mesh.pipeline, stages_per_rank=len(stages) // mesh.pipeline
        )
        option = make_draft(workload, config.pipeline, ranks, cuts=cuts).work_out()
        return Plan(
            model=identity(graph),
            mesh=MeshPlan(pipeline=mesh.pipeline),
            schedule=SchedulePlan(kind=config.pipeline, microbatches=microbatches),  # type: ignore[arg-type]
            stages=tuple(
                StagePlan(rank=rank, units=chain.labels[a:b])
                for rank, a, b in zip(ranks, cuts, cuts[1:], strict=False)
            ),
            replicated=option.layout.replicated(),
            prediction=predict(option),
        )

    return plan_of


def _stage_of(label: str, stages: Sequence[Sequence[str]]) -> int:
    return next(
        index
        for index, names in enumerate(stages)
        if any(label == name or label.startswith(f"{name}.") for name in names)
    )
