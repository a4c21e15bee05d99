"""Saves that end in the middle: what was there before still loads, or the new one does, and nothing else."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from choices import combinations_of
from compat.saving import Script, plain
from dying import die, in_child
from shardwright.checkpoint.disk import Disk
from shardwright.errors import CheckpointError
from shardwright.testing import run_ranks_outcomes
from smdistributed.modelparallel.torch.checkpoints.folder import USER_CONTENT, CheckpointFolder
from smdistributed.modelparallel.torch.checkpoints.full import FullCheckpoints, content_name
from smdistributed.modelparallel.torch.checkpoints.records import PartialRecord
from smdistributed.modelparallel.torch.pickles.files import load_file, saves


class Counted:
    """Does something before an operation on the disk."""

    def __init__(self, at: int | None, action: Callable[[], None]):
        self.operations: list[tuple[str, str]] = []
        self._at = at
        self._action = action

    def __call__(self, operation: str, path: Path) -> None:
        if len(self.operations) == self._at:
            self._action()
        self.operations.append((operation, path.name.partition(".tmp-")[0]))

    def places(self) -> list[int]:
        """Each operation, and the last one of the writes to a file: it has a part of its content."""
        known = [*self.operations, None]
        return [i for i, each in enumerate(self.operations) if each != known[i + 1]]


def save_partial(root: Path, tag: str, value: int, *, disk: Disk | None = None, keep: int = 2) -> None:
    """What ranks do together, on one."""
    folder = CheckpointFolder(root, disk=disk)
    draft = folder.begin(tag)
    contents = {"model_0_0.pt": torch.full((8,), value), USER_CONTENT: {"value": value}}
    files = {name: folder.add(draft, name, saves(content)) for name, content in contents.items()}
    number = folder.next_number()
    sizes = {"world_size": 1, "pipeline": 1, "data": 1, "shard": 1}
    folder.commit(draft, PartialRecord(tag=tag, files=files, number=number, **sizes))
    folder.collect(keep=keep)


def partial_value(root: Path, tag: str | None = None) -> int:
    """What a checkpoint has, with all of its files from one save."""
    folder = CheckpointFolder(root)
    path = folder.partial(tag or folder.newest()).verified()
    values = {int(v) for v in load_file(path / "model_0_0.pt").tolist()}
    (value,) = values | {load_file(path / USER_CONTENT)["value"]}
    return value


def save_full(root: Path, tag: str, value: int, *, disk: Disk | None = None) -> None:
    contents = {tag: torch.full((8,), value), content_name(tag): {"value": value}}
    FullCheckpoints(root, disk=disk).commit(tag, {name: saves(c) for name, c in contents.items()})
    CheckpointFolder(root, disk=disk).point_to(tag)


def full_value(root: Path, tag: str | None = None) -> int:
    model, content = FullCheckpoints(root).find(tag or CheckpointFolder(root).newest())
    assert content is not None
    (value,) = {int(v) for v in load_file(model).tolist()} | {load_file(content)["value"]}
    return value


KINDS: dict[str, tuple[Callable[..., None], Callable[..., int]]] = {
    "partial": (save_partial, partial_value),
    "full": (save_full, full_value),
}


@pytest.mark.parametrize(
    ("earlier", "kind"),
    combinations_of(
        [(), ("a",), ("b", "a"), ("a", "b", "c")],
        list(KINDS),
        kept=[((), "partial"), (("b", "a"), "partial"), (("a", "b", "c"), "full")],
    ),
)
def test_killed_at_each_operation(kind: str, earlier: tuple[str, ...], tmp_path: Path) -> None:
    """The last save has the tag "a": a new one, the newest or an older one."""
    save, value = KINDS[kind]

    def begin(root: Path) -> None:
        for number, tag in enumerate(earlier):
            save(root, tag, number)

    begin(tmp_path / "shape")
    counted = Counted(None, die)
    save(tmp_path / "shape", "a", 9, disk=Disk(counted))
    assert {"write", "fsync", "rename", "create"} <= {operation for operation, _ in counted.operations}
    for at in (*counted.places(), len(counted.operations)):
        root = tmp_path / str(at)
        begin(root)
        disk = Disk(Counted(at, die))
        ended = in_child(lambda root=root, disk=disk: save(root, "a", 9, disk=disk))  # type: ignore[misc]
        assert ended == (signal.SIGKILL if at < len(counted.operations) else 0)
        if earlier or at == len(counted.operations):
            newest = CheckpointFolder(root).newest()
            assert value(root) in ({9, len(earlier) - 1} if newest == "a" else {earlier.index(newest)})
        if "a" in earlier:  # an older one that is not kept any more may be gone
            kept = kind == "full" or "a" in earlier[-2:]
            assert not kept or value(root, "a") in {9, earlier.index("a")}
        save(root, "a", 10)  # the next run saves, and clears what was left
        assert value(root) == value(root, "a") == 10
        assert not [path for path in root.iterdir() if ".tmp" in path.name or ".old" in path.name]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_at_any_operation_keeps_the_old_one(kind: str, tmp_path: Path) -> None:
    save, value = KINDS[kind]

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    counted = Counted(None, fail)
    save(tmp_path / "shape", "a", 1)
    save(tmp_path / "shape", "a", 9, disk=Disk(counted))
    for at in counted.places():
        root = tmp_path / str(at)
        save(root, "a", 1)
        with pytest.raises(OSError, match="No space left"):
            save(root, "a", 9, disk=Disk(Counted(at, fail)))
        assert value(root) in {1, 9}
        save(root, "a", 10)
        assert value(root) == 10


def ends_in_the_middle(root: str, how: str) -> Any:
    """Rank 1 is killed, or its disk is full, while it writes its second checkpoint."""
    from smdistributed.modelparallel.torch.checkpoints import saving

    script = Script({"partitions": 2, "microbatches": 2})
    script.train(1)
    smp = script.smp
    smp.save_checkpoint(root, "a", model=script.model, optimizer=script.optimizer)
    before = plain(script.model.state_dict())
    script.train(1)

    def action() -> None:
        if how == "killed":
            die()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model_1_0.pt")

    if smp.rank() == 1:
        saving.Disk = lambda: Disk(Counted(4, action))  # type: ignore[misc,assignment]
    try:
        smp.save_checkpoint(root, "a", model=script.model, optimizer=script.optimizer)
    except CheckpointError as error:
        smp.resume_from_checkpoint(root)
        assert plain(script.model.state_dict()) == before
        return str(error)
    return None


def test_a_full_disk_of_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    outcomes = run_ranks_outcomes(ends_in_the_middle, 2, str(tmp_path), "full")
    for outcome in outcomes:
        assert "rank 1: No space left on device (model_1_0.pt)" in outcome.value, outcome.error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a_partial", "newest"]
