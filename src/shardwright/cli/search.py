"""``shardwright search``: the best way to train a model on machines that need not be there."""

from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli.application import AsJson, print_json, show_text
from shardwright.cli.topology_task import (
    Batch,
    BuildOn,
    Dtype,
    Machines,
    Model,
    OnlyWhatRuns,
    Pins,
    Runtime,
    Sequence_,
    task_of,
)
from shardwright.errors import UsageError

if TYPE_CHECKING:
    from shardwright.topology import Answer

__all__ = ["search"]

ObjectiveOption = Annotated[
    str, typer.Option("--objective", help="What counts: speed, memory, or the largest batch.")
]
_OBJECTIVES = ("speed", "memory", "batch")


def search(
    model: Model,
    machines: Machines,
    batch: Batch,
    sequence: Sequence_ = None,
    dtype: Dtype = "bfloat16",
    pin: Pins = None,
    objective: ObjectiveOption = "speed",
    runtime: Runtime = "shardwright",
    only_what_runs: OnlyWhatRuns = False,
    build_on: BuildOn = "meta",
    as_json: AsJson = False,
) -> None:
    """Find the best way to train a model on machines that need not be there, and say why.

    All degrees of parallelism, microbatches, schedules, recomputation and offload are priced. For example:

    shardwright search gpt-neox-20b "p4d.24xlarge*4" --batch 512
    """
    if objective not in _OBJECTIVES:
        raise UsageError(f"--objective is {objective!r}, but it must be one of {', '.join(_OBJECTIVES)}.")
    task = task_of(
        model,
        machines,
        batch=batch,
        sequence=sequence,
        dtype=dtype,
        runtime=runtime,
        only_what_runs=only_what_runs,
        pins=pin or (),
        build_on=build_on,
    )
    from shardwright.topology import largest_batch
    from shardwright.topology import search as search_all

    if objective == "batch":
        answer = largest_batch(task)
    else:
        answer = search_all(task, objective=objective)  # type: ignore[arg-type]
    if as_json:
        ways = [way.to_dict() for way in answer.alternatives]
        print_json(
            {"best": answer.best.to_dict(), "alternatives": ways, "ways": answer.num_ways}
            | {"fitting": answer.num_fitting}
        )
    else:
        show_text(_text(answer))


def _text(answer: "Answer") -> str:
    from shardwright.plan import align
    from shardwright.topology.explain import reasons
    from shardwright.units import format_bytes, format_count, format_seconds

    task, best = answer.task, answer.best
    size = f"{format_count(task.model.num_parameters)} parameters"
    of = f" of {task.tokens_of_sample} tokens" if task.unit == "tokens" else ""
    head = (
        f"{task.model.name}, {size}, on {task.machines.name} ({task.machines.num_ranks} ranks), "
        f"{task.batch} samples{of} a step"
    )
    rate = f"{best.tokens_per_s:,.0f} {task.unit}/s"
    if best.dollars_per_million_tokens is not None:
        rate += f", {best.dollars_per_million_tokens:.3g} dollars a million {task.unit}"
    steps = [[name, format_seconds(s), f"{s / best.step_s:.0%}"] for name, s in best.waterfall]
    rows = [["way", "step", "", "memory"]]
    for way in (best, *answer.alternatives):
        apart = f"{way.step_s / best.step_s - 1:+.1%}" if way is not best else ""
        rows.append([way.title, format_seconds(way.step_s), apart, format_bytes(way.peak_bytes)])
    settings = ", ".join(f"{key}: {value}" for key, value in best.settings.items())
    parts = [
        head,
        f"{best.title}\n{format_seconds(best.step_s)} a step, {rate}",
        align(steps),
        "\n".join(reasons(answer)),
        align(rows),
    ]
    if not best.not_run_yet:
        parts.append(f"settings: {{{settings}}}")
    return "\n\n".join(parts)
