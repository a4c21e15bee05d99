"""Plays a plan out, unchanged or under other conditions: a slow rank, another link, other microbatches.

::

    plan ─► changed(...) ─► base_setting ─► play ─► Replay: timeline, step, memory
                               │
                               └─► waterfall: the same rows, with one effect after the other taken away
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from math import ceil

from shardwright.cluster import Link
from shardwright.config import Config
from shardwright.errors import PlanError
from shardwright.plan import Plan, Prediction, StagePrediction
from shardwright.plan.prediction import Conditions
from shardwright.quantities import counted, format_bytes
from shardwright.schedule import Edge, Schedule, Simulation, StageCost, build_schedule, simulate


def overruled_settings(plan: Plan, config: Config) -> Iterator[str]:
    """The settings that a plan does not keep, a sentence each."""
    stages_per_rank = len(plan.stages) / plan.mesh.pipeline
    planned = {
        **plan.mesh.settings,
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
    return tuple(map(_stage_cost, plan.prediction.stages))


def _stage_cost(stage: StagePrediction) -> StageCost:
    """The cost of a stage, recomputation in its backward."""
    copies = {name: getattr(stage, name) for name in ("offload_bytes", "window_bytes", "tail_bytes")}
    return StageCost(**asdict(stage.cost), **copies)


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
        conditions: all others, as the plan has them.
    """

    schedule: Schedule
    costs: tuple[StageCost, ...]
    edges: tuple[Edge, ...]
    link: Callable[[int, int], Link] | None
    host: Link | None
    cores: int
    sync_s: float
    conditions: Conditions


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
        step_s: seconds of the whole step: schedule, crowding, sums of gradients, overhead.
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
    """The conditions that a plan was made with."""
    prediction = _prediction(plan)
    _check_length(len(plan.stages), plan.schedule.microbatches)
    costs = stage_costs_of(plan)
    assert costs is not None
    conditions = prediction.conditions
    intra, inter, hosts = conditions.intra_node, conditions.inter_node, conditions.hosts
    return Setting(
        schedule=schedule_of(plan),
        costs=costs,
        edges=tuple(
            Edge(**flow.model_dump(), has_gradient=flow.gradient_bytes > 0) for flow in conditions.flows
        ),
        link=lambda a, b: intra if hosts[a] == hosts[b] else inter,
        host=conditions.host,
        cores=conditions.cores,
        sync_s=prediction.sync_s,
        conditions=conditions,
    )


def changed(plan: Plan, change: Change) -> Plan:
    """The plan with its prediction's stages, flows and links as they are after a change; its step stays."""
    prediction = _prediction(plan)
    microbatches = change.num_microbatches or plan.schedule.microbatches
    _check_length(len(plan.stages), microbatches)
    share = plan.schedule.microbatches / microbatches
    conditions = prediction.conditions
    of_links = {
        name: replace(
            link,
            latency_s=link.latency_s * change.latency,
            bandwidth_Bps=link.bandwidth_Bps * change.bandwidth,
        )
        for name, link in (("intra_node", conditions.intra_node), ("inter_node", conditions.inter_node))
    }
    flows = tuple(
        flow.model_copy(
            # Not to 0: what flows has a gradient still.
            update={name: ceil(getattr(flow, name) * share) for name in ("num_bytes", "gradient_bytes")}
        )
        for flow in conditions.flows
    )
    expected = {
        "stages": tuple(_changed_stage(plan, stage, change, share) for stage in prediction.stages),
        "sync_s": _sync_s(prediction, change),
        "conditions": conditions.model_copy(update={**of_links, "flows": flows}),
    }
    return plan.model_copy(
        update={
            "schedule": plan.schedule.model_copy(update={"microbatches": microbatches}),
            "prediction": prediction.model_copy(update=expected),
        }
    )


def _changed_stage(plan: Plan, stage: StagePrediction, change: Change, share: float) -> StagePrediction:
    cost = _stage_cost(stage).scaled(seconds=share / change.compute_rate, num_bytes=share)
    found = asdict(cost)
    del found["recompute_s"]  # which is a part of the backward here
    exchange_s = stage.forward_exchange_s + stage.backward_exchange_s
    if plan.tensor is not None and exchange_s > 0:
        # What tensor-parallel ranks exchange takes as long as their links say, not as they compute.
        of_bytes = min(1.0, stage.exchange_bytes / plan.tensor.prices.bandwidth_Bps / exchange_s)
        factor = share * of_bytes / change.bandwidth + (1 - of_bytes) * change.latency
        more = factor - share / change.compute_rate
        found["forward_s"] = max(0.0, cost.forward_s + stage.forward_exchange_s * more)
        for name in ("backward_s", "input_s"):
            if found[name] is not None:
                found[name] = max(0.0, found[name] + stage.backward_exchange_s * more)
    return stage.model_copy(update=found)


def _check_length(stages: int, microbatches: int) -> None:
    actions = 2 * stages * microbatches
    if actions > _MOST_ACTIONS:
        raise PlanError(
            f"{microbatches} microbatches on {stages} stages are {actions} actions, which take hours to play "
            f"out. Take at most {_MOST_ACTIONS // (2 * stages)} microbatches."
        )


def play(setting: Setting) -> Replay:
    conditions = setting.conditions
    simulation = simulate(
        setting.schedule,
        setting.costs,
        edges=setting.edges,
        link=setting.link,
        host=setting.host,
        cores=setting.cores,
        ranks_per_node=conditions.ranks_per_node,
        action_overhead_s=conditions.action_overhead_s,
        forward_overhead_s=conditions.forward_overhead_s,
    )
    step_s = simulation.step_s * conditions.crowding + setting.sync_s + conditions.step_overhead_s
    return Replay(setting=setting, simulation=simulation, step_s=step_s)


def _prediction(plan: Plan) -> Prediction:
    if plan.prediction is None:
        raise PlanError(
            "the plan has no prediction, so it says nothing about seconds and bytes: it was written by hand, "
            "or the field was removed. Make a plan with one: shardwright plan model.py:build -n N"
        )
    return plan.prediction


def _sync_s(prediction: Prediction, change: Change) -> float:
    """The sums of gradients, over links of another kind: what is not latency is bytes.

    What was hidden behind computing stays so as long as there is computing enough.
    """
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
    base = base_setting(plan)
    base_s = play(base).step_s
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
        setting = base_setting(changed(plan, change))
        if change.num_microbatches is None:  # other costs would give another order of work, for a hair
            setting = replace(setting, schedule=base.schedule)
        step_s = play(setting).step_s
        found.append(Sensitivity(name, step_s, base_s - step_s, assumption))
    return tuple(found)
