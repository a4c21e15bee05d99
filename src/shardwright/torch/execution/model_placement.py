"""Places a model on this rank in its first batch, and what is known of it from then on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.placement import Cut
from shardwright.plan import Plan, TensorPlan
from shardwright.planner import offloaded_bytes, stage_costs_of
from shardwright.run.context import Context
from shardwright.run.memory import large_blocks_given_back
from shardwright.runtime.batch_schedules import BatchSchedules
from shardwright.runtime.homes import assign
from shardwright.schedule import splits_backward
from shardwright.torch.backward.activation_checkpointing import marked_inside
from shardwright.torch.backward.split_backward import split_modules
from shardwright.torch.batch.batch import Batch
from shardwright.torch.counting.compiled_modules import compile_as_wished
from shardwright.torch.execution.agreement import Agreement, TrainedModel
from shardwright.torch.execution.executor import Executor
from shardwright.torch.execution.program_maker import KnownTrace, ProgramMaker
from shardwright.torch.offload.offloading import Offloading
from shardwright.torch.parameters.materialise import Materialiser
from shardwright.torch.parameters.parameter_kinds import move_to
from shardwright.torch.parameters.registration import agree_on_registration
from shardwright.torch.parameters.residency import Residency, release_remote
from shardwright.torch.parameters.unit_map import refuse_unknown_units
from shardwright.torch.program.instructions import KeptOtherwise
from shardwright.torch.pytorch.modules import all_modules
from shardwright.torch.replicas.reducer import GradientReducer
from shardwright.torch.replicas.replicas import (
    SharingGroups,
    broadcast,
    reduced_parameters,
    synchronise,
)
from shardwright.torch.tensor_parallel.divide import divide_parameter, tensor_group
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor
from shardwright.torch.tensor_parallel.experts import run_own_experts
from shardwright.torch.tensor_parallel.group import Prices, TensorGroup
from shardwright.torch.tracing.trace_data import Trace

if TYPE_CHECKING:
    from shardwright.torch.measuring.planning import Planner


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModel:
    """A model whose units have been placed on the ranks of a pipeline.

    Attributes:
        reducer: sums gradients; None where no other rank has a parameter of this one, or a part of it.
        tensor_group: the ranks that share its layers; None where each rank has whole ones.
        several_stages: parameters of this rank that several stages use, by name.
        sums_nothing: no rank of the run has a trained parameter, or a part of it, that another has: gradients
            are done when the microbatches are.
    """

    residency: Residency
    executor: Executor
    schedules: BatchSchedules
    reducer: GradientReducer | None
    tensor_group: TensorGroup | None
    several_stages: Mapping[str, nn.Parameter]
    parameters: frozenset[int] | None
    sums_nothing: bool

    def refuse_changes(self, modules: Sequence[nn.Module], *, rank: int) -> None:
        """Refuses a model that the script has changed since in a way that other ranks cannot follow."""
        if self.parameters is not None and parameter_ids(modules) != self.parameters:
            known = self.parameters
            found = next((n for n, p in modules[0].named_parameters() if id(p) not in known), "one is gone")
            raise UsageError(
                "parameters were added to the model, or replaced, after it was spread over stages and "
                f"replicas, which know nothing of them: {found}, on rank {rank}. Change the "
                "model before the first step."
            )


def parameter_ids(modules: Sequence[nn.Module]) -> frozenset[int]:
    return frozenset([id(p) for sub in modules for p in sub._parameters.values() if p is not None])


class ModelPlacement:
    """Makes the plan of a model, unless there is one, and puts it into effect."""

    def __init__(
        self,
        context: Context,
        model: TrainedModel,
        planner: "Planner",
        materialiser: Materialiser,
        *,
        agreement: Agreement,
        programs: ProgramMaker,
        offloading: Offloading,
    ):
        self._context = context
        self._model = model
        self._planner = planner
        self._materialiser = materialiser
        self._agreement = agreement
        self._programs = programs
        self._offloading = offloading
        self._groups = SharingGroups(context)
        self._tensor_group: TensorGroup | None = None
        self._of_experts: frozenset[str] = frozenset()

    def make(self, function: Callable[..., Any], batch: Batch) -> tuple[PlacedModel, KnownTrace | None]:
        """Places the units; collective over all ranks."""
        context, module = self._context, self._model.get_module()
        if context.mesh.expert > 1:
            run_own_experts(module)  # before calls of units are intercepted: copies of units are as they were
        plan, known = self._plan(function, batch)
        self._take_room(plan)
        part = batch.split(plan.schedule.microbatches)[0]
        marked = self._find_units(plan)
        trace = self._traced(plan, known, function, part, again=bool(marked))
        assignment = assign(trace.graph, plan)
        residency = Residency.of(trace.graph, assignment.homes, assignment.stage_ranks)
        self._of_experts = plan.of_experts(trace.graph)
        held = self._hold(residency, plan, plan.cuts_of(trace.graph))
        assert context.links.transport is not None
        executor = Executor(
            context.links.transport,
            module,
            device=context.device,
            on_backward=None if held.reducer is None else held.reducer.on_backward,
            offloading=self._offloading,
            replays=context.config.replay == "auto",
        )
        offloaded = frozenset[str]().union(*(stage.offload for stage in plan.stages))
        kept = KeptOtherwise(recompute=self._recomputed(plan, trace, marked), offload=offloaded)
        self._programs.placed(residency, kept, held.divided, self._tensor_group)
        if splits_backward(plan.schedule.kind):
            for unit in self._programs.units.modules.values():
                split_modules(unit)
        self._model.replicas.begin_with_buffers(self._model.tree)
        trained = (name for name, each in trace.graph.parameters.items() if not each.is_buffer)
        is_alone = context.mesh.data == context.mesh.share == 1
        placed = PlacedModel(
            sums_nothing=is_alone and all(len(residency.ranks[name]) == 1 for name in trained),
            residency=residency,
            executor=executor,
            schedules=BatchSchedules(plan.schedule, stage_costs_of(plan)),
            reducer=held.reducer,
            tensor_group=self._tensor_group,
            several_stages={n: p for n, p in held.parameters.items() if len(residency.stages[n]) > 1},
            parameters=parameter_ids(all_modules(module)) if context.mesh.world_size > 1 else None,
        )
        return placed, KnownTrace(part, trace, assignment) if held.is_unchanged else None

    def _plan(self, function: Callable[..., Any], batch: Batch) -> tuple[Plan, Trace | None]:
        """The plan, and the trace that it rests on, if it is made now."""
        context, trace = self._context, None
        assert context.reporter is not None
        # The script may have changed the model since it was wrapped.
        agree_on_registration(self._model.get_module(), context)
        self._materialiser.agree_on_seed()
        self._agreement.on_first_trace()
        if context.plan is None:
            context.plan, trace = self._planner(function, batch)
        context.reporter.plan_made(context.plan)
        return context.plan, trace

    def _take_room(self, plan: Plan) -> None:
        """Makes sure of room for what units offload, before anything is computed."""
        if not any(stage.offload for stage in plan.stages):
            return
        context, problem = self._context, None
        try:
            self._offloading.reserve(offloaded_bytes(plan)[context.pipeline_rank])
        except UsageError as error:
            problem = str(error)
        for rank, each in enumerate(context.from_all_ranks(problem)):
            if each is not None:
                raise UsageError(f"rank {rank}: {each}")

    def _find_units(self, plan: Plan) -> set[int]:
        """Finds the units of a plan in the model; gives ids of those in modules that recompute themselves."""
        module, names = self._model.get_module(), plan.unit_names
        refuse_unknown_units(module, names)
        compile_as_wished(module, self._context, plan)
        units = self._programs.set_units(names)
        self._materialiser.buffers_outside(units)
        return marked_inside(module, set(units.units))

    def _traced(
        self, plan: Plan, known: Trace | None, function: Callable[..., Any], part: Batch, *, again: bool
    ) -> Trace:
        """The trace of a microbatch, the same on all ranks, by the units of the plan."""
        # All ranks or none: they agree on where it ends. (Another model has other units than the plan.)
        again = again or known is None or set(known.unit_names) != set(plan.unit_names)
        if self._agreement.on_any(again) or known is None:
            known = self._programs.trace(function, part)
        self._agreement.on_trace(known)
        plan.check(known.graph, world_size=self._context.mesh.world_size)
        return known

    def _hold(self, residency: Residency, plan: Plan, cuts: Mapping[str, Cut]) -> "_Held":
        """Keeps what this rank holds, gives up the rest, and makes holders of one parameter agree."""
        context, module, units = self._context, self._model.get_module(), self._programs.units
        rank = context.pipeline_rank
        self._groups.make([tuple(ranks) for ranks in residency.ranks.values() if len(ranks) > 1])
        held = set(residency.held_by(rank))
        was_whole = not self._materialiser.waits
        release_remote(
            module,
            residency,
            units.parameters,
            rank=rank,
            world_ranks=context.pipeline_ranks,
            device=context.device,
        )
        move_to(module, context.device)
        alone = {name for name in held if residency.ranks[name] == (rank,)}
        parameters = dict(module.named_parameters())
        waiting = self._model.replicas.filled_when_shared({n: p for n, p in parameters.items() if n in alone})
        divided = frozenset(held & cuts.keys())
        if plan.tensor is not None:
            self._tensor_group = _tensor_group(context, plan.tensor)
        divide = {id(parameters[n]): partial(self._share_and_divide, n, cuts[n]) for n in divided}
        with large_blocks_given_back(then_kept=True) if divide else nullcontext():
            self._materialiser.named(held - waiting, units, then=divide)
        present = {name: tensor for name, tensor in _first_named(module).items() if name in held}
        changed = self._share_first_values(present.values())
        changed = synchronise(residency, present, self._groups, rank=rank) or changed
        for name in sorted(divided):
            if not isinstance(present[name], DividedTensor):
                self._divide(name, cuts[name], present[name])
        units = self._programs.note_new_tensors()
        parameters = {
            n: p
            for n, p in _first_named(module).items()
            if isinstance(p, nn.Parameter) and (not p.is_meta or n in waiting)
        }
        self._model.replicas.shard({n: p for n, p in parameters.items() if n in alone})
        aliased = {name for name, spec in units.specs.items() if spec.aliases}
        members = reduced_parameters(
            residency,
            parameters,
            aliased,
            self._groups,
            stage_ranks=plan.stage_ranks,
            rank=rank,
            settles=plan.tensor is not None,
        )
        reducer = self._model.replicas.make_reducer(members) if members else None
        return _Held(parameters, divided, reducer, was_whole and not changed)

    def _share_first_values(self, tensors: Iterable[Tensor]) -> bool:
        """Gives the ranks along the tensor axis the values of the first; says whether any were others."""
        group = self._context.groups.tensor
        if group is None:
            return False
        source = self._context.mesh.group("share", self._context.rank)[0]
        # A part came from the first rank's values.
        whole = [tensor for tensor in tensors if not isinstance(tensor, DividedTensor)]
        changed = [broadcast(tensor, source, group) for tensor in whole]
        return any(changed)

    def _share_and_divide(self, name: str, cut: Cut, parameter: Tensor) -> None:
        """Leaves this rank its part of a parameter that has just got values."""
        self._share_first_values([parameter])
        self._divide(name, cut, parameter)

    def _divide(self, name: str, cut: Cut, parameter: Tensor) -> None:
        """Leaves this rank its part of a parameter that ranks share."""
        assert isinstance(parameter, nn.Parameter)
        assert self._tensor_group is not None
        _refuse_hooks(name, parameter)
        group = self._tensor_group.of_parameter(is_of_expert=name in self._of_experts)
        divide_parameter(parameter, cut, group)

    def _recomputed(self, plan: Plan, trace: Trace, marked: set[int]) -> frozenset[str]:
        """Labels of the calls that are recomputed: by the plan, or as a module around them asks for."""
        modules = self._programs.units.modules
        calls = (node for node in trace.graph.nodes if node.kind == "unit")
        of_modules = frozenset(node.label for node in calls if id(modules[node.name]) in marked)
        return of_modules.union(*(stage.recompute for stage in plan.stages))


class _Held(NamedTuple):
    """The parameters that this rank has kept.

    Attributes:
        reducer: sums their gradients with those of other ranks; None where no other rank has one of them.
        is_unchanged: no values came from other ranks, or from the user's functions.
    """

    parameters: Mapping[str, nn.Parameter]
    divided: frozenset[str]
    reducer: GradientReducer | None
    is_unchanged: bool


def _tensor_group(context: Context, plan: TensorPlan) -> TensorGroup:
    """The ranks that share a batch; in a grid, those with other parts, with those that share a part."""
    groups, mesh = context.groups, context.mesh
    prices = Prices(**plan.prices.model_dump(), sums_wait=mesh.tensor != mesh.share)
    everyone = tensor_group(groups.tensor, prices=prices)
    if groups.inner is None:
        return everyone
    made = tensor_group(groups.outer, prices=prices)
    made.holds(tensor_group(groups.inner, prices=replace(prices, sums_wait=mesh.tensor == 1)))
    if mesh.expert > 1:
        column = mesh.group(mesh.outer, context.rank)
        made.share_experts(everyone, [mesh.group_rank("share", rank) for rank in column])
    return made


def _first_named(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _refuse_hooks(name: str, parameter: nn.Parameter) -> None:
    """Refuses a hook that would see the part of a gradient, as the tensor that shows all of its shape."""
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise UsageError(
            f"the parameter {name} has a hook for its gradient, and the plan has ranks share it. Make the "
            "plan anew, which leaves it whole, or change gradients between the step function and "
            "optimizer.step()."
        )
