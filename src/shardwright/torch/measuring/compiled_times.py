"""Whether the units of a run are compiled: the setting `compile`, where it is `auto`.

On GPUs, units are timed as written and compiled, and run as they take less time. On CPUs nothing is compiled,
nor timed so: a step of a GPT of 4 layers, 256 wide, takes 0.36 CPU seconds compiled and 0.32 as written.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from shardwright.plan import Plan
from shardwright.profile import Profile
from shardwright.quantities import format_seconds
from shardwright.run.context import Context
from shardwright.run.planning import profiles_of
from shardwright.run.profiler import Profiler
from shardwright.torch.counting import compiled_modules
from shardwright.torch.interception.compiled_code import code_is_compiled, forget_compiled_code
from shardwright.torch.measuring.measure import on_copies
from shardwright.torch.tracing.trace_data import Trace

_WORTH = 0.95
"""Of the time: what units must take less than to be run otherwise; compiling them takes a while, too."""


class CompiledTimes(NamedTuple):
    """What was found of the units of a run.

    Attributes:
        profiles: costs by number of microbatches, of the units as they run.
        compiled: the setting has them compiled.
        why: a sentence for the plan; empty where they were not timed both ways.
    """

    profiles: dict[int, Profile]
    compiled: bool
    why: str = ""


def _times_both(context: Context) -> bool:
    config = context.config
    is_open = config.compile == "auto" and config.profile == "measured" and context.mesh.share == 1
    return is_open and compiled_modules.auto_compiles(context.device)


def faster_of_both(
    context: Context,
    model: nn.Module,
    traces: Mapping[int, Trace],
    profiles: dict[int, Profile],
    *,
    budget_s: float,
    previous: Plan | None,
) -> CompiledTimes:
    """Times units compiled, too, where that is open; collective over all ranks.

    Args:
        profiles: of the units as the script has them.
        budget_s: seconds for timing them; the compiler takes more.
        previous: the plan of the last run like this: what it has written stays so, and what it has compiled
            as long as that is not clearly slower.
    """
    if context.config.compile == "on" and context.mesh.share == 1:
        return CompiledTimes(profiles, compiled=True, why="Units are compiled, as asked for.")
    if not _times_both(context) or (previous is not None and not previous.compiled):
        return CompiledTimes(profiles, compiled=False)
    if any(map(compiled_modules.is_compiled, model.modules())):
        return CompiledTimes(profiles, compiled=False, why="Units run as the script has compiled them.")
    is_alone = not code_is_compiled()
    found = profiles_of(
        context,
        traces,
        profiler=lambda: Profiler(
            context, time_class=on_copies(context, compiled=True), framework="compiled", units_alone=True
        ),
        budget_s=budget_s,
        again=previous is not None,
    )
    both = {m: _units_replaced(traces[m], profiles[m], found[m]) for m in traces}
    m = next(iter(traces))
    written_s, compiled_s = (_seconds(traces[m], profile) for profile in (profiles[m], both[m]))
    told = f"{format_seconds(compiled_s)} a microbatch compiled and {format_seconds(written_s)} as written"
    if compiled_s < _WORTH * written_s or (previous is not None and _WORTH * compiled_s <= written_s):
        return CompiledTimes(both, compiled=True, why=f"Units are compiled: they take {told}.")
    if is_alone:
        forget_compiled_code()
    return CompiledTimes(profiles, compiled=False, why=f"Units run as written: they take {told}.")


def _units_replaced(trace: Trace, profile: Profile, compiled: Profile) -> Profile:
    """A profile with the costs of units that were timed compiled."""
    units = {node.cost_class for node in trace.graph.nodes if node.kind == "unit"}
    timed = {
        key: cost for key, cost in compiled.costs.items() if key in units and cost.provenance == "measured"
    }
    return replace(profile, costs={**profile.costs, **timed})


def _seconds(trace: Trace, profile: Profile) -> float:
    """Of a microbatch's forward and backward."""
    costs = [profile.costs[node.cost_class] for node in trace.graph.nodes if node.cost_class in profile.costs]
    return sum(cost.forward_s + cost.backward_s for cost in costs)
