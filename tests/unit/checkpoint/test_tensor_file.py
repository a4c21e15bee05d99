"""Files of tensors are those of the safetensors library."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.tensor_file import StoredTensor, TensorFile, file_content

_TENSORS = {
    "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "a": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
    'name with "quotes" [and] {brackets}': torch.tensor([1, -1], dtype=torch.int8),
}
_DTYPES = {torch.bfloat16: "BF16", torch.bool: "BOOL", torch.float64: "F64", torch.float32: "F32"}


def _stored(tensor: torch.Tensor) -> StoredTensor:
    data = bytes(tensor.flatten().view(torch.uint8).numpy()) if tensor.numel() else b""
    return StoredTensor(_DTYPES.get(tensor.dtype, "I8"), tuple(tensor.shape), memoryview(data))


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    stored = {name: _stored(tensor) for name, tensor in _TENSORS.items()}
    written = Disk().write(tmp_path / "x.safetensors", file_content(stored, {"format": "pt"}))
    assert written.size == (tmp_path / "x.safetensors").stat().st_size
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == set(_TENSORS)
    for name, tensor in _TENSORS.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    save_file(_TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "x.safetensors")
    assert set(file) == set(_TENSORS)
    for name, tensor in _TENSORS.items():
        stored = file[name]
        assert (stored.dtype, stored.shape) == (_stored(tensor).dtype, tuple(tensor.shape))
        assert bytes(stored.data) == bytes(_stored(tensor).data)
