"""Explains a choice in sentences with numbers, offers numbers of nodes, and turns ways into plans.

::

    all ways ─► closed forms ─► the best of other degrees ─► a plan of each (chain DP, simulation) ─► the best

A plan names the units of a module, so only a model at hand has one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from shardwright.config import Config
from shardwright.errors import ConfigError, InfeasiblePlanError, PlanError, UsageError
from shardwright.plan import Plan
from shardwright.planner.degrees import Planned, plan_survivors
from shardwright.planner.ways.search import NEAR_TIE, Answer, drawbacks, least_memory, search, widened
from shardwright.planner.ways.space import pin_text
from shardwright.planner.ways.task import Task
from shardwright.planner.ways.way import PARTS, Way, describe, prices_of
from shardwright.quantities import counted, format_bytes, format_seconds

_RATES = {
    "flops_per_s": "faster matrix products",
    "memory_Bps": "faster memory of the accelerators",
    "link_Bps": "faster links inside of nodes",
    "network_Bps": "a faster network between nodes",
}
_MORE = 1.1
_FELT = 0.002
_NUM_PARTS = 3


def sensitivities(task: Task, way: Way) -> dict[str, float]:
    """The share of a step that a tenth more of each rate of the machines would spare; the most first."""
    found = {
        what: 1 - float(prices_of(task, way.options, faster={name: _MORE}).seconds.total) / way.step_s
        for name, what in _RATES.items()
    }
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def reasons(answer: Answer) -> list[str]:
    task, best = answer.task, answer.best
    low, high = best.interval_s
    found = [
        f"Chosen of {answer.num_ways} ways, of which {answer.num_priced} had to be priced: {describe(best)} "
        f"(80% interval {format_seconds(low)} to {format_seconds(high)})."
    ]
    if answer.alternatives:
        found.append(f"The next best with other degrees: {difference(best, answer.alternatives[0])}.")
        faster = 1 - min(way.step_s for way in answer.alternatives) / best.step_s
        if faster > 0:
            found.append(
                f"The fastest takes {faster:.1%} less: ways within {NEAR_TIE - 1:.0%} may change places in "
                "practice, so the one with the fewest parts, and memory to spare, is best."
            )
    found.append(f"Of a step: {_parts(best)}.")
    texts = [f"{what} {share:.1%}" for what, share in sensitivities(task, best).items() if share > _FELT]
    if texts:
        found.append(f"A tenth more of one rate would spare: {', '.join(texts)}.")
    share = best.peak_bytes / best.limit_bytes
    found.append(
        f"Peak memory (busiest rank): {format_bytes(best.peak_bytes)} of {format_bytes(best.limit_bytes)} "
        f"({share:.0%}): {best.memory_text}."
    )
    found += with_a_node_less(task, best)
    if best.not_run_yet:
        found.append(f"This version does not run {_listed(best.not_run_yet)} yet.")
    return [*found, f"The times are {best.provenance}."]


def with_a_node_less(task: Task, way: Way) -> list[str]:
    """A sentence about a lost node: whether the degrees fit those that are left, and what that comes to."""
    nodes, per_node = task.machines.num_nodes, task.machines.nodes[0][0].num_accelerators
    if nodes == 1 or way.not_run_yet:
        return []
    settings = {name: value for name, value in way.settings.items() if name != "data_parallel_degree"}
    o, ranks = way.options, (nodes - 1) * per_node
    try:
        left = Config.parse(settings).resolve_world(ranks).data * int(o.expert_samples)
    except ConfigError:
        return [f"A lost node stops the run until it is replaced: {ranks} ranks do not fit these degrees."]
    fewer = replace(o, data=float(left), shard=float(left) if o.shard == o.data else o.shard)
    prices = prices_of(task, fewer)
    peak, share = int(prices.num_bytes.total), left / o.data * way.step_s / float(prices.seconds.total)
    at = f"at {share:.0%} of the rate" if peak <= way.limit_bytes else "only with more memory"
    return [
        f"With a node lost, run --min-nodes {nodes - 1} without data_parallel_degree goes on {at}, with "
        f"{left} of {counted(int(o.data), 'replica')} and {format_bytes(peak)} a rank."
    ]


def ideal_text(best: Way, ideal: Way, *, objective: str = "speed") -> str:
    """The best of all ways beside the best that this version runs, by what counts: speed or memory."""
    faster, smaller = 1 - ideal.step_s / best.step_s, best.peak_bytes - ideal.peak_bytes
    gain = f"{faster:.1%} faster" if objective == "speed" else f"{format_bytes(smaller)} smaller"
    why = (
        f"this version does not run {_listed(ideal.not_run_yet)} yet"
        if ideal.not_run_yet
        else "its degrees are such as one would not operate"
    )
    return f"*: the best of all ways, {gain}; {why}.\n{describe(ideal)}"


def not_run_text(ways: Sequence[Way]) -> str:
    """What ways with a star in the table need that this version does not run."""
    parts = dict.fromkeys(part for way in ways for part in way.not_run_yet)
    return f"*: this version does not run {_listed(list(parts))} yet."


def _listed(parts: Sequence[str]) -> str:
    """
    >>> _listed(["tensor parallelism", "offload", "ZeRO-2"])
    'tensor parallelism, offload and ZeRO-2'
    """
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The best way beside one with options that somebody has in mind.

    Attributes:
        wanted: the best with these options; where nothing fits with them, the one that takes least memory.
    """

    best: Way
    wanted: Way
    fits: bool
    sentences: tuple[str, ...]


def why_not(task: Task, pins: dict[str, int]) -> _Comparison:
    """Compares the best way with the best one that has these options, too."""
    answer = widened(task, search)
    pinned = replace(task, pins={**task.pins, **pins})
    first = f"The best way: {describe(answer.best)}."
    try:
        other = widened(pinned, search).best
    except InfeasiblePlanError:
        other = None
    if other is not None:
        second = f"The best with {_text(pins)}: {difference(answer.best, other)}."
        missing = (
            [f"This version does not run {_listed(other.not_run_yet)} yet."] if other.not_run_yet else []
        )
        return _Comparison(answer.best, other, True, (first, second, *_where(answer.best, other), *missing))
    closest = widened(pinned, least_memory)
    over = closest.peak_bytes - closest.limit_bytes
    if over <= 0:
        second = (
            f"With {_text(pins)} nothing fits: what {closest.title} offloads is more than the "
            f"{format_bytes(task.host_bytes)} of the host's memory that a rank may use."
        )
        return _Comparison(answer.best, closest, False, (first, second))
    second = (
        f"With {_text(pins)} nothing fits: what takes least memory ({closest.title}) needs "
        f"{format_bytes(closest.peak_bytes)} a rank, {format_bytes(over)} too much: {closest.memory_text}."
    )
    return _Comparison(answer.best, closest, False, (first, second))


def _where(best: Way, other: Way) -> list[str]:
    """The parts of a step that differ most, and what speaks against a way that is as fast."""
    apart = {name: other.seconds[name] - best.seconds[name] for name in best.seconds}
    felt = [
        name
        for name in sorted(apart, key=lambda name: -abs(apart[name]))
        if abs(apart[name]) > _FELT * best.step_s
    ]
    texts = [
        f"{PARTS[name]} {'+' if apart[name] > 0 else '-'}{format_seconds(abs(apart[name]))}" for name in felt
    ]
    found = [f"Where it differs: {', '.join(texts[:_NUM_PARTS])}."] if texts else []
    if other.step_s < best.step_s * NEAR_TIE and (against := drawbacks(other)):
        found.append(f"The times are as good as equal, and it {_listed(against)}.")
    return found


def _text(pins: dict[str, int]) -> str:
    return ", ".join(pin_text(name, value) for name, value in pins.items())


def difference(best: Way, other: Way) -> str:
    """Another way, with how much slower it is."""
    apart = other.step_s / best.step_s - 1
    return f"{describe(other)}, {abs(apart):.1%} {'slower' if apart >= 0 else 'faster'}"


def _parts(way: Way) -> str:
    return ", ".join(f"{name} {seconds / way.step_s:.0%}" for name, seconds in way.waterfall)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """Training on some of the machines.

    Attributes:
        dollars: of the whole training; None where a price is not known.
    """

    num_nodes: int
    num_ranks: int
    way: Way
    seconds: float
    dollars: float | None


def check_offers(task: Task, tokens: float) -> None:
    """Refuses what no offers can be made of."""
    if len(task.machines.nodes) != 1:
        raise UsageError("how many machines to take can be asked of one kind at a time. Name one kind.")
    if not 0 < tokens < float("inf"):
        raise UsageError(f"tokens is {tokens:g}, but it must be more than 0.")


def offers(
    task: Task,
    *,
    tokens: float,
    deadline_s: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[_Offer]:
    """Offers of training on 1, 2, 4, ... nodes of one kind, up to all of them; none where nothing fits.

    Of the numbers between the last that is too slow and the first that is in time, quarters are offered.
    """
    check_offers(task, tokens)
    _, most = task.machines.nodes[0]
    found: dict[int, _Offer] = {}
    refused: ConfigError | None = None
    numbers = sorted({2**n for n in range(most.bit_length())} | {most})
    for done, number in enumerate(numbers, start=1):
        progress(done, len(numbers))
        try:
            found[number] = _offer(task, number, tokens)
        except InfeasiblePlanError:
            continue  # too little memory
        except ConfigError as error:
            refused = error  # for example, more replicas than the batch has samples
    if not found and (task.operable or task.only_what_runs):
        wider = replace(task, operable=False, only_what_runs=task.operable and task.only_what_runs)
        return offers(wider, tokens=tokens, deadline_s=deadline_s, progress=progress)
    if not found and refused is not None:
        raise refused
    if deadline_s is not None:
        found |= _between(task, found, tokens, deadline_s)
    return [found[number] for number in sorted(found)]


def _between(task: Task, known: dict[int, _Offer], tokens: float, deadline_s: float) -> dict[int, _Offer]:
    """Numbers of nodes between the last that is too slow and the first that is in time."""
    in_time = [number for number, offer in sorted(known.items()) if offer.seconds <= deadline_s]
    if not in_time:
        return {}
    high = in_time[0]
    low = max((number for number in known if number < high), default=high // 2)
    found: dict[int, _Offer] = {}
    for number in sorted({low + (high - low) * quarter // 4 for quarter in (1, 2, 3)} - {low, high}):
        try:
            found[number] = _offer(task, number, tokens)
        except (InfeasiblePlanError, ConfigError):
            continue
        if found[number].seconds <= deadline_s:
            break
    return found


def _offer(task: Task, number: int, tokens: float) -> _Offer:
    """Training on so many nodes."""
    kind, _ = task.machines.nodes[0]
    machines = replace(task.machines, name=f"{kind.name} x {number}", nodes=((kind, number),))
    way = search(replace(task, machines=machines)).best
    seconds = tokens / way.tokens_per_s
    price = machines.price_per_hour
    return _Offer(
        num_nodes=number,
        num_ranks=machines.num_ranks,
        way=way,
        seconds=seconds,
        dollars=None if price is None else price * seconds / 3600,
    )


def cheapest(found: list[_Offer], *, deadline_s: float | None = None) -> _Offer:
    """The offer to take: of those in time, the one that costs least."""
    if not found:
        raise InfeasiblePlanError(
            "nothing fits on any number of these machines. See what would help: shardwright search, with all."
        )
    in_time = [offer for offer in found if deadline_s is None or offer.seconds <= deadline_s]
    if not in_time:
        best = min(found, key=lambda offer: offer.seconds)
        assert deadline_s is not None
        raise InfeasiblePlanError(
            f"no number of these machines trains within {format_seconds(deadline_s)}: the fastest, "
            f"{counted(best.num_nodes, 'node')}, takes {format_seconds(best.seconds)}. Take more or faster "
            "machines, or fewer tokens."
        )
    return min(in_time, key=lambda offer: (offer.dollars or 0.0, offer.num_nodes))


_NUM_PLANNED = 3  # each is traced anew, for its own microbatches
_LEFT_TO_PLANS = {
    "pipeline": "schedule",
    "virtual_stages": "virtual",
    "activation_checkpointing": "recompute",
}
"""Settings that a plan chooses itself, by a simulation, unless the option is pinned."""

_NEAR_TIE = 1.01


def settings_of(answer: Answer, way: Way) -> dict[str, Any]:
    """The settings of a plan that a way fixes: its degrees and microbatches, and pinned options."""
    task = answer.task
    left = {key for key, option in _LEFT_TO_PLANS.items() if option not in task.pins}
    found = {key: value for key, value in way.settings.items() if key not in left}
    low = {"bfloat16": "bf16", "float16": "fp16"}.get(task.dtype)
    return found | ({low: True} if low else {})


def best_plan(
    answer: Answer,
    make: Callable[[int, Mapping[str, Any]], Plan],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Answer, Plan]:
    """Plans the best ways that this version runs, and puts the one with the shortest simulated step first."""
    ways = [way for way in (answer.best, *answer.alternatives) if not way.not_run_yet][:_NUM_PLANNED]
    if not ways:
        parts = " and ".join(answer.best.not_run_yet)
        raise PlanError(
            f"the best way ({answer.best.title}) needs {parts}, which this version does not run yet, and so "
            "do those that are next. Leave --all-ways out."
        )

    begun = count(1)

    def plans_of(way: Way) -> tuple[Plan]:
        progress(next(begun), len(ways))
        # Ranks that share experts share a batch.
        samples = int(way.options.microbatch * way.options.microbatches * way.options.expert_samples)
        return (make(samples, settings_of(answer, way)),)

    survivors = plan_survivors(
        ways, [way.step_s for way in ways], plans_of, seconds=lambda way, plan: seconds_of(plan)
    )
    if not survivors.planned:
        raise survivors.failures[0]
    least = min(each.seconds for each in survivors.planned)
    near = [each for each in survivors.planned if each.seconds <= least * _NEAR_TIE]
    best = min(near, key=lambda each: ways.index(each.candidate))  # the simplest, if closed forms say so
    why = (*best.plan.why, _reason(answer, best, survivors.planned))
    others = (way for way in (answer.best, *answer.alternatives) if way is not best.candidate)
    first = replace(answer, best=best.candidate, alternatives=tuple(others))
    return first, best.plan.model_copy(update={"why": why})


def seconds_of(plan: Plan) -> float:
    """Seconds of a step of a plan, its update included, as ways have it."""
    assert plan.prediction is not None
    return plan.prediction.step_s + plan.prediction.update_s


def _reason(answer: Answer, chosen: Planned[Way], planned: Sequence[Planned[Way]]) -> str:
    others = [
        f"{each.candidate.title} takes {format_seconds(each.seconds)}"
        for each in planned
        if each is not chosen
    ]
    best = answer.best
    missing = ""
    if best.not_run_yet:
        missing = (
            f"The best way, {best.title}, takes {format_seconds(best.step_s)} and needs "
            f"{' and '.join(best.not_run_yet)}, which this version does not run yet. "
        )
    text = missing + (
        f"Searched: of {answer.num_ways} ways, {answer.num_priced} of which had to be priced, closed forms "
        f"left {len(planned)} to simulate; they say {format_seconds(chosen.expected_s)} a step of this one, "
        "its update included"
    )
    return f"{text}. {'; '.join(others)}." if others else f"{text}."
