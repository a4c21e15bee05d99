"""The group ``shardwright ckpt``, with the commands that list, verify, clear and import."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.checkpoint.folder import CheckpointFolder, Commit, refuse_one_checkpoint
from shardwright.cli.asking.application import AsJson, new_application, print_json, say, show_text
from shardwright.cli.asking.model import DTYPES
from shardwright.cli.asking.run_path import checkpoint_folder, folder_of, named_checkpoint
from shardwright.cli.commands.ckpt.export import export
from shardwright.errors import CheckpointError, CorruptCheckpointError, NonFiniteError, UsageError
from shardwright.observe.run_folder import held
from shardwright.quantities import counted, format_bytes
from shardwright.text import align, shortened

if TYPE_CHECKING:
    from shardwright.checkpoint.importing import Beside, FoundModel, ModelFile


ImportSource = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="A folder of Hugging Face, an index of its files, a file (.safetensors, .pt, .pth, .bin), or a "
        "folder of torch.distributed.checkpoint.",
    ),
]
To = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="A folder for checkpoints, which has none yet.")
]
Step = Annotated[
    int | None,
    typer.Option(
        "--step", metavar="N", min=0, help="How many steps count as done; else 0, or what a DCP folder says."
    ),
]
Strip = Annotated[str, typer.Option("--strip", metavar="P", help="Take this from the names of tensors.")]
Prefix = Annotated[str, typer.Option("--prefix", metavar="P", help="Put this before the names of tensors.")]
Key = Annotated[
    str | None,
    typer.Option("--key", metavar="K", help="Where the state is in a file of PyTorch: state_dict, model."),
]


def import_(
    source: ImportSource,
    to: To,
    step: Step = None,
    strip: Strip = "",
    prefix: Prefix = "",
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint of what another library has saved; Checkpoints.resume() loads it.

    Nothing in the files is ever executed. For example: shardwright ckpt import gpt2/ -o checkpoints
    """
    # Here, because it imports numpy: --help answers before.
    from shardwright.checkpoint.importing import import_model

    try:
        found = _found_run(source, key) if _is_dcp(source) else _found_model(source, key)
    except OSError as error:
        raise UsageError(f"{source} cannot be read: {error.strerror}.") from error
    root = folder_of(to)
    refuse_one_checkpoint(root)
    step = found.step if step is None else step
    with _in_own_hands(root):
        made = import_model(
            found.files, root, step=step, strip=strip, prefix=prefix, config=found.config, beside=found.beside
        )
    found.tell_more()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What is imported.

    Attributes:
        beside: gives what there is beside the model.
        tell_more: says what was taken over beside it, and what not.
    """

    files: "Iterable[ModelFile]"
    config: Mapping[str, Any] | None = None
    step: int = 0
    beside: "Callable[[Mapping[str, str]], Beside] | None" = None
    tell_more: Callable[[], None] = lambda: None


def _is_dcp(source: Path) -> bool:
    """Whether it is a folder of `torch.distributed.checkpoint`, which has its list."""
    if (source / ".metadata").exists() or not source.is_dir():
        return source.is_dir()
    if any(source.glob("*.distcp")):
        raise CheckpointError(
            f"{source} is a save of torch.distributed.checkpoint that was not finished: it has tensors, and "
            "no .metadata, which comes last. Give an earlier one."
        )
    inside = sorted(path.parent.name for path in source.glob("*/.metadata"))
    if inside and not any(path.is_file() for path in source.iterdir()):
        raise CheckpointError(
            f"{source} has {counted(len(inside), 'folder')} of torch.distributed.checkpoint: "
            f"{shortened(inside)}. Give one of them: {source / inside[-1]}."
        )
    return False


def _found_run(source: Path, key: str | None) -> _Found:
    # Here, because it imports torch.
    from shardwright.torch.checkpoints.dcp_import import read_run

    say(f"reading {source / '.metadata'} ...")
    run = read_run(source, key=key)

    def tell_more() -> None:
        number = len(run.optimizers)
        what = counted(number, "optimizer") if number else "no optimizer: a run makes a new one"
        say(f"{source} has {what}")
        taken = [name for name in run.states if name not in run.left_out]
        if taken:
            say(f"it also has {', '.join(taken)}: a run takes those that its sw.Checkpoints(state=...) names")
        for name, why in run.left_out.items():
            say(f"left out: {name}: {why}")

    return _Found(files=[run.model_file()], step=run.step, beside=run.beside, tell_more=tell_more)


def _found_model(source: Path, key: str | None) -> _Found:
    from shardwright.checkpoint.importing import find_model

    found = find_model(source)
    return _Found(files=_files(found, _reader(found, key)), config=found.config)


def _reader(found: "FoundModel", key: str | None) -> "Callable[[Path], ModelFile]":
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


application = new_application(
    text="List, verify, export, import and clear checkpoints.",
    other_names={"to": "output", **DTYPES},
)

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder of checkpoints, or of a run that has checkpoints/.")
]
Source = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder of checkpoints, that of a run, or one checkpoint.")
]
Name = Annotated[str | None, typer.Argument(metavar="NAME", help="One checkpoint; all without it.")]


@application.command("ls")
def list_checkpoints(folder: Folder, as_json: AsJson = False) -> None:
    """List the checkpoints of a folder, the oldest first.

    For example: shardwright ckpt ls runs/NAME
    """
    found = checkpoint_folder(folder)
    rows = [_described(found, commit) for commit in found.commits()]
    if as_json:
        print_json([asdict(row) for row in rows])
    elif not rows:
        show_text(f"no checkpoints in {found.root}")
    else:
        header = ["checkpoint", "step", "saved (UTC)", "size", "files", "weights"]
        show_text(align([header, *(_as_text(row) for row in rows)]))


@application.command("verify", short_help="Read checkpoints whole; compare checksums.")
def verify(folder: Source, name: Name = None, as_json: AsJson = False) -> None:
    """Read checkpoints whole and compare every checksum; exit code 8 where something is damaged.

    Exit code 7 where all is whole, and weights of one were infinite or NaN when it was saved.

    For example: shardwright ckpt verify runs/NAME
    """
    found, chosen = named_checkpoint(folder, name)
    commits = [commit for commit in found.commits() if chosen in (None, commit.name)]
    if not commits:
        found.open(chosen)  # says what is there
    problems = {commit.name: _problem(found, commit) for commit in commits}
    for gone in [each for each, problem in problems.items() if problem and not found.lists(each)]:
        say(f"{gone} was removed meanwhile, by the run that saves here")
        del problems[gone]
    bad = {commit.name: _not_finite(found, commit) for commit in commits if problems.get(commit.name) is None}
    if as_json:
        print_json(
            [
                {"name": name, "problem": str(it) if it else None, "not_finite": list(bad.get(name, ()))}
                for name, it in problems.items()
            ]
        )
    else:
        for each, problem in problems.items():
            names = bad.get(each)
            sound = f"whole, but its weights are not finite: {shortened(names)}" if names else "ok"
            show_text(f"{each}  {problem or sound}")
    _refuse(found, problems)
    spoilt = [name for name in problems if bad.get(name)]
    if spoilt:
        raise NonFiniteError(
            f"{len(spoilt)} of {len(problems)} checkpoints in {found.root} have weights that are infinite or "
            f"NaN: {shortened(spoilt)}. Resume from another one: checkpoints.resume(NAME)."
        )


application.command("export", short_help="Write a model for other libraries.")(export)
application.command("import", short_help="Make a checkpoint of another's model.")(import_)


@application.command("gc", short_help="Remove old checkpoints and remains.")
def gc(
    folder: Folder,
    keep: Annotated[int, typer.Option(metavar="N", help="How many of the newest stay.")],
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints, and what crashes have left, once the newest one is verified.

    For example: shardwright ckpt gc runs/NAME --keep 3
    """
    found = checkpoint_folder(folder)
    try:
        with _alone(found):
            removed = found.collect(keep=keep)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{error} Nothing was removed: old checkpoints go only behind a newest one that is sound."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{found.root} cannot be cleared: {error.strerror}. What shardwright ckpt ls lists is there."
        ) from error
    if as_json:
        print_json({"removed": list(removed), "kept": [commit.name for commit in found.commits()]})
    else:
        for name in removed:
            show_text(f"removed {name}")
        show_text(f"{counted(len(found.commits()), 'checkpoint')} left")


@contextmanager
def _alone(folder: CheckpointFolder) -> Iterator[None]:
    """Has no run save in a folder meanwhile. Another folder than one of checkpoints is left as it is."""
    if not folder.commits() and not folder.drafts():
        raise CheckpointError(f"{folder.root} has no checkpoint, and nothing that a save has left.")
    with held(folder.root / ".lock") as holder:
        if holder is not None:
            raise UsageError(
                f"{folder.root} is in use by {holder}, which may be saving. Try again when it ends."
            )
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A checkpoint in the list; what cannot be read is None, and the problem says why.

    Attributes:
        step: that was done when it was saved.
    """

    name: str
    step: int
    saved_at: str | None = None
    num_bytes: int | None = None
    num_files: int | None = None
    not_finite: tuple[str, ...] | None = None
    problem: str | None = None


def _described(folder: CheckpointFolder, commit: Commit) -> _Row:
    try:
        saved = folder.open(commit.name, verify=False)
    except CheckpointError as error:
        return _Row(name=commit.name, step=commit.step, problem=str(error))
    changed = datetime.fromtimestamp(saved.path.stat().st_mtime, UTC)
    return _Row(
        name=commit.name,
        step=commit.step,
        saved_at=f"{changed:%Y-%m-%dT%H:%M:%SZ}",
        num_bytes=saved.num_bytes,
        num_files=len(saved.manifest.files),
        not_finite=tuple(saved.not_finite),
    )


def _as_text(row: _Row) -> list[str]:
    if row.saved_at is None or row.num_bytes is None:
        return [row.name, str(row.step), "-", "-", str(row.problem), "-"]
    saved = row.saved_at.replace("T", " ").removesuffix("Z")
    weights = f"not finite: {shortened(row.not_finite)}" if row.not_finite else "finite"
    return [row.name, str(row.step), saved, format_bytes(row.num_bytes), str(row.num_files), weights]


def _problem(folder: CheckpointFolder, commit: Commit) -> CheckpointError | None:
    try:
        folder.open(commit.name).check()
    except CheckpointError as error:
        return error
    return None


def _not_finite(folder: CheckpointFolder, commit: Commit) -> tuple[str, ...]:
    try:
        return folder.open(commit.name, verify=False).not_finite
    except CheckpointError:  # the run that saves has removed it meanwhile
        return ()


def _refuse(folder: CheckpointFolder, problems: Mapping[str, CheckpointError | None]) -> None:
    """Ends the command where a checkpoint has a problem; one that could not be read may be whole."""
    damaged = [name for name, problem in problems.items() if isinstance(problem, CorruptCheckpointError)]
    unread = [name for name, problem in problems.items() if problem and name not in damaged]
    of_all = f"of {len(problems)} checkpoints in {folder.root}"
    if damaged:
        raise CorruptCheckpointError(f"{len(damaged)} {of_all} cannot be used: {', '.join(damaged)}.")
    if unread:
        raise CheckpointError(
            f"{len(unread)} {of_all} could not be read, and may be whole: {', '.join(unread)}."
        )
