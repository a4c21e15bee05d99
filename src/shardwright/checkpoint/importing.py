"""Makes a checkpoint of a model saved by another library."""

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.folder import CheckpointFolder, Commit
from shardwright.checkpoint.hugging_face import CONFIG
from shardwright.checkpoint.manifest import FileEntry
from shardwright.checkpoint.model_source import ModelFile
from shardwright.checkpoint.saved import add_file
from shardwright.checkpoint.tensor_file import TensorSource, streamed_content
from shardwright.checkpoint.tensor_index import INDEX, MODEL, Piece, TensorEntry, TensorIndex, without_prefix
from shardwright.errors import CheckpointError
from shardwright.quantities import counted

STATE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The checkpoint that was made.

    Attributes:
        commit: its name, and the like.
        num_tensors: in it; one with two names counts twice.
    """

    commit: Commit
    num_tensors: int
    num_bytes: int


def import_model(
    files: Iterable[ModelFile],
    root: Path,
    *,
    step: int = 0,
    strip: str = "",
    prefix: str = "",
    config: Mapping[str, Any] | None = None,
    disk: Disk | None = None,
) -> Imported:
    """Makes a checkpoint that has a model, and neither optimizer nor anything else.

    A tensor with two names is stored once, and can be loaded by both.
    """
    disk = disk or Disk()
    folder = CheckpointFolder(root, disk=disk)
    _refuse_others(folder)
    draft = None
    try:
        draft = folder.begin(step)
        made = _Draft(draft, disk=disk)
        for file in files:
            made.add(file, names=_names(file, strip=strip, prefix=prefix))
        made.add_documents(step, config)
        commit = folder.commit(draft, step=step, files=made.files)
        return Imported(commit=commit, num_tensors=len(made.tensors), num_bytes=made.num_bytes)
    except OSError as error:
        raise CheckpointError(
            f"{root} cannot be written: {error.strerror or error}. Nothing was imported. Give a folder on a "
            "disk that can be written and has room."
        ) from error
    finally:
        if draft is not None and draft.is_dir():  # renamed, once it is committed
            with contextlib.suppress(OSError):
                folder.discard(draft)


class _Draft:
    """A checkpoint that is being made.

    Attributes:
        files: entries of the manifest, so far.
        tensors: entries of the index, so far.
        num_bytes: of the tensors, so far.
    """

    def __init__(self, path: Path, *, disk: Disk):
        self._path = path
        self._disk = disk
        self.files: dict[str, FileEntry] = {}
        self.tensors: dict[str, TensorEntry] = {}
        self.num_bytes = 0

    def add(self, file: ModelFile, *, names: Mapping[str, str]) -> None:
        """Writes the tensors of a file under other names."""
        stored = f"imported-{len(self.files) + 1:05}.safetensors"
        content: dict[str, TensorSource] = {}
        for name, source in file.tensors.items():
            full = f"{MODEL}{names[name]}"
            content[full] = source
            piece = Piece(file=stored, key=full, offset=Box.whole(source.shape).offset, shape=source.shape)
            self._index(full, TensorEntry(dtype=source.dtype, shape=source.shape, pieces=(piece,)), file)
            self.num_bytes += source.num_bytes
        for name, first in file.same.items():
            self._index(f"{MODEL}{names[name]}", self.tensors[f"{MODEL}{names[first]}"], file)
        self.files[stored] = add_file(self._path, stored, streamed_content(content), disk=self._disk)

    def add_documents(self, step: int, config: Mapping[str, Any] | None) -> None:
        """Writes everything but tensors."""
        if not self.tensors:
            raise CheckpointError("the model has no tensors. Nothing was imported.")
        state = {"version": 1, "step": step, "layout": None}
        documents = {INDEX: TensorIndex(tensors=self.tensors).to_bytes(), STATE: json.dumps(state).encode()}
        if config is not None:
            documents[CONFIG] = json.dumps(config, indent=1).encode()
        for name, content in documents.items():
            self.files[name] = add_file(self._path, name, [content], disk=self._disk)

    def _index(self, full: str, entry: TensorEntry, file: ModelFile) -> None:
        if full in self.tensors:
            raise CheckpointError(f"{full.removeprefix(MODEL)} is there twice: again in {file.path}.")
        self.tensors[full] = entry


def _names(file: ModelFile, *, strip: str, prefix: str) -> dict[str, str]:
    bare = without_prefix([*file.tensors, *file.same], strip, where=str(file.path))
    return {name: f"{prefix}{left}" for name, left in bare.items()}


def _refuse_others(folder: CheckpointFolder) -> None:
    commits = folder.commits()
    if commits:
        raise CheckpointError(
            f"{folder.root} has {counted(len(commits), 'checkpoint')}, the newest of step "
            f"{commits[-1].step}: a run that resumes there would begin again with what is imported. Give a "
            "folder without checkpoints."
        )
