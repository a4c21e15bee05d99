"""``shardwright ckpt import``: makes a checkpoint of a Hugging Face or PyTorch model."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.checkpoint.folder import refuse_one_checkpoint
from shardwright.cli.asking.application import AsJson, print_json, say, show_text
from shardwright.cli.asking.run_path import folder_of
from shardwright.errors import CheckpointError, UsageError
from shardwright.observe.run_folder import held
from shardwright.quantities import format_bytes

if TYPE_CHECKING:
    from shardwright.checkpoint.importing import FoundModel, ModelFile

Source = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="A folder of Hugging Face, an index of its files, or a file: .safetensors, .pt, .pth, .bin.",
    ),
]
To = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="A folder for checkpoints, which has none yet.")
]
Step = Annotated[int, typer.Option("--step", metavar="N", min=0, help="How many steps count as done.")]
Strip = Annotated[str, typer.Option("--strip", metavar="P", help="Take this from the names of tensors.")]
Prefix = Annotated[str, typer.Option("--prefix", metavar="P", help="Put this before the names of tensors.")]
Key = Annotated[
    str | None,
    typer.Option("--key", metavar="K", help="Where the state is in a file of PyTorch: state_dict, model."),
]


def import_(
    source: Source,
    to: To,
    step: Step = 0,
    strip: Strip = "",
    prefix: Prefix = "",
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint of a model that another library has saved; Checkpoints.resume() loads it.

    Nothing in the files is ever executed. For example: shardwright ckpt import gpt2/ -o checkpoints
    """
    # Here, because it imports numpy: --help answers before.
    from shardwright.checkpoint.importing import find_model, import_model

    try:
        found = find_model(source)
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}.") from error
    read = _reader(found, key)
    root = folder_of(to)
    refuse_one_checkpoint(root)
    with _in_own_hands(root):
        made = import_model(
            _files(found, read), root, step=step, strip=strip, prefix=prefix, config=found.config
        )
    name = made.commit.name
    if as_json:
        print_json(
            {
                "folder": str(root),
                "checkpoint": name,
                "step": step,
                "tensors": made.num_tensors,
                "bytes": made.num_bytes,
            }
        )
        return
    # A run looks in its own folder first.
    own = root.parts[-3:-2] == ("runs",) and root.name == "checkpoints"
    how = f"shardwright run --name {root.parts[-2]} train.py" if own else f'sw.Checkpoints("{root}").resume()'
    show_text(
        f"wrote {made.num_tensors} tensors ({format_bytes(made.num_bytes)}) to {root / name}; a run resumes "
        f"from it: {how}"
    )


def _reader(found: "FoundModel", key: str | None) -> "Callable[[Path], ModelFile]":
    """The reader of a file of a model."""
    from shardwright.checkpoint.importing import FileKind, read_tensor_file

    if found.kind is FileKind.PICKLE:
        # Here, because it imports torch.
        from shardwright.torch.checkpoints.state_dict_files import read_state_dict

        return partial(read_state_dict, key=key)
    if key is not None:
        raise UsageError(f"--key is {key!r}, and files of safetensors have no keys but names. Leave it out.")
    return read_tensor_file


def _files(found: "FoundModel", read: "Callable[[Path], ModelFile]") -> "Iterator[ModelFile]":
    """Each file, when the one before is done with."""
    for name, path in found.files.items():
        say(f"reading {path} ...")
        file = read(path)
        found.check(name, file)
        yield file


@contextmanager
def _in_own_hands(root: Path) -> Iterator[None]:
    """Keeps runs from saving in a folder meanwhile."""
    with ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            holder = stack.enter_context(held(root / ".lock"))
        except OSError as error:
            raise CheckpointError(
                f"{root} cannot be a folder of checkpoints: {error.strerror}. Give one that can be written."
            ) from error
        if holder is not None:
            raise UsageError(f"{root} is in use by {holder}, which saves there. Give a folder of its own.")
        yield
