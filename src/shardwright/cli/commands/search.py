"""``shardwright search``: finds the best way to train a model on machines that need not exist."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.asking.application import AsJson, print_json, say, show_text
from shardwright.cli.asking.plan_output import Output, check_output, write_plan
from shardwright.cli.asking.topology_task import Asked, on_task
from shardwright.errors import ConfigError, InfeasiblePlanError, UsageError
from shardwright.quantities import format_parameters, format_seconds
from shardwright.text_table import align

if TYPE_CHECKING:
    from shardwright.cli.asking.factory import Sample
    from shardwright.plan import Plan
    from shardwright.topology import Answer, Task, Way

__all__ = ["search"]

ObjectiveOption = Annotated[
    str, typer.Option("--objective", help="What counts: speed, memory, or the largest batch.")
]
_OBJECTIVES = ("speed", "memory", "batch")


@on_task()
def search(
    asked: Asked,
    objective: ObjectiveOption = "speed",
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Find the best way to train a model on machines that need not be there, and say why.

    All degrees of parallelism, microbatches, schedules, recomputation and offload are priced. For example:

    shardwright search gpt-neox-20b "p4d.24xlarge*4" --batch 512

    shardwright search model.py:build "p4d.24xlarge*4" --batch 512 --only-what-runs -o plan.json
    """
    if objective not in _OBJECTIVES:
        raise UsageError(f"--objective is {objective!r}, but it must be one of {', '.join(_OBJECTIVES)}.")
    task, sample = asked.task, asked.sample
    if output is not None:
        if sample is None:
            raise UsageError(
                f"--output is {output}, but a plan names the units of a module, and {task.model.name} is "
                "none. Give the model as a factory: shardwright search model.py:build ..."
            )
        check_output(output)
    answer, ideal = _answers(task, objective)
    plan = None
    if output is not None and sample is not None:
        plan = plan_of(answer, sample)
        write_plan(plan, output)
    if as_json:
        ways = [way.to_dict() for way in answer.alternatives]
        print_json(
            {"best": answer.best.to_dict(), "alternatives": ways, "ways": answer.num_ways}
            | {"fitting": answer.num_fitting, "ideal": None if ideal is None else ideal.to_dict()}
        )
    else:
        show_text(_text(answer, ideal))
    if plan is not None:
        from shardwright.observe.plan_text import title_of

        ranks = plan.mesh.world_size
        say(f"{title_of(plan)} (degrees from the ways above, the schedule from a simulation)")
        say(f"wrote {output}; run it: shardwright run -n {ranks} --plan {output} train.py")


def _answers(task: "Task", objective: str) -> "tuple[Answer, Way | None]":
    """The answer with what this version runs, and the best way of all where that is another.

    Where nothing fits that runs, the best of all is the answer.
    """
    from shardwright.topology import largest_batch
    from shardwright.topology import search as search_all

    def found(task: "Task") -> "Answer":
        if objective == "batch":
            return largest_batch(task)
        return search_all(task, objective=objective)  # type: ignore[arg-type]

    of_all = found(task)
    if not of_all.best.not_run_yet:
        return of_all, None
    try:
        return found(replace(task, only_what_runs=True)), of_all.best
    except (InfeasiblePlanError, ConfigError):
        return of_all, None


def plan_of(answer: "Answer", sample: "Sample") -> "Plan":
    """The best plan of the ways that a search has found for a model that is at hand.

    Raises:
        PlanError: this version runs none of them, or none can be planned.
    """
    from shardwright.cli.asking.factory import advice_on_meta
    from shardwright.config import Config
    from shardwright.costs.run_cluster import cluster_of
    from shardwright.observe.console import Console
    from shardwright.topology.plans import best_plan
    from shardwright.torch.units.dry_run import plan_model, with_samples

    task = answer.task
    cluster = cluster_of(task.machines, dtype=task.dtype)

    def make(samples: int, settings: Mapping[str, Any]) -> "Plan":
        args, kwargs = with_samples((sample.args, sample.kwargs), samples)
        return plan_model(
            sample.model,
            *args,
            config=Config.parse(settings),
            world_size=task.machines.num_ranks,
            cluster=cluster,
            loss=sample.loss,
            **kwargs,
        )

    with Console().phase("planning what runs") as phase, advice_on_meta("meta"):
        return best_plan(answer, make, progress=lambda done, total: phase.update(done, total=total))


_LEGEND = "m: microbatches of a step; mbs: samples of each; apart: how much slower than the first"


def _text(answer: "Answer", ideal: "Way | None") -> str:
    from shardwright.cli.showing.ways_table import ways_table
    from shardwright.topology.explain import ideal_text, not_run_text, reasons

    task, best = answer.task, answer.best
    size = f"{format_parameters(task.model.num_parameters)} parameters"
    of = f" of {task.tokens_of_sample} tokens" if task.unit == "tokens" else ""
    head = (
        f"{task.model.name}, {size}, on {task.machines.name} ({task.machines.num_ranks} ranks), "
        f"{task.batch} samples{of} a step"
    )
    rate = f"{best.tokens_per_s:,.0f} {task.unit}/s, MFU {best.mfu:.0%}"
    if best.dollars_per_million_tokens is not None:
        rate += f", {best.dollars_per_million_tokens:.3g} dollars a million {task.unit}"
    steps = [[name, format_seconds(s), f"{s / best.step_s:.0%}"] for name, s in best.waterfall]
    others = [] if ideal is None else [ideal]
    settings = ", ".join(f"{key}: {value}" for key, value in best.settings.items())
    parts = [
        head,
        f"{best.title}\n{format_seconds(best.step_s)} a step, {rate}",
        align(steps),
        "\n".join(reasons(answer)),
        ways_table(task, [best, *answer.alternatives, *others]),
        _LEGEND,
    ]
    if ideal is not None:
        parts.append(ideal_text(best, ideal))
    elif starred := [way for way in (best, *answer.alternatives) if way.not_run_yet]:
        parts.append(not_run_text(starred))
    if not best.not_run_yet:
        parts.append(f"settings: {{{settings}}}")
    return "\n\n".join(parts)
