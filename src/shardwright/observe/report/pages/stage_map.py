"""The map of stages to layers, and the table of what each stage takes."""

from collections.abc import Sequence

from shardwright.observe.report.gathered.compared import Compared, worst_of
from shardwright.observe.report.gathered.data import ReportData
from shardwright.observe.report.html import escape
from shardwright.observe.report.pages.tables import difference, seconds_of, table
from shardwright.plan import Plan, StagePlan
from shardwright.quantities import format_bytes

__all__ = ["blocks_of", "stage_map", "stage_table"]

_MOST_STAGES = 128
_MOST_CHIPS = 24
_SLIGHT = 0.02
"""A difference of this share or less is marked in no row."""


def blocks_of(units: Sequence[str]) -> list[str]:
    """The blocks that units belong to, in order: a block is a module with a number for a name.

    >>> blocks_of(["embed", "layers.0.attention", "layers.0.mlp", "layers.1.attention", "head#1"])
    ['embed', 'layers.0', 'layers.1', 'head']
    """
    found: list[str] = []
    for unit in units:
        parts = unit.partition("#")[0].split(".")
        numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
        name = ".".join(parts[: numbers[0] + 1] if numbers else parts)
        if not found or found[-1] != name:
            found.append(name)
    return found


def stage_map(plan: Plan | None) -> str:
    """One row a stage: its rank, its layers, and what it holds."""
    if plan is None:
        return ""
    work = [stage.forward_s + stage.backward_s for stage in plan.prediction.stages] if plan.prediction else []
    rows = [
        _stage(plan, number, stage, share=work[number] / sum(work) if sum(work) else None)
        for number, stage in enumerate(plan.stages[:_MOST_STAGES])
    ]
    if len(plan.stages) > _MOST_STAGES:
        more = len(plan.stages) - _MOST_STAGES
        rows.append(f'<p class="soft">{more} more stages: shardwright show has all.</p>')
    lines = [
        "<h2>Stages and their layers</h2>",
        '<p class="soft">In the order of the model; the bar is the share of the predicted work.</p>',
    ]
    return "\n".join([*lines, f'<div class="map">{"".join(rows)}</div>'])


def _stage(plan: Plan, number: int, stage: StagePlan, *, share: float | None) -> str:
    blocks = blocks_of(stage.units)
    chips = [f"<i>{escape(block)}</i>" for block in blocks]
    if len(chips) > _MOST_CHIPS:
        half = _MOST_CHIPS // 2
        left_out = len(chips) - 2 * half
        chips = [*chips[:half], f'<span class="soft">{left_out} more</span>', *chips[-half:]]
    facts = [f"{len(stage.units)} unit{'s' * (len(stage.units) != 1)}"]
    if stage.recompute:
        facts.append(f"{len(stage.recompute)} recomputed")
    if stage.offload:
        facts.append(f"{len(stage.offload)} offloaded")
    bar = ""
    if plan.prediction is not None:
        cost = plan.prediction.stages[number]
        facts += [
            f"parameters {format_bytes(cost.parameter_bytes)}",
            f"a microbatch keeps {format_bytes(cost.saved_bytes)}",
        ]
        if cost.send_bytes:
            facts.append(f"sends {format_bytes(cost.send_bytes)}")
    if share is not None:
        facts.insert(0, f"{share * 100:.0f}% of the work")
        bar = f'<div class="share"><div style="width:{share * 100:.1f}%"></div></div>'
    return (
        f'<div class="stage"><div><b>stage {number}</b> on rank {stage.rank}</div>'
        f'<div><div class="chips">{"".join(chips)}</div>{bar}'
        f'<div class="soft">{", ".join(facts)}</div></div></div>'
    )


def stage_table(data: ReportData) -> str:
    """Forward and backward of one microbatch, predicted beside measured, the worst stage marked."""
    plan, measured = data.plan, data.stage_seconds
    if plan is None or plan.prediction is None:
        return ""
    rows, sums = [], []
    for number, cost in enumerate(plan.prediction.stages[:_MOST_STAGES]):
        forward_s, backward_s = measured.get(number, (None, None))
        together = None if forward_s is None or backward_s is None else forward_s + backward_s
        sums.append(Compared("work (s)", cost.forward_s + cost.backward_s, together))
        rows.append(
            [
                f"{number}, rank {plan.stages[number].rank}",
                *map(seconds_of, (cost.forward_s, forward_s, cost.backward_s, backward_s)),
                difference(sums[-1].predicted, together),
            ]
        )
    header = ["stage", "forward, predicted", "forward, measured", "backward, predicted", "backward, measured"]
    header.append("difference")
    if not measured:
        header, rows = ["stage", "forward", "backward"], [[row[0], row[1], row[3]] for row in rows]
    step = "" if data.timeline is None or data.timeline.step is None else f" of step {data.timeline.step}"
    least = _SLIGHT * max(row.predicted or 0.0 for row in sums)
    note = f"; measured are the means{step}." if measured else "."
    return "\n".join(
        [
            "<h2>Time of each stage</h2>",
            f'<p class="soft">For one microbatch, recomputation in the backward{note}</p>',
            table(header, rows, worst=worst_of(sums, least=least)),
        ]
    )
