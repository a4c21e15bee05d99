"""``shardwright search``: finds the best way to train a model on machines that need not exist."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.asking.application import AsJson, print_json, say, show_text
from shardwright.cli.asking.plan_output import Output, check_output, write_plan
from shardwright.cli.asking.topology_task import Asked, on_task
from shardwright.errors import UsageError

if TYPE_CHECKING:
    from shardwright.cli.asking.factory import Sample
    from shardwright.plan import Plan
    from shardwright.topology import Answer

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
    from shardwright.topology import largest_batch
    from shardwright.topology import search as search_all

    if objective == "batch":
        answer = largest_batch(task)
    else:
        answer = search_all(task, objective=objective)  # type: ignore[arg-type]
    plan = None
    if output is not None and sample is not None:
        plan = plan_of(answer, sample)
        write_plan(plan, output)
    if as_json:
        ways = [way.to_dict() for way in answer.alternatives]
        print_json(
            {"best": answer.best.to_dict(), "alternatives": ways, "ways": answer.num_ways}
            | {"fitting": answer.num_fitting}
        )
    else:
        show_text(_text(answer))
    if plan is not None:
        ranks = plan.mesh.world_size
        say(f"wrote {output}; run it: shardwright run -n {ranks} --plan {output} train.py")


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

    with Console().phase("planning what runs"), advice_on_meta("meta"):
        return best_plan(answer, make)


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
