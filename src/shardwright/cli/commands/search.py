"""``shardwright search``: the best way to train a model on machines, and how many of them to take."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.asking.application import AsJson, BuildOn, print_json, say, show_text
from shardwright.cli.asking.model import (
    DTYPE_HELP,
    DTYPES,
    Machines,
    Output,
    check_output,
    full_name,
    model_of,
    write_plan,
)
from shardwright.errors import UsageError
from shardwright.quantities import format_bytes, format_parameters, format_seconds
from shardwright.text import align

if TYPE_CHECKING:
    from shardwright.cli.asking.factory import Sample
    from shardwright.plan import Plan
    from shardwright.planner.ways import Answer, Task, Way


_OBJECTIVES = ("speed", "memory", "batch")
_DAY_S, _MOST_DAYS = 86400.0, 1e6
_FELT = 0.99  # a way that is better by less is not worth a word
_LEGEND = "m: microbatches of a step; mbs: samples of each; apart: how much slower than the first"


def search(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name (see: catalogue), a config.json of Hugging Face, or a factory: model.py:build.",
        ),
    ],
    machines: Machines,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Samples of a step, over all replicas.")],
    sequence: Annotated[int | None, typer.Option("--sequence", "-s", help="Tokens of a sample.")] = None,
    dtype: Annotated[
        str,
        typer.Option("--dtype", help=f"{DTYPE_HELP[:-1]}; float8 (fp8): bfloat16 with products in 8 bits."),
    ] = "bfloat16",
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            help="adamw, adamw-bf16, adamw-8bit, sgd, or the bytes that it keeps of a parameter.",
        ),
    ] = "adamw",
    trained: Annotated[
        float, typer.Option("--trained", help="Share of the parameters that is trained: 0.01 with adapters.")
    ] = 1.0,
    frozen_bytes: Annotated[
        float | None, typer.Option("--frozen-bytes", help="Of a frozen parameter: 0.5 in 4 bits; as --dtype.")
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            "--pin",
            metavar="NAME=VALUE",
            help="An option that is given: tensor=8, recompute=full; expert counts ranks of a sequence, too.",
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option("--objective", help="What counts: speed, memory, or the largest batch.")
    ] = "speed",
    why_not: Annotated[
        list[str] | None,
        typer.Option("--why-not", metavar="NAME=VALUE", help="Compare the best with the best that has this."),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option("--tokens", help="Of a whole training, such as 300e9: how many of MACHINES to take."),
    ] = None,
    days: Annotated[float | None, typer.Option("--days", help="In which that must end.")] = None,
    runtime: Annotated[
        str, typer.Option("--runtime", help="Whose efficiencies count: shardwright, megatron, fsdp, smp, ...")
    ] = "shardwright",
    only_what_runs: Annotated[
        bool,
        typer.Option(
            "--only-what-runs/--all-ways",
            help="Leave out, or not, what this version does not run and degrees that nobody would operate.",
        ),
    ] = True,
    output: Output = None,
    build_on: BuildOn = "meta",
    as_json: AsJson = False,
) -> None:
    """Find the best way to train a model on machines that need not be there, and say why.

    All degrees of parallelism, microbatches, schedules, recomputation and offload are priced. For example:

    shardwright search gpt-neox-20b "p4d.24xlarge*4" --batch 512

    shardwright search model.py:build "p4d.24xlarge*4" --batch 512 -o plan.json
    """
    with_plan = [
        name for name, value in (("--objective", objective != "speed"), ("--output", output)) if value
    ]
    asked = [name for name, value in (("--why-not", why_not), ("--tokens", tokens is not None)) if value]
    if len(asked) > 1 or (asked and with_plan):
        raise UsageError(
            f"{' and '.join([*asked, *with_plan])} are questions of their own. Ask one at a time."
        )
    if objective not in _OBJECTIVES:
        raise UsageError(f"--objective is {objective!r}, but it must be one of {', '.join(_OBJECTIVES)}.")
    if days is not None and tokens is None:
        raise UsageError(f"--days is {days:g}, but --tokens, of the whole training, is not given. Add it.")
    if days is not None and not 0 < days <= _MOST_DAYS:
        raise UsageError(f"--days is {days:g}, but it must be more than 0, and at most {_MOST_DAYS:g}.")
    # Here, because they import numpy: --help answers before.
    from shardwright.cluster import find_machines
    from shardwright.planner.ways import Task
    from shardwright.planner.ways.space import parse_pins

    found = find_machines(machines)
    sample, priced = model_of(model, build_on, on_accelerators=not any(kind.cores for kind, _ in found.nodes))
    # No ranks share a layer whose weights are quantized.
    alone = {} if frozen_bytes is None or frozen_bytes > 1 else {"tensor": 1, "context": 1, "expert": 1}
    task = Task(
        model=priced,
        machines=found,
        batch=batch,
        sequence=sequence,
        dtype=full_name(dtype),
        optimizer=optimizer,
        trained=trained,
        frozen_bytes=frozen_bytes,
        runtime=runtime,
        only_what_runs=only_what_runs,
        operable=only_what_runs,
        pins={**alone, **parse_pins(pin or ())},
    )
    if why_not:
        _tell_why_not(task, parse_pins(why_not), as_json=as_json)
    elif tokens is not None:
        _tell_how_many(task, tokens, days, as_json=as_json)
    else:
        _tell_best(task, sample, objective, output, as_json=as_json)


def _tell_why_not(task: "Task", pins: dict[str, int], *, as_json: bool) -> None:
    from shardwright.planner.ways.answers import why_not

    found = why_not(task, pins)
    if as_json:
        ways = {"best": found.best.to_dict(), "wanted": found.wanted.to_dict(), "fits": found.fits}
        print_json(ways | {"sentences": found.sentences})
    else:
        show_text("\n".join(found.sentences))


def _tell_best(task: "Task", sample: "Sample | None", objective: str, output: Any, *, as_json: bool) -> None:
    if output is not None:
        if sample is None:
            raise UsageError(
                f"--output is {output}, but a plan names the units of a module, and {task.model.name} is "
                "none. Give the model as a factory: shardwright search model.py:build ..."
            )
        check_output(output)
    answer, ideal = _answers(task, objective)
    plan = None
    if sample is not None and (output is not None or (objective == "speed" and _is_of_a_run(task))):
        try:
            if objective == "speed":
                answer, plan = _planned(answer, sample)
            else:
                _, plan = _planned(replace(answer, alternatives=()), sample)
        except Exception as error:  # the ways stand without a plan, whatever the model does in a trace
            if output is not None:
                raise
            say(f"no plan can be made of these ways: {type(error).__name__}: {error}")
    if plan is not None and output is not None:
        write_plan(plan, output)
    if as_json:
        ways = [way.to_dict() for way in answer.alternatives]
        print_json(
            {"best": answer.best.to_dict(), "alternatives": ways, "ways": answer.num_ways}
            | {"priced": answer.num_priced, "ideal": None if ideal is None else ideal.to_dict()}
            | {"plan": None if plan is None else plan.model_dump(mode="json")}
        )
    else:
        show_text(_text(task, answer, ideal, objective, plan))
    if plan is not None and output is not None:
        say(
            f"wrote {output}; run it: shardwright run -n {plan.mesh.grid.world_size} --plan {output} train.py"
        )


def _is_of_a_run(task: "Task") -> bool:
    """Whether a plan of the model as it is says the same of a step as the ways that are asked for."""
    as_it_is = task.runtime == "shardwright" and task.dtype in DTYPES
    return as_it_is and task.optimizer != "sgd" and task.trained == 1 and task.frozen_bytes is None


def _answers(task: "Task", objective: str) -> "tuple[Answer, Way | None]":
    """The answer with what one would operate today, and the best way of all where that is better."""
    from shardwright.observe.console import Console
    from shardwright.planner.ways import largest_batch
    from shardwright.planner.ways import search as search_all
    from shardwright.planner.ways.search import widened

    def found(task: "Task") -> "Answer":
        if objective == "batch":
            return largest_batch(task)
        return search_all(task, objective=objective)  # type: ignore[arg-type]

    with Console().phase("pricing ways"):
        answer = widened(task, found)
        if not answer.task.only_what_runs or objective == "batch":
            return answer, None
        ideal = found(replace(task, only_what_runs=False, operable=False)).best
    best = answer.best
    gains = {
        "speed": ideal.step_s / best.step_s,
        "memory": ideal.peak_bytes / best.peak_bytes,
    }
    return answer, ideal if gains[objective] < _FELT else None


def _planned(answer: "Answer", sample: "Sample") -> "tuple[Answer, Plan]":
    """The plans of the best ways for a model that is at hand: the best of them, as a run makes it."""
    from shardwright.cli.asking.factory import advice_on_meta
    from shardwright.config import Config
    from shardwright.costs.run_cluster import cluster_of
    from shardwright.observe.console import Console
    from shardwright.planner.ways.answers import best_plan
    from shardwright.torch.units.dry_run import with_samples
    from shardwright.torch.units.offline_planner import plan_model

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


def _text(
    asked: "Task", answer: "Answer", ideal: "Way | None", objective: str, plan: "Plan | None" = None
) -> str:
    from shardwright.costs import FLOAT8
    from shardwright.observe.plan_text import title_of
    from shardwright.planner.ways.answers import ideal_text, not_run_text, reasons, seconds_of

    task, best = answer.task, answer.best
    size = f"{format_parameters(task.model.num_parameters)} parameters"
    usual = ", the model's usual length," if task.sequence is None else ""
    of = f" of {task.tokens_of_sample} tokens{usual}" if task.unit == "tokens" else ""
    head = (
        f"{task.model.name}, {size}, on {task.machines.name} ({task.machines.num_ranks} ranks), "
        f"{task.batch} samples{of} a step"
    )
    plan = plan if objective == "speed" else None
    step_s = best.step_s if plan is None else seconds_of(plan)
    faster = best.step_s / step_s
    rate = f"{best.tokens_per_s * faster:,.0f} {task.unit}/s, MFU {best.mfu * faster:.0%}"
    if best.dollars_per_million_tokens is not None:
        rate += f", {best.dollars_per_million_tokens / faster:.3g} dollars a million {task.unit}"
    steps = [[name, format_seconds(s), f"{s / best.step_s:.0%}"] for name, s in best.waterfall]
    others = [] if ideal is None else [ideal]
    settings = ", ".join(f"{key}: {value}" for key, value in best.settings.items())
    parts = [
        "\n".join(
            [
                best.title,
                f"{format_seconds(step_s)} a step, {rate}",
                *([] if plan is None else [title_of(plan)]),
                head,
            ]
        ),
        align(steps),
        "\n".join(reasons(answer)),
        _ways_table(task, [best, *answer.alternatives, *others], ideal),
        _LEGEND if plan is None else f"{_LEGEND}; steps by closed forms, the first one's plan by simulation",
    ]
    if ideal is not None:
        parts.append(ideal_text(best, ideal, objective=objective))
    elif starred := [way for way in (best, *answer.alternatives) if way.not_run_yet]:
        parts.append(not_run_text(starred))
    if not best.not_run_yet:
        parts.append(f"settings: {{{settings}}}")
    if asked.only_what_runs and not task.only_what_runs:
        parts.append("Nothing that this version runs fits: these are all ways.")
    elif asked.operable and not task.operable:
        parts.append("No way fits whose degrees are powers of two, with two replicas over several nodes.")
    if task.dtype == FLOAT8:
        parts.append(
            "Products in 8 bits: torchao's convert_to_float8_training(model), before DistributedModel."
        )
    return "\n\n".join(parts)


def _tell_how_many(task: "Task", tokens: float, days: float | None, *, as_json: bool) -> None:
    from shardwright.observe.console import Console
    from shardwright.planner.ways.answers import cheapest, check_offers, offers

    check_offers(task, tokens)
    deadline_s = None if days is None else days * _DAY_S
    with Console().phase("searching on each number of nodes") as phase:
        found = offers(
            task,
            tokens=tokens,
            deadline_s=deadline_s,
            progress=lambda done, total: phase.update(done, total=total),
        )
    best = cheapest(found, deadline_s=deadline_s)
    if as_json:
        rows = [
            {
                "nodes": offer.num_nodes,
                "ranks": offer.num_ranks,
                "days": offer.seconds / _DAY_S,
                "dollars": offer.dollars,
                "way": offer.way.to_dict(),
            }
            for offer in found
        ]
        print_json({"nodes": best.num_nodes, "offers": rows})
        return
    table = [["", "nodes", "ranks", "days", "dollars", "way"]]
    for offer in found:
        dollars = "" if offer.dollars is None else f"{offer.dollars:,.0f}"
        mark = "->" if offer is best else ""
        row = [mark, str(offer.num_nodes), str(offer.num_ranks), f"{offer.seconds / _DAY_S:.2f}", dollars]
        table.append([*row, offer.way.title])
    show_text(align(table))


if TYPE_CHECKING:
    from shardwright.planner.ways import Task, Way


_USUAL = frozenset({"1", "0", "none"})
_LEFT_OUT_FIRST = ("TFLOP/s/GPU", "tok/s/GPU", "samples/s/GPU", "schedule", "recompute", "offload")
_GAP = 2


def _ways_table(task: "Task", ways: Sequence["Way"], ideal: "Way | None") -> str:
    """A row for each way.

    Degrees are those of a rank's groups: tensor (TP), pipeline (PP), stages of a rank (VP), context (CP),
    experts (EP), replicas (DP). ``mbs`` is a microbatch's samples, ``m`` the number of microbatches. A star
    marks what this version does not run.
    """
    width = shutil.get_terminal_size().columns
    columns = [
        [title, *(cell(way) for way in ways)] for title, cell in _columns(task, ways[0], ideal).items()
    ]
    usual = [column for column in columns if set(column[1:]) <= _USUAL]
    known = {column[0]: column for column in columns}
    for column in [*usual, *(known[name] for name in _LEFT_OUT_FIRST if name in known)]:
        if _width(columns) <= width:
            break
        columns = [each for each in columns if each is not column]
    return align(list(zip(*columns, strict=True)))


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) for column in columns) + _GAP * (len(columns) - 1)


def _columns(task: "Task", best: "Way", ideal: "Way | None") -> dict[str, Callable[["Way"], str]]:
    from shardwright.costs import Offload, Recompute

    def recomputed(way: "Way") -> str:
        """What is recomputed; of full recomputation, the layers of a rank that are exempt."""
        kept = int(way.options.kept_layers)
        return f"all but {kept}" if kept else Recompute(int(way.options.recompute)).name.lower()

    def degree(name: str) -> Callable[["Way"], str]:
        return lambda way: str(int(getattr(way.options, name)))

    ranks, unit = task.machines.num_ranks, "tok" if task.unit == "tokens" else task.unit
    each = "core" if any(kind.cores for kind, _ in task.machines.nodes) else "GPU"
    return {
        "": lambda way: "*" if way.not_run_yet or way is ideal else "",
        "TP": degree("tensor"),
        "PP": degree("pipeline"),
        "VP": degree("virtual"),
        "CP": degree("context"),
        "EP": degree("expert"),
        "DP": degree("data"),
        "ZeRO": _zero,
        "mbs": degree("microbatch"),
        "m": degree("microbatches"),
        "schedule": lambda way: way.schedule if way.options.pipeline > 1 else "none",
        "recompute": recomputed,
        "offload": lambda way: Offload(int(way.options.offload)).name.lower().replace("nothing", "none"),
        "memory": lambda way: format_bytes(way.peak_bytes),
        "step": lambda way: format_seconds(way.step_s),
        "apart": lambda way: "" if way is best else f"{way.step_s / best.step_s - 1:+.1%}",
        f"{unit}/s/{each}": lambda way: f"{way.tokens_per_s / ranks:,.0f}",
        f"TFLOP/s/{each}": lambda way: f"{way.flops_per_s / 1e12:.3g}",
        "MFU": lambda way: f"{way.mfu:.0%}",
    }


def _zero(way: "Way") -> str:
    """The stage of ZeRO, with its group where that is not all replicas."""
    stage, shard = int(way.options.sharded), int(way.options.shard)
    return f"{stage} over {shard}" if stage and shard != way.options.data else str(stage)
