"""Tensors as bytes, and ``torch.save`` files of a state dict: written, read without other content.

Three checks stand between a file and this process. The names in its pickle are compared with a short list
before anything is loaded. PyTorch loads it with ``weights_only=True``. The result must be tensors, of about
the size of the file.
"""

import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor, nn

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.disk import Disk, fresh_folder
from shardwright.checkpoint.hugging_face import CONFIG, Exported, ModelTensors, config_text
from shardwright.checkpoint.importing import (
    ModelFile,
    names_in_archive,
    names_in_old_file,
    pickle_in_archive,
)
from shardwright.checkpoint.safe_files import open_regular, size_of
from shardwright.checkpoint.saved import SavedCheckpoint
from shardwright.checkpoint.tensor_file import StoredTensor, TensorSource
from shardwright.errors import CheckpointError, CorruptCheckpointError
from shardwright.text import shortened

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.complex128: "C128",
}
_STORED_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise CheckpointError(
            f"tensors of {dtype} cannot be saved: files have {', '.join(map(str, _NAMES))}."
        )
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """The type that safetensors calls so."""
    if name not in _STORED_DTYPES:
        raise CorruptCheckpointError(f"a tensor has the type {name}, which this version does not know.")
    return _STORED_DTYPES[name]


def stored(tensor: Tensor) -> StoredTensor:
    """The elements of a tensor on the CPU, in row-major order; shares its memory where it is contiguous."""
    dtype = dtype_name(tensor.dtype)
    if tensor.layout is not torch.strided:
        raise CheckpointError(
            f"a tensor of shape {tuple(tensor.shape)} is {tensor.layout}, and only dense ones can be saved."
        )
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    content: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return StoredTensor(dtype, tuple(tensor.shape), memoryview(content))


def tensor_of(part: StoredTensor) -> Tensor:
    """A tensor on the CPU, in the memory of what was stored where that lies as the type wants it."""
    dtype = dtype_of(part.dtype)
    if not part.data.nbytes:
        return torch.empty(part.shape, dtype=dtype)
    content = torch.frombuffer(part.data, dtype=torch.uint8)
    if content.data_ptr() % dtype.itemsize:  # copying complex128 from there may crash
        content = content.clone()
    return content.view(dtype).reshape(part.shape)


def read_part(saved: SavedCheckpoint, name: str, box: Box | None = None) -> Tensor:
    entry = saved.entry(name)
    dtype = dtype_of(entry.dtype)
    wanted = Box.whole(entry.shape) if box is None else box
    target = torch.empty(wanted.shape, dtype=dtype)
    _fill(target, saved, name, wanted)
    return target


def read_into(target: Tensor, saved: SavedCheckpoint, name: str, boxes: Iterable[Box] | None = None) -> None:
    """Fills a tensor, of any type and on any device, with a tensor of a checkpoint or a part of one."""
    with torch.no_grad():
        if boxes is None:
            _fill(target, saved, name, Box.whole(saved.entry(name).shape))
            return
        place = 0
        for box in boxes:
            part = target[place : place + box.numel]
            part.copy_(read_part(saved, name, box).reshape(-1))
            place += box.numel


def _fill(target: Tensor, saved: SavedCheckpoint, name: str, box: Box) -> None:
    for overlap in saved.overlaps(name, box):
        piece = tensor_of(overlap.stored)
        target[overlap.target.slices].copy_(piece[overlap.source.slices])


_FILE = "model.pt"


def export_state_dict(
    model: ModelTensors,
    folder: Path,
    *,
    config: Mapping[str, Any] | None,
    tell: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Writes ``model.pt``, a plain dictionary of tensors, all of which are in memory at the same time."""
    disk = Disk()
    files = [_FILE]
    with fresh_folder(folder, disk=disk) as draft:
        tell(_FILE)
        made = {id(source): whole_tensor(source) for source in model.sources.values()}  # tied ones are one
        state = {name: made[id(source)] for name, source in model.sources.items()}
        disk.write_with(draft / _FILE, lambda file: torch.save(state, cast("IO[bytes]", file)))
        if config is not None:
            disk.write(draft / CONFIG, [config_text(config, model.sources)])
            files.append(CONFIG)
    return Exported(files=tuple(files), num_tensors=len(state), num_bytes=model.num_bytes)


def whole_tensor(source: TensorSource) -> Tensor:
    content = bytearray(source.num_bytes)
    place = 0
    for part in source.read():
        view = memoryview(part)
        content[place : place + view.nbytes] = view
        place += view.nbytes
    return tensor_of(StoredTensor(source.dtype, source.shape, memoryview(content)))


# What torch.save names for tensors and parameters, in plain and in ordered dictionaries.
_REBUILDS = {
    f"torch._utils.{name}"
    for name in (
        "_rebuild_parameter",
        "_rebuild_parameter_with_state",
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
    )
}
_STORAGES = {f"torch.{name}" for name in dir(torch) if name.endswith("Storage")}
_DTYPES = {str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)}
_ALLOWED = frozenset(
    {
        "collections.OrderedDict",
        "torch.Size",
        "torch.storage.UntypedStorage",
        *_REBUILDS,
        *_STORAGES,
        *_DTYPES,
    }
)

_ZIP = b"PK\x03\x04"
_LARGEST_PICKLE = 256 * 2**20  # bytes, of what is no tensor

# Tensors may be views of one memory, or repeat parts of it; files that claim far more than they have are made
# to fill memory and disks.
_MOST_TIMES = 4
_MOST_MORE_BYTES = 256 * 2**20


def read_state_dict(path: Path, *, key: str | None = None) -> ModelFile:
    """Reads a file of PyTorch; of the newer format, nothing of the tensors yet."""
    try:
        with open_regular(path) as file:
            size = size_of(file)
            zipped = file.read(len(_ZIP)) == _ZIP  # as torch.load tells them apart
            file.seek(0)
            _refuse_names(_names(file, path, size) if zipped else names_in_old_file(file), path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.load(str(path), map_location="cpu", weights_only=True, mmap=zipped)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # a damaged file makes torch.load raise anything
        why = str(error).strip().partition("\n")[0][:300]
        raise CheckpointError(
            f"{path} is refused: it cannot be read as tensors alone ({why}). Nothing in it was executed."
        ) from error
    state = _state(found, path, key)
    _refuse_inflated(state, path, size)
    return _file_of(state, path)


# ---- before anything is loaded ----


def _names(file: BinaryIO, path: Path, size: int) -> Iterator[str]:
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(each.filename.rpartition("/")[2] == "constants.pkl" for each in entries):
            raise _refused(path, "it is a program in TorchScript")
        packed = [each.filename for each in entries if each.compress_type != zipfile.ZIP_STORED]
        if packed or sum(each.file_size for each in entries) > size:
            raise _refused(path, "it is compressed, or claims more than it has, and torch.save does neither")
        if pickle_in_archive(archive).file_size > _LARGEST_PICKLE:
            raise _refused(path, "its pickle is far too large for one of torch.save")
        yield from names_in_archive(archive)


def _refuse_names(names: Iterator[str], path: Path) -> None:
    for name in names:
        if name not in _ALLOWED:
            raise _refused(path, f"its pickle names {name[:200]}, and files of tensors need no such thing")


def _refused(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is refused: {why}. Nothing in it was executed. Ask for it as safetensors, or save "
        "nothing but model.state_dict()."
    )


# ---- afterwards ----


def _state(found: Any, path: Path, key: str | None) -> dict[str, Tensor]:
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} has a {type(found).__name__}, and not the state of a model by name.")
    if key is not None:
        if key not in found or not isinstance(found[key], Mapping):
            raise CheckpointError(f"{path} has no state of a model under {key!r}.{_hint(found)}")
        found = found[key]
    other = {name: value for name, value in found.items() if not _is_plain(name, value)}
    if other:
        listed = [f"{name!r} ({type(value).__name__})" for name, value in other.items()]
        raise CheckpointError(
            f"{path} has {len(other)} entries that are no plain tensors: "
            f"{shortened(listed, most=5)}.{_hint(found)}"
        )
    return {name: value.resolve_conj().resolve_neg() for name, value in found.items()}


def _is_plain(name: object, value: object) -> bool:
    return (
        isinstance(name, str)
        and name != ""
        and type(value) in (Tensor, nn.Parameter)
        and isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )


def _hint(found: Mapping[Any, Any]) -> str:
    for key, value in found.items():
        if isinstance(key, str) and isinstance(value, Mapping):
            num_tensors = sum(isinstance(each, Tensor) for each in value.values())
            if num_tensors:
                return f" {key!r} has {num_tensors} tensors: --key {key} takes these."
    return ""


def _refuse_inflated(state: Mapping[str, Tensor], path: Path, size: int) -> None:
    unique = {_identity(tensor): tensor for tensor in state.values()}
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in unique.values())
    if claimed > _MOST_TIMES * size + _MOST_MORE_BYTES:
        raise _refused(path, f"its tensors have {claimed} bytes, and the file has {size}")


def _file_of(state: Mapping[str, Tensor], path: Path) -> ModelFile:
    tensors: dict[str, TensorSource] = {}
    same: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in state.items():
        known = first.setdefault(_identity(tensor), name)
        if known != name and tensor.numel():
            same[name] = known
        else:
            tensors[name] = TensorSource(dtype_name(tensor.dtype), tuple(tensor.shape), _Reading(tensor))
    return ModelFile(path=path, tensors=tensors, same=same)


class _Reading:
    """Gives the elements of a tensor, of which no copy is made where they lie in order."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor

    def __call__(self) -> list[memoryview]:
        return [stored(self._tensor).data] if self._tensor.numel() else []


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same elements in the same memory."""
    place = tensor.untyped_storage().data_ptr()
    return place, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
