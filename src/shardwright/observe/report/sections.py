"""The sections of a report below its head, as HTML: maps, tables, what each part takes."""

from collections.abc import Collection, Mapping, Sequence

from shardwright.observe.report.data import ReportData
from shardwright.observe.report.parts import Beside, StepPart, sum_of, worst_of
from shardwright.observe.report.timeline_chart import PART_COLORS, Figure, escape
from shardwright.plan import Plan, StagePlan
from shardwright.quantities import format_bytes, format_seconds


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    worst: int | None = None,
    finer: Collection[int] = (),
    text: Collection[int] = (0,),
) -> str:
    """A table of cells that are HTML."""
    kinds = ["text" if column in text else "figure" for column in range(len(header))]
    head = "".join(f'<th class="{kind}">{cell}</th>' for kind, cell in zip(kinds, header, strict=True))
    body = []
    for number, row in enumerate(rows):
        mark = ' class="worst"' if number == worst else ' class="finer"' if number in finer else ""
        cells = "".join(
            f'<td class="{kind}" data-label="{name}">{cell}</td>'
            for kind, name, cell in zip(kinds, header, row, strict=True)
        )
        body.append(f"<tr{mark}>{cells}</tr>")
    kind = "rows wide" if len(header) > 4 else "rows"
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'


def seconds_of(value: float | None) -> str:
    """Seconds as a cell; a dash where they are not known.

    >>> seconds_of(0.0123), seconds_of(0.0), seconds_of(None)
    ('12.3 ms', '0', '-')
    """
    if value is None:
        return "-"
    return "0" if abs(value) < 5e-9 else format_seconds(value)


def bytes_of(value: float | None) -> str:
    """Bytes as a cell; a dash where they are not known."""
    return "-" if value is None else format_bytes(value)


def difference(predicted: float | None, measured: float | None, *, num_bytes: bool = False) -> str:
    """How much more was measured than predicted, and the share of that; a dash where one is not known.

    A line may break between the two, and nowhere else.

    >>> [difference(0.1, other).replace("\xa0", "_") for other in (0.105, 0.1, None)]
    ['+5.00_ms (+5%)', '0', '-']
    """
    if predicted is None or measured is None:
        return "-"
    found = measured - predicted
    shown = bytes_of(abs(found)) if num_bytes else seconds_of(abs(found))
    if shown in ("0", "0 B"):
        return "0"
    share = f"({found / predicted * 100:+.0f}%)" if predicted > 0 and abs(found) < 10 * predicted else ""
    apart = f"{'+' if found > 0 else '-'}{shown}".replace(" ", "\xa0")
    return f"{apart} {share}".rstrip()


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
        sums.append(Beside(predicted=cost.forward_s + cost.backward_s, measured=together))
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
    step = "" if data.timeline is None else f" of step {data.timeline.step}"
    least = _SLIGHT * max(row.predicted or 0.0 for row in sums)
    note = f"; measured are the means{step}." if measured else "."
    return "\n".join(
        [
            "<h2>Time of each stage</h2>",
            f'<p class="soft">For one microbatch, recomputation in the backward{note}</p>',
            table(header, rows, worst=worst_of(sums, least=least)),
        ]
    )


"""A difference of this share or less is marked in no row."""

_ZOOM = '<span class="mouse">Drag across the plot to zoom in, click twice to zoom out.</span>'


def plot(plots: Mapping[str, Figure], name: str, *, label: str) -> str:
    """The place of a plot; empty where there is none of that name."""
    figure = plots.get(name)
    if figure is None:
        return ""
    return (
        f'<div class="plot" id="plot-{name}" role="img" aria-label="{escape(label)}" '
        f'style="height:{figure["height"]}px"></div>'
    )


def timeline(data: ReportData, plots: Mapping[str, Figure]) -> str:
    """Predicted above measured, and a choice of the recorded steps."""
    drawn = plot(plots, "timeline", label="Timeline of the pipeline, predicted above measured")
    if not drawn:
        return ""
    lines = ["<h2>Timeline of a step</h2>"]
    if len(data.ranks) < data.num_ranks:
        lines.append(
            f'<p class="soft">{len(data.ranks)} of {data.num_ranks} pipeline ranks are shown, among them '
            "those with most work and most memory.</p>"
        )
    if data.plan is not None and (share := data.plan.mesh.grid.share) > 1:
        lines.append(f'<p class="soft">Each of these ranks stands for the {share} that share its layers.</p>')
    if len(data.recorded) > 1 and data.timeline is not None:
        buttons = "".join(
            f'<button type="button" data-plot="timeline{"" if each == data.timeline else f"@{each.step}"}" '
            f'aria-pressed="{"true" if each == data.timeline else "false"}">'
            f"step {each.step}, {seconds_of(each.seconds)}</button>"
            for each in data.recorded
        )
        lines.append(f'<div class="choice" role="group" aria-label="Recorded step">{buttons}</div>')
    lines.append(drawn)
    hint = _ZOOM
    if data.trace_file is not None:
        name = escape(data.trace_file)
        hint += f' <a href="{name}">{name}</a> has all of it: open it at ui.perfetto.dev.'
    return "\n".join([*lines, f'<p class="soft hint">{hint}</p>'])


def parts(data: ReportData, plots: Mapping[str, Figure]) -> str:
    if not data.parts:
        return ""
    told = _measured_in(data)
    if data.predicted is not None and data.predicted.update_s:
        told += f"The optimizer's update comes on top: {format_seconds(data.predicted.update_s)} predicted."
    return "\n".join(
        [
            "<h2>Where the step goes</h2>",
            f'<p class="soft">{told}</p>' if told else "",
            plot(plots, "waterfall", label="Parts of the step, predicted beside measured"),
            parts_table(data.parts),
            _spread(data),
        ]
    )


def _measured_in(data: ReportData) -> str:
    """Which step the parts are of, and how it compares with the others."""
    timeline = data.timeline
    if timeline is None:
        return ""
    usual_s = data.compared[0].measured
    told = f"Measured are the parts of step {timeline.step}"
    if usual_s is None:
        return f"{told}. "
    return f"{told}, which took {format_seconds(timeline.seconds)}; the median is {format_seconds(usual_s)}. "


def parts_table(rows: Sequence[StepPart]) -> str:
    """The parts with their sum, the one furthest above its prediction marked."""
    cells: list[list[str]] = []
    finer: list[int] = []
    marked: dict[int, int] = {}
    for number, part in enumerate(rows):
        marked[number] = len(cells)
        color = f'<span class="kind" style="background:{PART_COLORS[part.kind]}"></span>'
        named_value = f'data-part="{part.kind}" data-value="{part.predicted!r}"'
        predicted = f"<span {named_value}>{seconds_of(part.predicted)}</span>"
        named = f'{color}{part.kind}<div class="soft">{escape(part.meaning)}</div>'
        cells.append([named, predicted, seconds_of(part.measured), difference(part.predicted, part.measured)])
        for each in part.finer:
            finer.append(len(cells))
            title = f'<span title="{escape(each.meaning)}">{escape(each.name)}</span>'
            cells.append([title, seconds_of(each.seconds), "", ""])
    sums = [sum_of([part.predicted for part in rows]), sum_of([part.measured for part in rows])]
    cells.append(["<b>step</b>", *map(seconds_of, sums), difference(*sums)])
    worst = worst_of(rows, least=_SLIGHT * (sums[0] or 0.0))
    header = ["part", "predicted", "measured", "difference"]
    if all(part.measured is None for part in rows):
        header, cells = header[:2], [row[:2] for row in cells]
    return table(header, cells, worst=None if worst is None else marked[worst], finer=finer)


def _spread(data: ReportData) -> str:
    """The finer parts of a prediction that lie in several rows."""
    if data.predicted is None:
        return ""
    listed = {each.name for part in data.parts for each in part.finer} | {part.kind for part in data.parts}
    rest = [
        f"{escape(part.name)} {seconds_of(part.seconds)}"
        for part in data.predicted.waterfall.parts
        if part.name not in listed
    ]
    return f'<p class="soft">Predicted in several of these rows: {", ".join(rest)}.</p>' if rest else ""


def memory(data: ReportData, plots: Mapping[str, Figure]) -> str:
    """Predicted beside measured, of the same things."""
    over_step = plot(plots, "memory", label="Memory of each rank over a step")
    stack = plot(plots, "stack", label="Memory of each rank at its peak")
    if not over_step and not stack:
        return ""
    limit_bytes = data.predicted.limit_bytes if data.predicted is not None else 0
    limit = format_bytes(limit_bytes) if limit_bytes else "not known"
    shown = f'<b data-figure="limit" data-value="{limit_bytes!r}">{limit}</b>'
    lines = ["<h2>Memory</h2>", f"<p>Limit of a rank: {shown}.</p>"]
    if data.memory:
        shown_rows = [row for row in data.memory if row.rank in data.ranks]
        lines += [
            '<p class="soft">Parameters, gradients, optimizer state, activations, at the end of the action '
            "where they are most. What else the process has in use (the interpreter, libraries, data) is "
            "measured after a step, and taken off.</p>",
            table(
                ["rank", "predicted", "measured", "difference"],
                [
                    [
                        str(row.rank),
                        bytes_of(row.predicted),
                        bytes_of(row.measured),
                        difference(row.predicted, row.measured, num_bytes=True),
                    ]
                    for row in shown_rows
                ],
                worst=worst_of(shown_rows, least=_SLIGHT * max(row.predicted or 0.0 for row in shown_rows)),
            ),
        ]
    if over_step:
        whole = (
            " Measured is all that the process has in use, Python and its libraries too."
            if data.timeline is not None and not data.memory
            else ""
        )
        lines += [
            f'<p class="soft">Over a step, without the temporaries of operations.{whole}</p>',
            over_step,
        ]
    if stack:
        told = " Measured is without batch and temporaries (work)." if data.memory else ""
        lines += [f'<p class="soft">At the peak of each rank, part by part.{told}</p>', stack]
    if data.measures_processes and data.peak_by_rank:
        most = max(data.peak_by_rank)
        lines.append(
            f'<p class="soft">The largest process had {format_bytes(most)} at its peak, interpreter and '
            "libraries included.</p>"
        )
    return "\n".join(lines)


def alternatives(plan: Plan | None) -> str:
    if plan is None or not plan.alternatives:
        return ""
    rows = [
        [
            escape(a.schedule),
            str(a.microbatches),
            str(a.stages),
            format_seconds(a.step_s),
            format_bytes(a.peak_bytes),
            escape(a.verdict),
        ]
        for a in plan.alternatives
    ]
    header = ["schedule", "microbatches", "stages", "step", "peak memory", "verdict"]
    return "<h2>Runners-up</h2>\n" + table(header, rows, text=(0, 5))


def reasons(plan: Plan | None) -> str:
    if plan is None or not plan.why:
        return ""
    return "<h2>Why this plan</h2>\n<ul>" + "".join(f"<li>{escape(why)}</li>" for why in plan.why) + "</ul>"


def metrics(data: ReportData, plots: Mapping[str, Figure]) -> str:
    loss = plot(plots, "loss", label="Loss over the steps")
    steps = plot(plots, "steps", label="Seconds of each step")
    first_s = data.steps[0].seconds if len(data.steps) > 1 else 0.0
    note = ""
    if first_s:
        note = (
            f'<p class="soft">Without the first step, {format_seconds(first_s)}, which traces and plans.</p>'
        )
    return f"<h2>Over the run</h2>\n{loss}\n{note}\n{steps}" if loss or steps else ""
