"""The topology task on the command line, shared by the topology commands.

Each command is a function of an `Asked`; `on_task` gives it the words of a task as options.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.asking.dtype import DTYPE_HELP, full_name
from shardwright.cli.asking.factory_name import check_factory
from shardwright.errors import ConfigError, UsageError
from shardwright.printable import printable

if TYPE_CHECKING:
    from shardwright.catalogue import LayerChain, Transformer
    from shardwright.cli.asking.factory import Sample
    from shardwright.topology import Task

_FINE_STAGES = 64  # units are as fine as so many stages need
_PINS = "pins"

__all__ = ["Asked", "on_task"]

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name (see: catalogue), a config.json of Hugging Face, or a factory: model.py:build.",
    ),
]
Machines = Annotated[
    str,
    typer.Argument(
        metavar="MACHINES",
        help="Such as p4d.24xlarge*4, or p4d.24xlarge*4+p5.48xlarge*2; or the path of a cluster file.",
    ),
]
Batch = Annotated[int, typer.Option("--batch", "-b", help="Samples of a step, over all replicas.")]
Sequence_ = Annotated[int | None, typer.Option("--sequence", "-s", help="Tokens of a sample.")]
Dtype = Annotated[str, typer.Option("--dtype", help=DTYPE_HELP)]
Runtime = Annotated[
    str, typer.Option("--runtime", help="Whose efficiencies count: shardwright, megatron, fsdp, smp, ...")
]
OnlyWhatRuns = Annotated[
    bool, typer.Option("--only-what-runs", help="Leave out what this version's runtime does not have.")
]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="NAME=VALUE",
        help="An option that is given: tensor=8, recompute=full; expert counts ranks of a sequence, too.",
    ),
]
BuildOn = Annotated[
    str,
    typer.Option(
        "--build-on", metavar="DEVICE", help="Where a factory given as MODEL runs; meta takes no memory."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The task in the words of a command.

    Attributes:
        task: the model, the machines, the batch, and what is given.
        sample: the model itself, where a factory builds it.
    """

    task: "Task"
    sample: "Sample | None"


def _words(
    model: Model,
    machines: Machines,
    batch: Batch,
    sequence: Sequence_ = None,
    dtype: Dtype = "bfloat16",
    pin: Pins = None,
    runtime: Runtime = "shardwright",
    only_what_runs: OnlyWhatRuns = False,
    build_on: BuildOn = "meta",
) -> Asked:
    """Reads the words of a task.

    Raises:
        ConfigError, UsageError: one of them cannot be read; with what is known.
    """
    # Here, because they import numpy: --help answers before.
    from shardwright.cluster import find_machines
    from shardwright.topology import Task
    from shardwright.topology.pins import parse_pins

    found = find_machines(machines)
    on_accelerators = not any(kind.cores for kind, _ in found.nodes)
    sample, priced = _model(model, build_on, on_accelerators=on_accelerators)
    task = Task(
        model=priced,
        machines=found,
        batch=batch,
        sequence=sequence,
        dtype=full_name(dtype),
        runtime=runtime,
        only_what_runs=only_what_runs,
        pins=parse_pins(pin or ()),
    )
    return Asked(task=task, sample=sample)


def on_task(*, pins: Any = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the words of a task, and to its function what they ask for.

    Args:
        pins: the annotation of an argument that takes pins, besides the option ``--pin``; one of the two must
            have some.
    """
    words = inspect.signature(_words).parameters
    model, machines, *options = words.values()
    if pins is not None:
        options.insert(0, words["pin"].replace(name=_PINS, annotation=pins))

    def with_words(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command).parameters.values()

        def run(**given: Any) -> None:
            if pins is not None:
                given["pin"] = [*(given.pop(_PINS) or ()), *(given["pin"] or ())]
                if not given["pin"]:
                    raise UsageError("no way is named that you have in mind. Add one: tensor=8 pipeline=4")
            asked = _words(**{name: given.pop(name) for name in words})
            command(asked, **given)

        parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in (model, machines, *options, *own)]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return with_words


def _model(
    text: str, build_on: str, *, on_accelerators: bool
) -> "tuple[Sample | None, Transformer | LayerChain]":
    """The model that a factory builds, and what is priced."""
    if ":" in text:
        return _traced(text, build_on, on_accelerators=on_accelerators)
    return None, _named(text)


def _named(text: str) -> "Transformer | LayerChain":
    from shardwright.catalogue import find_architecture, from_hugging_face
    from shardwright.files import UserFile

    path = Path(text)
    if path.suffix != ".json":
        return find_architecture(text)
    file = UserFile(path, what="", error=ConfigError)
    document = file.read_json(free_text=True)
    if not isinstance(document, dict):
        raise file.refused("is no configuration of a model: it must be an object")
    try:
        return from_hugging_face(document, name=printable(path.parent.name or path.stem))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _traced(factory: str, build_on: str, *, on_accelerators: bool) -> "tuple[Sample, LayerChain]":
    """The model that a factory builds; traced, which needs torch, and on the meta device no weights."""
    check_factory(factory)
    import torch

    from shardwright.cli.asking.factory import advice_on_meta, build
    from shardwright.observe.console import Console
    from shardwright.planner.chain.layers import chain_of
    from shardwright.torch.units.dry_run import graph_of
    from shardwright.torch.units.on_accelerators import OnAccelerators

    console = Console()
    with console.phase(f"building {factory}"):
        sample = build(factory, device=build_on)
    with (
        console.phase("tracing the model") as phase,
        advice_on_meta(build_on),
        OnAccelerators() if on_accelerators else nullcontext(),
    ):
        graph = graph_of(
            sample.model,
            (sample.args, sample.kwargs),
            loss=sample.loss,
            num_stages=_FINE_STAGES,
            device=torch.device("cpu"),
            progress=lambda done, total: phase.update(done, total=total),
        )
    return sample, chain_of(graph, name=factory)
