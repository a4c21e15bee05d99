"""Tensors as bytes, whole and in parts, whatever pieces they were saved in."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.checkpoint.boxes import Box, boxes_of_range
from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.checkpoint.saved import TensorPart, add_tensors
from shardwright.checkpoint.tensor_file import StoredTensor
from shardwright.checkpoint.tensor_index import INDEX, TensorIndex
from shardwright.errors import CheckpointError
from shardwright.torch.checkpoints.state_dict_files import dtype_name, read_into, read_part, stored, tensor_of

_SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@pytest.mark.parametrize(
    "dtype", "bool uint8 int64 uint16 float16 bfloat16 float32 float64 float8_e4m3fn complex64".split()
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_every_type_comes_back(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(getattr(torch, dtype))
    found = tensor_of(stored(tensor))
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert bytes(stored(found).data) == bytes(stored(tensor).data)


def test_content_that_lies_otherwise_than_its_type_wants_it_is_copied() -> None:
    """A resume copied complex128 from 8 bytes behind a multiple of 16, which crashed the process."""
    memory = torch.zeros(64, dtype=torch.uint8)
    memory[8:24].copy_(torch.tensor([1 + 2j], dtype=torch.complex128).view(torch.uint8))
    found = tensor_of(StoredTensor("C128", (1,), memoryview(memory.numpy())[8:24]))
    assert found.data_ptr() % 16 == 0
    assert found.tolist() == [1 + 2j]


def test_what_is_not_contiguous_is_saved_in_its_order() -> None:
    tensor = torch.arange(6).reshape(2, 3).t()
    torch.testing.assert_close(tensor_of(stored(tensor)), tensor)


def test_types_without_a_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"torch\.complex32 cannot be saved"):
        dtype_name(torch.complex32)


def _saved(root: Path, tensor: torch.Tensor, cuts: list[int]) -> CheckpointFolder:
    """Saves a tensor in ranges of its elements, each by another rank."""
    folder, entries, files = CheckpointFolder(root), [], {}
    draft = folder.begin(1)
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        parts = [
            TensorPart("w", whole=tuple(tensor.shape), box=box, stored=stored(tensor[box.slices]))
            for box in boxes_of_range(tensor.shape, start, stop)
        ]
        file = f"rank-{number:05}.safetensors"
        files[file], entry = add_tensors(draft, file, parts, disk=Disk())
        entries.append(entry)
    index = TensorIndex.joined(entries)
    files[INDEX] = Disk().write(draft / INDEX, [index.to_bytes()])
    folder.commit(draft, step=1, files=files)
    return folder


@settings(deadline=None, max_examples=40)
@given(shape=_SHAPES, data=st.data())
def test_any_cut_is_read_in_any_other(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], data: st.DataObject
) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    numel = tensor.numel()
    if not numel:
        return
    cut = st.lists(st.integers(0, numel), max_size=4).map(lambda found: sorted({0, numel, *found}))
    saved = _saved(tmp_path_factory.mktemp("saved"), tensor, data.draw(cut)).open()
    saved.check()
    torch.testing.assert_close(read_part(saved, "w"), tensor)
    theirs = data.draw(cut)
    for start, stop in itertools.pairwise(theirs):
        boxes = list(boxes_of_range(shape, start, stop))
        target = torch.full((stop - start,), -1.0)
        read_into(target, saved, "w", boxes)
        torch.testing.assert_close(target, tensor.reshape(-1)[start:stop].float())
    whole = torch.full(shape, -1.0, requires_grad=True)
    read_into(whole, saved, "w")
    torch.testing.assert_close(whole.detach(), tensor.float())


def test_a_column_of_pieces_of_rows(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(4, 3)
    saved = _saved(tmp_path, tensor, [0, 5, 12]).open()
    torch.testing.assert_close(read_part(saved, "w", Box((1, 1), (3, 2))), tensor[1:, 1:])
