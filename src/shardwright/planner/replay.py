"""Plays a plan out, unchanged or under other conditions: a slow rank, another link, other microbatches.

::

    plan ─► base_setting ─► change(...) ─► play ─► Replay: timeline, step, memory
               │
               └─► waterfall: the same rows, with one effect after the other taken away
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

from shardwright.cluster import Link
from shardwright.config import Config
from shardwright.errors import PlanError
from shardwright.plan import Plan, Prediction
from shardwright.plan.prediction import Conditions
from shardwright.quantities import counted, format_bytes
from shardwright.schedule import Edge, Schedule, Simulation, StageCost, build_schedule, simulate


def overruled_settings(plan: Plan, config: Config) -> Iterator[str]:
    """The settings that a plan does not keep, a sentence each."""
    stages_per_rank = len(plan.stages) / plan.mesh.pipeline
    planned = {
        "pipeline_parallel_degree": plan.mesh.pipeline,
        "data_parallel_degree": plan.mesh.data,
        "sharded_data_parallel_degree": plan.mesh.shard,
        "tensor_parallel_degree": plan.mesh.tensor,
        "context_parallel_degree": plan.mesh.context,
        "expert_parallel_degree": plan.mesh.expert,
        "placement_strategy": plan.mesh.placement_strategy,
        "microbatches": plan.schedule.microbatches,
        "pipeline": plan.schedule.kind,
        "active_microbatches": plan.schedule.active_microbatches,
        "virtual_stages": int(stages_per_rank) if stages_per_rank.is_integer() else stages_per_rank,
    }
    pins = config.pins
    for key, value in planned.items():
        if key in pins and pins[key] != value:
            yield f"{key} is {pins[key]!r}, but the plan has {value!r}."
    if not config.auto_partition:
        yield "auto_partition is False, but the plan says where each unit goes."
    recomputed = sum(len(stage.recompute) for stage in plan.stages)
    units = sum(len(stage.units) for stage in plan.stages)
    wanted = {"none": 0, "full": units}.get(config.activation_checkpointing, recomputed)
    if wanted != recomputed:
        yield (
            f"activation_checkpointing is {config.activation_checkpointing!r}, but the plan recomputes "
            f"{recomputed} of {units} units."
        )
    offloaded = sum(len(stage.offload) for stage in plan.stages)
    pinned = config.offload_activations
    if pinned != "auto" and "offload_activations" in pins and offloaded != (units if pinned else 0):
        yield (
            f"offload_activations is {pinned!r}, but the plan offloads what {offloaded} of "
            f"{units} units keep."
        )
    if config.memory_limit is not None and plan.prediction is not None:
        peak = max(memory.peak_bytes for memory in plan.prediction.memory)
        if peak > config.memory_limit:
            yield (
                f"memory_limit is {format_bytes(config.memory_limit)}, but the plan is predicted to need "
                f"{format_bytes(peak)}."
            )


def stage_costs_of(plan: Plan) -> tuple[StageCost, ...] | None:
    """The costs that a plan was made with; None for plans written by hand."""
    if plan.prediction is None:
        return None
    return tuple(
        StageCost(
            **asdict(stage.cost),
            offload_bytes=stage.offload_bytes,
            window_bytes=stage.window_bytes,
            tail_bytes=stage.tail_bytes,
        )
        for stage in plan.prediction.stages
    )


def schedule_of(plan: Plan, *, forward_only: bool = False) -> Schedule:
    """The order of work that a plan asks for, without transfers; the same on every rank."""
    schedule = build_schedule(
        plan.schedule.kind,
        stage_ranks=plan.stage_ranks,
        num_microbatches=plan.schedule.microbatches,
        active_microbatches=plan.schedule.active_microbatches,
        forward_only=forward_only,
        costs=stage_costs_of(plan),
    )
    return schedule.with_host_copies([number for number, stage in enumerate(plan.stages) if stage.offload])


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that a step is played out with.

    Attributes:
        edges: what flows between stages.
        link: from one pipeline rank to another; None where messages take no time.
        host: from each rank to where it offloads what units keep; None where copies take no time.
        cores: that the ranks of a host share; 0 where each has a device.
        ranks_per_node: ranks of a host; 0: all are on one.
        forward_overhead_s: on top of that, of every forward.
        crowding: factor on the time of the schedule.
        step_overhead_s: before the first action and after the last one.
    """

    schedule: Schedule
    costs: tuple[StageCost, ...]
    edges: tuple[Edge, ...]
    link: Callable[[int, int], Link] | None = None
    host: Link | None = None
    cores: int = 0
    ranks_per_node: int = 0
    action_overhead_s: float = 0.0
    forward_overhead_s: float = 0.0
    crowding: float = 1.0
    sync_s: float = 0.0
    step_overhead_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a plan's conditions.

    Attributes:
        num_microbatches: into which the same batch is split; costs, messages and activations of one are
            taken to shrink in proportion. None: as planned.
        compute_rate: how many times as fast every rank computes.
        bandwidth: factor on the bandwidth of all links.
        latency: factor on the latency of all links.
    """

    num_microbatches: int | None = None
    compute_rate: float = 1.0
    bandwidth: float = 1.0
    latency: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A setting played out.

    Attributes:
        step_s: seconds of the whole step: schedule, crowding, sums of gradients, overhead, correction, and
            code outside of the model.
    """

    setting: Setting
    simulation: Simulation
    step_s: float

    @property
    def idle_s(self) -> tuple[float, ...]:
        return tuple(max(0.0, self.simulation.step_s - busy_s) for busy_s in self.simulation.busy_s)


_MOST_ACTIONS = 5_000_000
"""Of a schedule that is played out: a minute or so."""


def base_setting(plan: Plan) -> Setting:
    """The conditions that a plan was made with, as far as it tells."""
    prediction = _prediction(plan)
    _check_length(len(plan.stages), plan.schedule.microbatches)
    schedule, costs = schedule_of(plan), stage_costs_of(plan)
    assert costs is not None
    conditions = prediction.conditions
    return Setting(
        schedule=schedule,
        costs=costs,
        edges=_edges(conditions),
        link=_links(conditions, Change()),
        host=conditions.host,
        cores=conditions.cores,
        ranks_per_node=conditions.ranks_per_node,
        action_overhead_s=conditions.action_overhead_s,
        forward_overhead_s=conditions.forward_overhead_s,
        crowding=conditions.crowding,
        sync_s=prediction.sync_s,
        step_overhead_s=conditions.step_overhead_s,
    )


def change_setting(plan: Plan, change: Change) -> Setting:
    """The conditions of a plan with something changed."""
    base, conditions = base_setting(plan), _prediction(plan).conditions
    microbatches = change.num_microbatches or plan.schedule.microbatches
    _check_length(len(plan.stages), microbatches)
    share = plan.schedule.microbatches / microbatches
    costs = tuple(
        _other_links(
            cost.scaled(seconds=share / change.compute_rate, num_bytes=share),
            *_exchange_seconds(plan, stage, share=share, change=change),
        )
        for stage, cost in enumerate(base.costs)
    )
    schedule = base.schedule
    if microbatches != plan.schedule.microbatches:
        schedule = build_schedule(
            plan.schedule.kind,
            stage_ranks=plan.stage_ranks,
            num_microbatches=microbatches,
            active_microbatches=plan.schedule.active_microbatches,
            costs=tuple(cost.scaled(seconds=share, num_bytes=share) for cost in base.costs),
        ).with_host_copies([number for number, cost in enumerate(base.costs) if cost.offload_bytes])
    return replace(
        base,
        schedule=schedule,
        costs=costs,
        edges=_edges(conditions, share=share),
        link=_links(conditions, change),
        sync_s=_sync_s(plan, change),
    )


def _exchange_seconds(plan: Plan, stage: int, *, share: float, change: Change) -> tuple[float, float]:
    """Seconds by which the exchange of tensor-parallel ranks takes longer, in a forward and a backward."""
    predicted = _prediction(plan).stages[stage]
    of_both = (predicted.forward_exchange_s, predicted.backward_exchange_s)
    if plan.tensor is None or sum(of_both) == 0:
        return 0.0, 0.0
    rate = 1 / change.compute_rate
    bytes_share = min(1.0, predicted.exchange_bytes / plan.tensor.prices.bandwidth_Bps / sum(of_both))
    changed = share * bytes_share / change.bandwidth + (1 - bytes_share) * change.latency
    forward_s, backward_s = (seconds * (changed - share * rate) for seconds in of_both)
    return forward_s, backward_s


def _other_links(cost: StageCost, forward_s: float, backward_s: float) -> StageCost:
    """The cost of a stage whose exchange takes longer by so much."""
    if forward_s == backward_s == 0:
        return cost
    return replace(
        cost,
        forward_s=max(0.0, cost.forward_s + forward_s),
        backward_s=max(0.0, cost.backward_s + backward_s),
        input_s=None if cost.input_s is None else max(0.0, cost.input_s + backward_s),
    )


def _check_length(stages: int, microbatches: int) -> None:
    actions = 2 * stages * microbatches
    if actions > _MOST_ACTIONS:
        raise PlanError(
            f"{microbatches} microbatches on {stages} stages are {actions} actions, which take hours to play "
            f"out. Take at most {_MOST_ACTIONS // (2 * stages)} microbatches."
        )


def play(setting: Setting) -> Replay:
    simulation = simulate(
        setting.schedule,
        setting.costs,
        edges=setting.edges,
        link=setting.link,
        host=setting.host,
        cores=setting.cores,
        ranks_per_node=setting.ranks_per_node,
        action_overhead_s=setting.action_overhead_s,
        forward_overhead_s=setting.forward_overhead_s,
    )
    step_s = simulation.step_s * setting.crowding + setting.sync_s + setting.step_overhead_s
    return Replay(setting=setting, simulation=simulation, step_s=step_s)


def _prediction(plan: Plan) -> Prediction:
    if plan.prediction is None:
        raise PlanError(
            "the plan has no prediction, so it says nothing about seconds and bytes: it was written by hand, "
            "or the field was removed. Make a plan with one: shardwright plan model.py:build -n N"
        )
    return plan.prediction


def _edges(conditions: Conditions, *, share: float = 1.0) -> tuple[Edge, ...]:
    return tuple(
        Edge(
            source=flow.source,
            target=flow.target,
            num_bytes=round(flow.num_bytes * share),
            gradient_bytes=round(flow.gradient_bytes * share),
            has_gradient=flow.gradient_bytes > 0,
        )
        for flow in conditions.flows
    )


def _links(conditions: Conditions, change: Change) -> Callable[[int, int], Link]:
    intra, inter = (_link(each, change) for each in (conditions.intra_node, conditions.inter_node))
    hosts = conditions.hosts
    return lambda a, b: intra if hosts[a] == hosts[b] else inter


def _link(link: Link, change: Change) -> Link:
    return replace(
        link,
        latency_s=link.latency_s * change.latency,
        bandwidth_Bps=link.bandwidth_Bps * change.bandwidth,
    )


def _sync_s(plan: Plan, change: Change) -> float:
    """The sums of gradients, over links of another kind: what is not latency is bytes.

    What was hidden behind computing stays so as long as there is computing enough.
    """
    prediction = _prediction(plan)
    conditions = prediction.conditions
    latency_s = min(prediction.sync_s, conditions.sync_latency_s)
    bytes_s = prediction.sync_s - latency_s
    of_hidden_s = (bytes_s + conditions.hidden_s) / change.bandwidth
    exposed_s = max(bytes_s / change.bandwidth, of_hidden_s - conditions.window_s / change.compute_rate)
    return latency_s * change.latency + exposed_s


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """One change and its gain.

    Attributes:
        saved_s: seconds less than without it; negative where it costs time.
        assumption: what is taken for granted; empty where nothing is.
    """

    name: str
    step_s: float
    saved_s: float
    assumption: str = ""


_PROPORTION = "seconds and bytes of a microbatch in proportion to its size"


def sensitivities(plan: Plan) -> tuple[Sensitivity, ...]:
    """Faster compute, faster links, other microbatches: the step with each, everything else as planned.

    Microbatches are left out whose number no pin has set, and numbers of runners-up: the planner has weighed
    them by their own costs, which proportion would contradict.
    """
    base_s = play(base_setting(plan)).step_s
    microbatches = plan.schedule.microbatches
    changes = [
        ("10% faster compute", Change(compute_rate=1.1), ""),
        ("twice the bandwidth", Change(bandwidth=2.0), ""),
        ("half the latency", Change(latency=0.5), ""),
    ]
    if "microbatches" in plan.pins:
        changes += [
            (counted(number, "microbatch", "es"), Change(num_microbatches=number), _PROPORTION)
            for number in (2 * microbatches, microbatches // 2)
            if number and all(number != other.microbatches for other in plan.alternatives)
        ]
    found = []
    for name, change, assumption in changes:
        step_s = play(change_setting(plan, change)).step_s
        found.append(Sensitivity(name, step_s, base_s - step_s, assumption))
    return tuple(found)
