"""Chooses whether tensor-parallel ranks cut the tensors between layers along the sequence, too.

Divided norms and residuals are worth their collectives, twice as many, where latencies are small; and ranks
keep their part of what is between layers alone, which may be what fits in memory.
"""

import contextlib
from collections.abc import Callable

from shardwright.config import Config
from shardwright.errors import InfeasiblePlanError, PlanError
from shardwright.plan import Plan
from shardwright.quantities import format_seconds

__all__ = ["with_or_without_sequences"]

_SAID_OF_WHOLE_ONES = "Sequences are cut between layers", "Sequences stay whole between layers"
_SAID_OF_PARTS = (  # context ranks have cut the sequences in any case, or expert ranks the samples
    "Parts of a batch are cut again between layers, along the sequence over tensor ranks",
    "Parts of a batch stay as they are between layers, whole on each tensor rank",
)


def with_or_without_sequences(
    config: Config,
    plan_with: Callable[[Config], Plan],
    *,
    tensor: int | None = None,
    previous: Plan | None = None,
) -> Plan:
    """The plan with the shorter predicted step, if the settings leave the choice."""
    tensor = config.tensor_parallel_degree if tensor is None else tensor
    if config.sequence_parallel != "auto" or tensor == 1:
        return plan_with(config)
    is_grid = max(config.context_parallel_degree, config.expert_parallel_degree) > 1
    if previous is not None and previous.tensor is not None:
        dim = previous.tensor.cut_again if is_grid else previous.tensor.between_units
        kept = dim is not None
        with contextlib.suppress(PlanError):  # another machine, or less memory
            return plan_with(config.model_copy(update={"sequence_parallel": kept}))
    too_large: InfeasiblePlanError | None = None
    whole: Plan | None = None
    try:
        whole = plan_with(config.model_copy(update={"sequence_parallel": False}))
    except InfeasiblePlanError as error:
        too_large = error
    try:
        cut = plan_with(config.model_copy(update={"sequence_parallel": True}))
    except PlanError:  # no tensor between layers has a sequence, or even its parts do not fit
        if whole is None:
            assert too_large is not None
            raise too_large from None
        return whole
    is_cut, stay_whole = _SAID_OF_PARTS if is_grid else _SAID_OF_WHOLE_ONES
    if whole is None:
        return _said(cut, f"{is_cut}: without that, tensors between layers do not fit.")
    cut_s, whole_s = (each.prediction.step_s if each.prediction else 0.0 for each in (cut, whole))
    seconds = f"{format_seconds(cut_s)} a step if they are cut, {format_seconds(whole_s)} if not."
    return _said(cut, f"{is_cut}: {seconds}") if cut_s < whole_s else _said(whole, f"{stay_whole}: {seconds}")


def _said(plan: Plan, line: str) -> Plan:
    return plan.model_copy(update={"why": (*plan.why, line)})
