"""The list of tensors."""

import pytest

from shardwright.checkpoint.tensor_index import Piece, TensorEntry, TensorIndex
from shardwright.errors import CheckpointError, CorruptCheckpointError


def _entry(*pieces: tuple[int, int], dtype: str = "F32") -> dict[str, TensorEntry]:
    made = tuple(Piece(file="f", key="w", offset=(o,), shape=(n,)) for o, n in pieces)
    return {"w": TensorEntry(dtype=dtype, shape=(4,), pieces=made)}


def test_ranks_give_parts() -> None:
    index = TensorIndex.joined([_entry((0, 1)), _entry((3, 1), (1, 2))])
    assert [piece.offset for piece in index.tensors["w"].pieces] == [(0,), (3,), (1,)]
    assert TensorIndex.from_bytes(index.to_bytes(), name="tensors.json") == index


@pytest.mark.parametrize("parts", [[(0, 1)], [(0, 3), (2, 2)], [(0, 4), (0, 4)], [(0, 5)]])
def test_gaps_and_overlaps_are_not_committed(parts: list[tuple[int, int]]) -> None:
    with pytest.raises(CheckpointError, match="parts of w are missing, or there twice"):
        TensorIndex.joined([_entry(*parts)])


def test_ranks_that_disagree_are_told() -> None:
    with pytest.raises(CheckpointError, match="Build the same model on every rank"):
        TensorIndex.joined([_entry((0, 2)), _entry((2, 2), dtype="F64")])


def test_pieces_that_are_not_there_are_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match="which is not there"):
        TensorIndex.joined([_entry((0, 4))]).check({})
