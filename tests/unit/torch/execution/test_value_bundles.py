"""Values that one rank puts up for others in a microbatch, and what these are told where there is none."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from shardwright.comm.joining.store import ValueBoard
from shardwright.errors import TraceMismatchError
from shardwright.torch.execution.microbatches.value_bundles import OwnValues, TakenValues

SMALL, LARGE = 0, 1  # values


def ranks() -> tuple[OwnValues, ValueBoard, TakenValues]:
    """What rank 1 puts up, its board, and what rank 0 takes."""
    store = HashStore()
    boards = [
        ValueBoard(store, (0, 1), rank=rank, has_ended=lambda rank: False, timeout_s=10) for rank in range(2)
    ]
    for board in boards:
        board.begin()
    sizes = {SMALL: 4, LARGE: 2**20}
    values = {v: SimpleNamespace(spec=SimpleNamespace(num_bytes=size)) for v, size in sizes.items()}
    trace = SimpleNamespace(ends=True, graph=SimpleNamespace(values=values))
    program: Any = SimpleNamespace(rank=1, trace=trace, stage_ranks=[0, 1], home_of=[1, 1])
    changes: Counter[int] = Counter()
    return OwnValues(0, program, boards[1], changes), boards[1], TakenValues(0, program, boards[0], changes)


def test_a_rank_that_came_by_and_went_on_is_not_said_to_have_ended() -> None:
    own, _, taken = ranks()
    small, large = torch.ones(()), torch.ones(2**18)
    own.note(SMALL, small)
    own.note(LARGE, large)
    own.pass_backward()
    assert len(taken.take(SMALL, is_behind_backward=False)) == 4
    with pytest.raises(
        TraceMismatchError, match=r"pipeline rank 1 has, .* has passed its backward, or ended,"
    ):
        taken.take(LARGE, is_behind_backward=False)


def test_a_rank_that_did_not_come_by_is() -> None:
    _, board, taken = ranks()
    board.done()
    board.tell()
    with pytest.raises(TraceMismatchError, match="has passed its backward, or ended, without using it"):
        taken.take(LARGE, is_behind_backward=False)
