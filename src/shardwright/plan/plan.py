"""A plan as a readable file: each unit's place, the order of work, and the reasons.

A plan is the runtime's only input: "automatic", "manual" and "from a file" differ only in who wrote it. The
file is versioned JSON, and carries a fingerprint of the model, so that another model's plan is refused with
the difference.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from shardwright import __version__
from shardwright.errors import PlanError, StalePlanError
from shardwright.files import DocumentError, Record, UserFile, parse_json, replace_file
from shardwright.model_graph import ModelGraph
from shardwright.placement import Cut
from shardwright.plan.decision import (
    Alternative,
    MeshPlan,
    ModelIdentity,
    SchedulePlan,
    StagePlan,
    difference_of_units,
)
from shardwright.plan.prediction import Prediction
from shardwright.plan.tensor_plan import TensorPlan, cuts_by_name
from shardwright.problems import describe, field_names, join
from shardwright.quantities import format_bytes, format_seconds
from shardwright.text import align, shown

PLAN_VERSION = 2

REMEDY = "Make the plan anew, or start without it."
"""What a `StalePlanError` of another model ends with."""


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
        compiled: the setting `compile` has units compiled; left out of files where it has not.
        tensor: how ranks share the parameters of a stage; None, and left out of files, where they do not.
        prediction: what the simulator expects; None for plans written by hand.
        why: reasons, one sentence each.
        alternatives: the runners-up.
        pins: the settings that the user fixed.
    """

    left_out: ClassVar = ("compiled", "tensor")

    plan_version: Literal[2] = 2
    created_by: str = f"shardwright {__version__}"
    model: ModelIdentity
    mesh: MeshPlan
    schedule: SchedulePlan
    stages: tuple[StagePlan, ...]
    replicated: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    compiled: bool = False
    tensor: TensorPlan | None = None
    prediction: Prediction | None = None
    why: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    pins: dict[str, Any] = Field(default_factory=dict)

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
            for name, labels in (("recompute", stage.recompute), ("offload", stage.offload)):
                stray = set(labels) - set(stage.units)
                if stray:
                    raise ValueError(
                        f"stages.{index}.{name} names units that the stage does not have: {sorted(stray)}"
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
        self._check_tensor()
        self._check_conditions()
        placed = [unit for stage in self.stages for unit in stage.units]
        if placed != list(self.model.units):
            raise ValueError(difference_of_units(self.model.units, placed))
        return self

    def _check_tensor(self) -> None:
        mesh = self.mesh.grid
        degree = mesh.share
        if (self.tensor is None) != (degree == 1):
            raise ValueError(
                f"mesh is {mesh.title}, but tensor, which says how ranks share a batch and parameters, is "
                f"{'there' if self.tensor else 'missing'}"
            )
        if self.tensor is None:
            return
        if self.tensor.between_units is None and mesh.tensor != degree:
            raise ValueError(
                f"mesh is {mesh.title}, but tensor.between_units, the dimension along which ranks share a "
                "batch, is missing"
            )
        if self.tensor.cut_again is not None and mesh.inner is None:
            raise ValueError(
                f"mesh is {mesh.title}, but tensor.cut_again is {self.tensor.cut_again}: ranks cut the parts "
                "that others have cut, and two of tensor, context and expert must be above 1. Remove it"
            )
        for name, cut in self.tensor.cuts.items():
            is_of_expert = name in self.tensor.experts or mesh.tensor == 1
            num, what = (mesh.parts, "the experts") if is_of_expert else (mesh.tensor, "layers")
            if any(run.rank >= num for run in cut.runs):
                raise ValueError(
                    f"tensor.cuts.{name} is {cut}, but {num} ranks share {what}: they run from 0 to {num - 1}"
                )
        if self.tensor.experts and (mesh.inner is None or mesh.expert == 1):
            raise ValueError(
                f"mesh is {mesh.title}, but tensor.experts, which tells parameters of experts from those of "
                "layers that ranks share, is there. Remove it"
            )

    def _check_conditions(self) -> None:
        if self.prediction is None:
            return
        conditions = self.prediction.conditions
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
    def unit_names(self) -> list[str]:
        """The units, each once, in the order of their first calls."""
        return list(dict.fromkeys(label.split("#")[0] for label in self.model.units))

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Pipeline rank of each stage."""
        return tuple(stage.rank for stage in self.stages)

    def cuts_of(self, graph: ModelGraph) -> dict[str, Cut]:
        """How ranks share the model's parameters, by their names; those without a cut are whole.

        Raises:
            StalePlanError: a name or pattern fits no parameter, or a cut does not fit its shape.
        """
        shapes = {n: p.spec.shape for n, p in graph.parameters.items() if not p.is_buffer}
        return {} if self.tensor is None else cuts_by_name(self.tensor.cuts, shapes)

    def of_experts(self, graph: ModelGraph) -> frozenset[str]:
        """The names of the parameters that all ranks share that share a batch, and not those of layers alone.

        Raises:
            StalePlanError: as `cuts_of`.
        """
        if self.tensor is None or not self.tensor.experts:
            return frozenset()
        shapes = {n: p.spec.shape for n, p in graph.parameters.items() if not p.is_buffer}
        record = {pattern: self.tensor.cuts[pattern] for pattern in self.tensor.experts}
        return frozenset(cuts_by_name(record, shapes))

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
            advice = (
                " Mend that line (a comma too many?), or make the plan anew." if error.is_other_text else ""
            )
            raise PlanError(f"{source} {error.predicate}.{advice}") from None
        return cls.of_document(document, source=source)

    @classmethod
    def of_document(cls, document: Any, *, source: str = "plan") -> "Plan":
        """The plan of a JSON document.

        Raises:
            StalePlanError: it has another format version.
            PlanError: it has unknown or missing fields, or contradicts itself; all are named.
        """
        if not isinstance(document, dict):
            raise PlanError(f"{source} holds {shown(document)}, but a plan is a JSON object.")
        if "plan_version" not in document:
            raise PlanError(f"{source} has no plan_version, so it is no plan. Plans are in run folders.")
        version = document.get("plan_version")
        if version != PLAN_VERSION or isinstance(version, bool):
            raise StalePlanError(
                f"{source} has plan_version {shown(version)}, but shardwright {__version__} reads "
                f"{PLAN_VERSION} alone. Make the plan anew with this version."
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
            difference = difference_of_units(graph.labels, self.model.units)
            raise StalePlanError(f"the plan was made for a model with other units: {difference}. {REMEDY}")
        if graph.model_fingerprint != self.model.fingerprint:
            raise StalePlanError(
                f"the plan was made for a model with fingerprint {self.model.fingerprint} and "
                f"{self.model.num_parameters} parameters, but this one has {graph.model_fingerprint} and "
                f"{graph.num_parameters}: other parameters, or other shapes, types or ties of them. {REMEDY}"
            )

    def check_world(self, world_size: int) -> None:
        """Refuses another number of ranks.

        Raises:
            StalePlanError: this plan was not made for it.
        """
        mesh = self.mesh.grid
        if world_size != mesh.world_size:
            raise StalePlanError(
                f"the plan is for {mesh.title} = {mesh.world_size} ranks, but {world_size} are running. "
                f"Start {mesh.world_size}, or make the plan anew."
            )

    def table(self) -> str:
        """The stages as a text table."""
        header = ["stage", "rank", "units", "parameters", "forward", "backward", "sends"]
        rows = [header]
        for index, stage in enumerate(self.stages):
            cost = self.prediction.stages[index] if self.prediction else None
            rows.append(
                [str(index), str(stage.rank), _span(stage.units)]
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


def _span(units: Sequence[str]) -> str:
    """The first and the last of a stage's units, and how many there are.

    >>> _span(["gpt.layers.0", "gpt.layers.1", "gpt.layers.2"]), _span(["gpt.embed", "gpt.layers.0"])
    ('gpt.layers.0 .. 2 (3)', 'gpt.embed .. layers.0 (2)')
    """
    if len(units) < 2:
        return units[0] if units else "-"
    first, last = (units[end].split(".") for end in (0, -1))
    while len(last) > 1 and first and first[0] == last[0]:  # the modules around both are named once
        first, last = first[1:], last[1:]
    return f"{units[0]} .. {'.'.join(last)} ({len(units)})"


def stage_of_label(plan: Plan) -> Mapping[str, int]:
    """The stage of every unit call."""
    return {label: index for index, stage in enumerate(plan.stages) for label in stage.units}
