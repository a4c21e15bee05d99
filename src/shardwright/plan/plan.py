"""A plan as a readable file: each unit's place, the order of work, and the reasons.

A plan is the runtime's only input: "automatic", "manual" and "from a file" differ only in who wrote it. The
file is versioned JSON, and carries a fingerprint of the model, so that another model's plan is refused with
the difference.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, ValidationError, field_validator, model_validator

from shardwright import __version__
from shardwright.errors import PlanError, StalePlanError
from shardwright.files import DocumentError, Record, UserFile, parse_json, replace_file
from shardwright.limits import MOST_MICROBATCHES, MOST_RANKS, MOST_STAGES_OF_RANK, MOST_STEPS
from shardwright.mesh import canonical_placement
from shardwright.model_graph import ModelGraph
from shardwright.plan.conditions import Conditions
from shardwright.printable import printable, shown
from shardwright.problems import describe, field_names, join
from shardwright.profile import Cost
from shardwright.units import format_bytes, format_seconds

__all__ = [
    "PLAN_VERSION",
    "Alternative",
    "MemoryPrediction",
    "MeshPlan",
    "ModelIdentity",
    "Plan",
    "Prediction",
    "SchedulePlan",
    "StagePlan",
    "StagePrediction",
    "Trial",
    "align",
    "identity",
    "stage_of_label",
]

PLAN_VERSION = 1

Seconds = Annotated[float, Field(ge=0.0, le=1e12, allow_inf_nan=False)]
Degree = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Microbatches = Annotated[int, Field(ge=1, le=MOST_MICROBATCHES)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class ModelIdentity(Record):
    """Which model a plan was made for.

    Attributes:
        fingerprint: hash of the names, shapes and types of all parameters and buffers.
        num_parameters: trained and frozen, ties counted once.
        units: labels of the unit calls in execution order: ``name``, or ``name#k`` for a repeated call.
    """

    fingerprint: str
    num_parameters: NonNegativeInt
    units: tuple[str, ...]


class MeshPlan(Record):
    """Degrees of parallelism, and the order in which ranks are laid out.

    Attributes:
        pipeline: ranks that share one replica of the model.
        data: replicas.
        shard: replicas that share their parameters; 1 where each has all of them.
        placement_strategy: permutation of ``D``, ``P``, ``T``; the rightmost varies fastest over the ranks.
    """

    pipeline: Degree = 1
    data: Degree = 1
    shard: Degree = 1
    placement_strategy: str = "DPT"

    @field_validator("placement_strategy")
    @classmethod
    def _permutation(cls, value: str) -> str:
        return canonical_placement(value)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.world_size > MOST_RANKS:
            raise ValueError(f"pipeline times data is {self.world_size} ranks, but at most {MOST_RANKS} go")
        if self.data % self.shard:
            raise ValueError(f"shard is {self.shard}, but it must divide data, which is {self.data}")
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks that the plan needs."""
        return self.pipeline * self.data


class SchedulePlan(Record):
    """Which order of work.

    Attributes:
        kind: name of the schedule family.
        microbatches: parts into which a batch is split.
        active_microbatches: bound on microbatches in flight; None where the schedule itself bounds them.
        reduce_every_microbatch: gradients of parameters that replicas share are reduced between these in
            every backward, else once a batch.
    """

    kind: Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"]
    microbatches: Microbatches
    active_microbatches: Microbatches | None = None
    reduce_every_microbatch: bool = False


class StagePlan(Record):
    """One stage: consecutive unit calls, and the pipeline rank that runs them.

    Attributes:
        rank: pipeline rank, from 0.
        units: labels of unit calls in execution order; may be empty.
        recompute: labels of those whose activations are recomputed in the backward.
    """

    rank: Annotated[int, Field(ge=0, lt=MOST_RANKS)]
    units: tuple[str, ...]
    recompute: tuple[str, ...] = ()


class StagePrediction(Record):
    """Predicted cost of one stage for one microbatch; `recompute_s` is a part of `backward_s`."""

    forward_s: Seconds
    backward_s: Seconds
    recompute_s: Seconds = 0.0
    weight_s: Seconds = 0.0
    input_s: Seconds | None = None
    send_bytes: NonNegativeInt = 0
    saved_bytes: NonNegativeInt = 0
    weight_bytes: NonNegativeInt | None = None
    parameter_bytes: NonNegativeInt = 0

    @property
    def cost(self) -> Cost:
        """Seconds and bytes of the stage, recomputation in its backward."""
        return Cost(**{each.name: getattr(self, each.name) for each in fields(Cost)})


class MemoryPrediction(Record):
    """Predicted peak memory of one pipeline rank, in bytes."""

    parameters: NonNegativeInt
    gradients: NonNegativeInt
    optimizer: NonNegativeInt
    activations: NonNegativeInt
    batch: NonNegativeInt = 0
    work: NonNegativeInt = 0

    @property
    def peak(self) -> int:
        """Sum of all parts."""
        state = self.parameters + self.gradients + self.optimizer
        return state + self.activations + self.batch + self.work


class Prediction(Record):
    """The simulator's prediction.

    Attributes:
        step_s: seconds of one batch: forward, backward, the sums of gradients over ranks, and what the
            runtime does before and after; not the optimizer's.
        sync_s: the part of them in which gradients are summed.
        bubble: idle share of the ranks' time, 0 to 1.
        stages: cost of each stage.
        memory: peak memory of each pipeline rank.
        provenance: whether the costs were measured or estimated.
        correction: what `step_s` was multiplied by, as earlier runs on the machines took so much longer.
        update_s: seconds of the optimizer's update, on the rank that has most to update; 0: not known.
        error: half of the interval around `step_s` that holds nine of ten runs, relative; 0: not known.
        conditions: what the step was simulated with; None in plans of versions that did not keep it.
    """

    step_s: Seconds
    sync_s: Seconds = 0.0
    bubble: Fraction
    stages: tuple[StagePrediction, ...]
    memory: tuple[MemoryPrediction, ...]
    provenance: Literal["measured", "estimated"]
    correction: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    update_s: Seconds = 0.0
    error: Seconds = 0.0
    conditions: Conditions | None = None


class Alternative(Record):
    """A runner-up, and its predicted cost."""

    schedule: str
    microbatches: Microbatches
    stages: Annotated[int, Field(ge=1, le=MOST_RANKS * MOST_STAGES_OF_RANK)]
    step_s: Seconds
    peak_bytes: NonNegativeInt
    verdict: str


class Trial(Record):
    """A plan that was tried on the machines that it was made for.

    Attributes:
        mesh: degrees and rank layout.
        schedule: order of work.
        step_s: seconds of a step as it was measured: the median, on the slowest rank, without the optimizer.
        predicted_s: the same as it was predicted.
        steps: that were timed.
    """

    mesh: MeshPlan
    schedule: SchedulePlan
    step_s: Seconds
    predicted_s: Seconds
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)]


class Plan(Record):
    """The runtime's only input.

    Attributes:
        plan_version: version of this format.
        created_by: library and version that wrote it.
        model: which model it is for.
        mesh: degrees and rank layout.
        schedule: order of work.
        stages: what runs where.
        replicated: parameters that several stages hold, with those stages; their gradients are summed.
        prediction: what the simulator expects; None for plans written by hand.
        why: reasons, one sentence each.
        alternatives: the runners-up.
        pins: the settings that the user fixed.
        trials: plans that were run for some steps before this one was chosen, itself first.
    """

    plan_version: Literal[1] = 1
    created_by: str = f"shardwright {__version__}"
    model: ModelIdentity
    mesh: MeshPlan
    schedule: SchedulePlan
    stages: tuple[StagePlan, ...]
    replicated: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    prediction: Prediction | None = None
    why: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    pins: dict[str, Any] = Field(default_factory=dict)
    trials: tuple[Trial, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.stages:
            raise ValueError("stages is empty: a plan has at least one stage")
        for index, stage in enumerate(self.stages):
            if stage.rank >= self.mesh.pipeline:
                raise ValueError(
                    f"stages.{index}.rank is {stage.rank}, but mesh.pipeline is {self.mesh.pipeline}: "
                    f"ranks run from 0 to {self.mesh.pipeline - 1}"
                )
            stray = set(stage.recompute) - set(stage.units)
            if stray:
                raise ValueError(
                    f"stages.{index}.recompute names units that the stage does not have: {sorted(stray)}"
                )
        for name, holders in self.replicated.items():
            if not all(0 <= stage < len(self.stages) for stage in holders):
                raise ValueError(
                    f"replicated.{name} names stages {list(holders)}, "
                    f"but stages run from 0 to {len(self.stages) - 1}"
                )
        if self.prediction is not None and len(self.prediction.stages) != len(self.stages):
            raise ValueError(
                f"prediction.stages has {len(self.prediction.stages)} entries, but there are "
                f"{len(self.stages)} stages: remove prediction, which is not needed to run a plan"
            )
        if self.mesh.pipeline > len(self.stages):
            raise ValueError(
                f"mesh.pipeline is {self.mesh.pipeline}, but there are {len(self.stages)} stages: every "
                "pipeline rank has at least one"
            )
        self._check_conditions()
        placed = [unit for stage in self.stages for unit in stage.units]
        if placed != list(self.model.units):
            raise ValueError(_placement_difference(self.model.units, placed))
        return self

    def _check_conditions(self) -> None:
        conditions = self.prediction.conditions if self.prediction is not None else None
        if conditions is None:
            return
        if len(conditions.hosts) != self.mesh.pipeline:
            raise ValueError(
                f"prediction.conditions.hosts has {len(conditions.hosts)} entries, but mesh.pipeline is "
                f"{self.mesh.pipeline}: give the host of each pipeline rank"
            )
        for index, flow in enumerate(conditions.flows):
            if not flow.source < flow.target < len(self.stages):
                raise ValueError(
                    f"prediction.conditions.flows.{index} leads from stage {flow.source} to {flow.target}, "
                    f"but flows lead to a later stage and the last is {len(self.stages) - 1}"
                )

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Pipeline rank of each stage."""
        return tuple(stage.rank for stage in self.stages)

    def to_json(self) -> str:
        """The text of the plan file."""
        return self.model_dump_json(indent=2) + "\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan file, whole or not at all."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, self.to_json())

    @classmethod
    def parse(cls, text: str | bytes, *, source: str = "plan") -> "Plan":
        """Reads a plan from JSON.

        Raises:
            StalePlanError: it has another format version.
            PlanError: it is cut off, has unknown or missing fields, or contradicts itself; all are named.
        """
        try:
            document = parse_json(text)
        except DocumentError as error:
            advice = " It may be cut off: make it anew." if error.is_other_text else ""
            raise PlanError(f"{source} {error.predicate}.{advice}") from None
        if not isinstance(document, dict):
            raise PlanError(f"{source} holds {shown(document)}, but a plan is a JSON object.")
        version = document.get("plan_version")
        if version != PLAN_VERSION or isinstance(version, bool):
            raise StalePlanError(
                f"{source} has plan_version {shown(version)}, but shardwright {__version__} reads "
                f"{PLAN_VERSION}. Make the plan anew with this version."
            )
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            problems = describe(error.errors(), root="it contradicts itself", known=field_names(cls))
            raise PlanError(join(f"{source} cannot be used:", problems)) from None

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, what: str = "plan file") -> "Plan":
        """Reads a plan file; raises as `parse` does.

        Args:
            path: of the file.
            what: the file is for the user, for errors.
        """
        file = UserFile(path, what=what, error=PlanError)
        return cls.parse(file.read_bytes(), source=str(file))

    def check(self, graph: ModelGraph, *, world_size: int) -> None:
        """Refuses a model or a world that this plan was not made for.

        Raises:
            StalePlanError: the message shows the difference.
        """
        self.check_world(world_size)
        if graph.labels != self.model.units:
            difference = _placement_difference(graph.labels, self.model.units)
            raise StalePlanError(
                f"the plan was made for a model with other units: {difference}. Make the plan anew."
            )
        if graph.model_fingerprint != self.model.fingerprint:
            raise StalePlanError(
                f"the plan was made for a model with fingerprint {self.model.fingerprint} and "
                f"{self.model.num_parameters} parameters, but this one has {graph.model_fingerprint} and "
                f"{graph.num_parameters}: other parameters, or other shapes, types or ties of them. "
                "Make the plan anew."
            )

    def check_world(self, world_size: int) -> None:
        """Refuses another number of ranks.

        Raises:
            StalePlanError: this plan was not made for it.
        """
        if world_size != self.mesh.world_size:
            raise StalePlanError(
                f"the plan is for pipeline({self.mesh.pipeline}) * data({self.mesh.data}) = "
                f"{self.mesh.world_size} ranks, but {world_size} are running. "
                f"Start {self.mesh.world_size}, or make the plan anew."
            )

    def table(self) -> str:
        """The stages as a text table."""
        header = ["stage", "rank", "units", "first .. last", "parameters", "forward", "backward", "sends"]
        rows = [header]
        for index, stage in enumerate(self.stages):
            cost = self.prediction.stages[index] if self.prediction else None
            first_last = " .. ".join(dict.fromkeys((stage.units[0], stage.units[-1]))) if stage.units else "-"
            rows.append(
                [str(index), str(stage.rank), str(len(stage.units)), first_last]
                + (
                    [
                        format_bytes(cost.parameter_bytes),
                        format_seconds(cost.forward_s),
                        format_seconds(cost.backward_s),
                        format_bytes(cost.send_bytes),
                    ]
                    if cost
                    else ["-"] * 4
                )
            )
        return align(rows)


def align(rows: Sequence[Sequence[str]]) -> str:
    """Lays out rows of text in columns, whatever names are among it."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def identity(graph: ModelGraph) -> ModelIdentity:
    """The identity of a traced model, as a plan records it."""
    return ModelIdentity(
        fingerprint=graph.model_fingerprint,
        num_parameters=graph.num_parameters,
        units=graph.labels,
    )


def stage_of_label(plan: Plan) -> Mapping[str, int]:
    """The stage of every unit call."""
    return {label: index for index, stage in enumerate(plan.stages) for label in stage.units}


def _placement_difference(expected: Sequence[str], found: Sequence[str]) -> str:
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
