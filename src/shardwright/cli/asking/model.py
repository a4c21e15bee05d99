"""The model, the machines and the plan file of a command: options, and what they name."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.errors import ConfigError, UsageError
from shardwright.text import printable

if TYPE_CHECKING:
    from shardwright.catalogue import LayerChain, Transformer
    from shardwright.cli.asking.factory import Sample
    from shardwright.plan import Plan

_FINE_STAGES = 64  # units are as fine as so many stages need

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""For each type, how settings and exports call it."""

DTYPE_HELP = "Of the model: bfloat16 (bf16), float16 (fp16), both with updates in float32, or float32 (fp32)."

Machines = Annotated[
    str,
    typer.Argument(
        metavar="MACHINES",
        help="Such as p4d.24xlarge*4, or the path of a cluster file.",
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan file, for run --plan.")
]


def full_name(dtype: str) -> str:
    """PyTorch's name of a type; a text that is no such name stays.

    >>> full_name("bf16"), full_name("float32"), full_name("int3")
    ('bfloat16', 'float32', 'int3')
    """
    return next((full for full, short in (DTYPES | {"float8": "fp8"}).items() if short == dtype), dtype)


def split_factory(factory: str) -> tuple[str, str]:
    """The file or module, and the function.

    >>> split_factory("model.py:build")
    ('model.py', 'build')
    """
    where, colon, name = factory.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(
            f"{factory} names no function. Write model.py:build or package.model:build; build() returns the "
            "model and a batch."
        )
    return where, name


def check_factory(factory: str) -> str:
    """Refuses what names no function, or a file that is not there; returns the name."""
    where, _ = split_factory(factory)
    if where.endswith(".py") and not Path(where).is_file():
        raise UsageError(
            f"there is no file {where}. Give its path from {Path.cwd()}, for example model.py:build."
        )
    return factory


def check_output(output: Path) -> None:
    """Refuses a place that cannot be written, before minutes of work; folders are made later."""
    from shardwright.files import check_place  # it imports pydantic: --help answers before

    if not output.absolute().parent.is_dir():
        return
    try:
        check_place(output)
    except OSError as error:
        raise _unwritable(output, error) from error


def write_plan(plan: "Plan", output: Path) -> None:
    try:
        plan.write(output)
    except OSError as error:
        raise _unwritable(output, error) from error


def _unwritable(output: Path, error: OSError) -> UsageError:
    return UsageError(f"--output {output} cannot be written: {error.strerror}.")


def model_of(
    text: str, build_on: str, *, on_accelerators: bool
) -> "tuple[Sample | None, Transformer | LayerChain]":
    """The model that a factory builds, and what is priced: of a name, or a file, the architecture."""
    if ":" in text:
        return _traced(text, build_on, on_accelerators=on_accelerators)
    from shardwright.catalogue import find_architecture, from_hugging_face
    from shardwright.files import UserFile

    path = Path(text)
    if path.suffix != ".json":
        return None, find_architecture(text)
    file = UserFile(path, what="", error=ConfigError)
    document = file.read_json(free_text=True)
    if not isinstance(document, dict):
        raise file.refused("is no configuration of a model: it must be an object")
    try:
        return None, from_hugging_face(document, name=printable(path.parent.name or path.stem))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _traced(factory: str, build_on: str, *, on_accelerators: bool) -> "tuple[Sample, LayerChain]":
    """The model that a factory builds; traced, which needs torch, and on the meta device no weights."""
    check_factory(factory)
    import torch

    from shardwright.cli.asking.factory import advice_on_meta, build
    from shardwright.observe.console import Console
    from shardwright.planner.model_chain import chain_of
    from shardwright.torch.units.dry_run import OnAccelerators, graph_of

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
