"""Values that a rank puts up, and others take."""

import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shardwright.comm.joining.run_secret import ForgedError
from shardwright.comm.joining.store import ValueBoard
from shardwright.errors import PeerLostError, UsageError

ABSENT = UsageError("not put up")


def boards(
    *, has_ended: Any = lambda rank: False, timeout_s: float = 10.0
) -> tuple[Any, ValueBoard, ValueBoard]:
    """The store, and the boards of two ranks in their first batch."""
    store = HashStore()
    made = [ValueBoard(store, (4, 7), rank=r, has_ended=has_ended, timeout_s=timeout_s) for r in (0, 1)]
    for board in made:
        board.begin()
    return store, made[0], made[1]


@pytest.mark.parametrize("size", [0, 1, 5, 4 * 2**20, 4 * 2**20 + 1, 9 * 2**20])
def test_a_value_is_taken_as_it_was_put_up(size: int) -> None:
    _, one, other = boards()
    value = bytes(range(256)) * (size // 256) + b"\n" * (size % 256)
    one.put("a", value)
    assert other.get(["b", "a"], 0, ABSENT) == ("a", value)


def test_it_is_waited_for() -> None:
    _, one, other = boards()
    thread = threading.Thread(target=lambda: (time.sleep(0.2), one.put("a", b"x")))
    thread.start()
    assert other.get(["a"], 0, ABSENT) == ("a", b"x")
    thread.join()
    assert 0.1 < other.waited_s < 5


def test_what_will_not_come_is_not_waited_for() -> None:
    _, one, other = boards()
    with pytest.raises(UsageError, match="not put up"):
        other.get(["a"], 0, ABSENT, is_late=True)
    one.done()
    one.tell()
    with pytest.raises(UsageError, match="not put up"):
        other.get(["a"], 0, ABSENT)


def test_a_mark_that_no_rank_has_made() -> None:
    """It ended in "invalid literal for int()", out of a step."""
    store, _, other = boards()
    store.set("done/0", b"garbage")
    with pytest.raises(ForgedError, match="how far rank 4 is stands in the run's store in a form"):
        other.get(["a"], 0, ABSENT)


def test_ranks_that_have_ended_are_not_waited_for() -> None:
    _, _, other = boards(has_ended=lambda rank: rank == 4)
    with pytest.raises(PeerLostError, match="a value of rank 4 failed: it has ended") as caught:
        other.get(["a"], 0, ABSENT)
    assert caught.value.rank == 4


def test_a_batch_leaves_nothing() -> None:
    """But for marks, which the next batch overwrites."""
    store, one, other = boards()
    sizes = []
    for _ in range(2):
        one.put("a", b"x" * (9 * 2**20))
        for board in (one, other):
            board.mark("passed 0")
            board.done()
            board.tell()
            board.clear()
            board.begin()
        sizes.append(store.num_keys())
    assert sizes == [4, 4]
    with pytest.raises(UsageError):
        other.get(["a"], 0, ABSENT, is_late=True)
