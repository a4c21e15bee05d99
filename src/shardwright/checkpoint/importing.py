"""Makes a checkpoint of a model saved by another library, whose files are in an untrusted folder.

A Hugging Face folder has one file, or several with an index that says which tensor is where. Names in the
index are file names in the same folder, never a path elsewhere. Links are refused, except those of Hugging
Face's own cache::

    models--NAME/snapshots/REVISION/model.safetensors -> ../../blobs/0f1e...

A pickle is a program: it can call whatever it names. Tensor files name very few things.
"""

import contextlib
import io
import json
import pickletools
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.disk import MANIFEST, Disk, FileEntry, is_plain_name
from shardwright.checkpoint.folder import CheckpointFolder, Commit
from shardwright.checkpoint.hugging_face import CONFIG
from shardwright.checkpoint.safe_files import parse, read_regular
from shardwright.checkpoint.tensor_file import TensorFile, TensorSource, streamed_content
from shardwright.checkpoint.tensor_index import (
    INDEX,
    MODEL,
    Piece,
    TensorEntry,
    TensorIndex,
    in_order,
    without_prefix,
)
from shardwright.errors import CheckpointError, CorruptCheckpointError
from shardwright.quantities import counted

_INDEX_ENDING = ".index.json"
_LARGEST_INDEX = 256 * 2**20  # bytes
_LARGEST_CONFIG = 16 * 2**20


class FileKind(Enum):
    SAFETENSORS = (".safetensors",)
    PICKLE = (".pt", ".pth", ".bin", ".ckpt")

    @classmethod
    def of(cls, name: str) -> "FileKind | None":
        """By the ending of the name; None where that says nothing."""
        return next((kind for kind in cls if Path(name).suffix in kind.value), None)


# In the order of preference, as transformers has it; `model.pt` is what `ckpt export` writes.
_USUAL = (
    "model.safetensors",
    f"model.safetensors{_INDEX_ENDING}",
    "pytorch_model.bin",
    f"pytorch_model.bin{_INDEX_ENDING}",
    "model.pt",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """The content of a model file.

    Attributes:
        same: tensors that are others under a second name, which `tensors` does not have: the first one by it.
    """

    path: Path
    tensors: Mapping[str, TensorSource]
    same: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {*self.tensors, *self.same}


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a run has beside its model.

    Attributes:
        tensors: by their full names in the checkpoint.
    """

    tensors: Mapping[str, TensorSource]
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """The files of a model.

    Attributes:
        files: name in the folder, and where it is.
        places: the name of the file by that of the tensor; None where one file has all.
        config: what ``config.json`` has; None where there is none.
    """

    kind: FileKind
    files: Mapping[str, Path]
    places: Mapping[str, str] | None = None
    config: Mapping[str, Any] | None = None

    def check(self, name: str, file: ModelFile) -> None:
        if self.places is None:
            return
        expected = {tensor for tensor, place in self.places.items() if place == name}
        for names, what in ((expected - file.names, "lacks"), (file.names - expected, "also has")):
            if names:
                listed = ", ".join(in_order(names)[:5]) + (", ..." if len(names) > 5 else "")
                raise CorruptCheckpointError(
                    f"{file.path} {what} {listed}: that is not what the index of the model says. Get all of "
                    "its files anew."
                )


def find_model(source: Path) -> FoundModel:
    if source.is_dir():
        return _in_folder(source)
    if source.name.endswith(_INDEX_ENDING):
        return _by_index(source.parent, source.name)
    if not source.exists():
        raise CheckpointError(
            f"there is no {source}. Give a folder of Hugging Face, or a file of tensors: "
            f"{', '.join(ending for kind in FileKind for ending in kind.value)}."
        )
    kind = FileKind.of(source.name)
    if kind is None:
        raise CheckpointError(
            f"{source} does not say what it is. Files of tensors end with "
            f"{', '.join(ending for kind in FileKind for ending in kind.value)}."
        )
    return FoundModel(kind=kind, files={source.name: source.resolve()})


def read_tensor_file(path: Path) -> ModelFile:
    """The content of a safetensors file; no tensor is read yet."""
    try:
        file = TensorFile(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    return ModelFile(path=path, tensors={name: TensorSource.of(file[name]) for name in file})


def _in_folder(folder: Path) -> FoundModel:
    if (folder / MANIFEST).exists():
        raise CheckpointError(
            f"{folder} is a checkpoint of Shardwright already: resume from it, or export it first."
        )
    present = {path.name for path in folder.iterdir()}
    for name in _USUAL:
        if name in present:
            if name.endswith(_INDEX_ENDING):
                return _by_index(folder, name)
            return _single(folder, name)
    for kind in FileKind:
        alike = [name for name in present if FileKind.of(name) is kind]
        if len(alike) == 1:
            return _single(folder, alike[0])
        if alike:
            raise CheckpointError(
                f"{folder} has no {', '.join(_USUAL[:-1])} or {_USUAL[-1]}, and several files that could be "
                f"the model: {', '.join(in_order(alike)[:8])}. Give the one that is meant."
            )
    raise CheckpointError(f"{folder} has no file of tensors: none of {', '.join(_USUAL)}.")


def _single(folder: Path, name: str) -> FoundModel:
    kind = FileKind.of(name)
    assert kind is not None  # names are chosen by it
    return FoundModel(kind=kind, files={name: _place(folder, name)}, config=_config(folder))


def _by_index(folder: Path, name: str) -> FoundModel:
    where = str(folder / name)
    document = parse(read_regular(_place(folder, name), most_bytes=_LARGEST_INDEX), name=where)
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict) or not places or not all(type(each) is str for each in places.values()):
        raise CorruptCheckpointError(f"{where} has no weight_map that says which tensor is in which file.")
    kind = FileKind.of(name.removesuffix(_INDEX_ENDING))
    if kind is None:
        raise CheckpointError(f"{where} does not say of what it is the index: {name} is no usual name.")
    for file in set(places.values()):
        if FileKind.of(file) is not kind:
            endings = ", ".join(kind.value)
            raise CorruptCheckpointError(f"{where} leads to {file[:200]!r}, which is none of {endings}.")
    files = {file: _place(folder, file) for file in in_order(set(places.values()))}
    return FoundModel(kind=kind, files=files, places=places, config=_config(folder))


def _config(folder: Path) -> Mapping[str, Any] | None:
    if not (folder / CONFIG).exists():
        return None
    found = parse(read_regular(_place(folder, CONFIG), most_bytes=_LARGEST_CONFIG), name=str(folder / CONFIG))
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{folder / CONFIG} is no configuration: it has no object with names.")
    return found


def _place(folder: Path, name: str) -> Path:
    path = folder / name
    if not is_plain_name(name):
        raise CorruptCheckpointError(f"{name[:200]!r} is no name of a file in {folder}. Nothing was read.")
    if not path.is_symlink():
        return path
    target = path.resolve()
    if folder.parent.name == "snapshots" and target.parent == (folder.parent.parent / "blobs").resolve():
        return target
    raise CorruptCheckpointError(
        f"{path} is a link to {target}. Links are not followed: put the file there, or give {target} itself."
    )


# These take what they call from elsewhere than from a text beside them.
_INDIRECT = {"STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}

# A file of torch.save of the format before 1.6 begins with this number, as a pickle; then come its version,
# the system that wrote it, what was saved, and the names of its storages.
_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_PICKLES_OF_OLD_FILES = 5


def names_in_pickle(file: BinaryIO) -> Iterator[str]:
    """Names, such as ``collections.OrderedDict``, in the order in which a pickle has them.

    What is named on the stack is guessed by the last two texts before.
    """
    yield from _names(pickletools.genops(file))


def _names(operations: Iterable[tuple[pickletools.OpcodeInfo, Any, int | None]]) -> Iterator[str]:
    texts = ["?", "?"]
    for operation, argument, _ in operations:
        if operation.name == "GLOBAL":
            yield str(argument).replace(" ", ".", 1)
        elif operation.name in _INDIRECT:
            yield str(argument).replace(" ", ".", 1) if operation.name == "INST" else ".".join(texts)
        elif isinstance(argument, str):
            texts = [texts[-1], argument]


def pickle_in_archive(archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """The one pickle in a file of `torch.save`, which is a zip archive."""
    found = [each for each in archive.infolist() if each.filename.rpartition("/")[2] == "data.pkl"]
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError("it has not the one pickle that torch.save writes")
    return found[0]


def names_in_archive(archive: zipfile.ZipFile) -> Iterator[str]:
    """Names in a file of `torch.save`, which is a zip archive; see `names_in_pickle`."""
    entry = pickle_in_archive(archive)
    if entry.CRC == 0:  # torch.serialization.set_crc32_options(False): there is nothing to compare with
        del entry.CRC
    yield from names_in_pickle(io.BytesIO(archive.read(entry)))


def names_in_old_file(file: BinaryIO) -> Iterator[str]:
    """Names in a file of `torch.save` that is no zip archive; see `names_in_pickle`."""
    begins_well = False

    def first() -> Iterator[Any]:
        nonlocal begins_well
        for operation in pickletools.genops(file):
            begins_well |= operation[1] == _MAGIC_NUMBER
            yield operation

    yield from _names(first())
    if not begins_well:
        raise ValueError("torch.save has not written it")
    for _ in range(_PICKLES_OF_OLD_FILES - 1):
        yield from names_in_pickle(file)


STATE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The checkpoint that was made.

    Attributes:
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
    beside: Callable[[Mapping[str, str]], Beside] | None = None,
) -> Imported:
    """Makes a checkpoint of a model alone, or with what `beside` gives for the new names of its tensors."""
    disk = Disk()
    folder = CheckpointFolder(root, disk=disk)
    _refuse_others(folder)
    draft = None
    try:
        draft = folder.begin(step)
        made = _Draft(draft, disk=disk)
        names: dict[str, str] = {}
        for file in files:
            new = _new_names(file, strip=strip, prefix=prefix)
            made.add(file, names=new)
            names.update(new)
        more = Beside(tensors={}, document={}) if beside is None else beside(names)
        made.add_tensors(more.tensors, source=root)
        made.add_documents(step, config, more.document)
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
    """A checkpoint that is being made."""

    def __init__(self, path: Path, *, disk: Disk):
        self._path = path
        self._disk = disk
        self.files: dict[str, FileEntry] = {}
        self.tensors: dict[str, TensorEntry] = {}
        self.num_bytes = 0

    def add(self, file: ModelFile, *, names: Mapping[str, str]) -> None:
        content = {f"{MODEL}{names[name]}": source for name, source in file.tensors.items()}
        self.add_tensors(content, source=file.path)
        for name, first in file.same.items():
            self._index(f"{MODEL}{names[name]}", self.tensors[f"{MODEL}{names[first]}"], file.path)

    def add_tensors(self, content: Mapping[str, TensorSource], *, source: Path) -> None:
        stored = f"imported-{len(self.files) + 1:05}.safetensors"
        for full, tensor in content.items():
            piece = Piece(file=stored, key=full, offset=Box.whole(tensor.shape).offset, shape=tensor.shape)
            self._index(full, TensorEntry(dtype=tensor.dtype, shape=tensor.shape, pieces=(piece,)), source)
            self.num_bytes += tensor.num_bytes
        if content:
            self.files[stored] = self._disk.write(self._path / stored, streamed_content(content))

    def add_documents(self, step: int, config: Mapping[str, Any] | None, more: Mapping[str, Any]) -> None:
        """Writes everything but tensors."""
        if not self.tensors:
            raise CheckpointError("the model has no tensors. Nothing was imported.")
        state = {"version": 1, "step": step, "layout": None, **more}
        documents = {INDEX: TensorIndex(tensors=self.tensors).to_bytes(), STATE: json.dumps(state).encode()}
        if config is not None:
            documents[CONFIG] = json.dumps(config, indent=1).encode()
        for name, content in documents.items():
            self.files[name] = self._disk.write(self._path / name, [content])

    def _index(self, full: str, entry: TensorEntry, source: Path) -> None:
        if full in self.tensors:
            raise CheckpointError(f"{full.removeprefix(MODEL)} is there twice: again in {source}.")
        self.tensors[full] = entry


def _new_names(file: ModelFile, *, strip: str, prefix: str) -> dict[str, str]:
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
