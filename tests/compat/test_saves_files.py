"""``smp.save`` and ``smp.load``; partition files; calls on some of the ranks that must make them.

Saves that end in the middle: what was there before still loads, or the new one does, and nothing else.
"""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import smdistributed.modelparallel.torch as smp
from compat.saving import QUIET, Script, plain
from dying import Counted, die, in_child
from shardwright.checkpoint.disk import Disk
from shardwright.errors import CheckpointError
from shardwright.testing import RanksFailedError, run_ranks, run_ranks_outcomes
from smdistributed.modelparallel.torch.checkpoints.folder import USER_CONTENT, CheckpointFolder
from smdistributed.modelparallel.torch.checkpoints.full import FullCheckpoints, content_name
from smdistributed.modelparallel.torch.checkpoints.records import PartialRecord
from smdistributed.modelparallel.torch.pickles.files import load_file, saves

TWO_STAGES = {"partitions": 2, "microbatches": 2}
OPTIMIZER_SHARED = {"partitions": 1, "shard_optimizer_state": True}


def fails(job: Any, num_ranks: int = 2) -> str:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(job, num_ranks)
    return str(caught.value)


def test_each_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    """In the style of scripts before 1.10, which save one dictionary with everything."""
    file = str(tmp_path / "checkpoints" / "model.pt")

    def saves() -> Any:
        script = Script(TWO_STAGES)
        script.train(3)
        smp = script.smp
        content = {
            "model": script.model.local_state_dict(),
            "optimizer": script.optimizer.save_optimizer_backcompat(gather_if_shard=True),
            "lr_scheduler": script.scheduler.state_dict(),
            "total_steps": 3,
        }
        if smp.rdp_rank() == 0:
            smp.save(content, file, partial=True)
        if smp.rank() == 0:
            smp.save(script.model.get_module().training, file, partial=False)
        return script.train(2)

    expected = run_ranks(saves, 4)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "model.pt",
        "model.pt_0_0",
        "model.pt_1_0",
    ]

    def loads() -> Any:
        script = Script(TWO_STAGES)
        smp = script.smp
        checkpoint = smp.load(file, partial=True, back_compat=True)
        script.model.load_state_dict(checkpoint["model"], same_partition_load=True)
        script.optimizer.load_optimizer_backcompat(checkpoint["optimizer"], gather_if_shard=True)
        script.scheduler.load_state_dict(checkpoint["lr_scheduler"])
        assert smp.load(file, partial=False) is True
        return script.train(2, begin=3)

    assert run_ranks(loads, 4) == expected


def test_replicas_with_parts_of_their_own(tmp_path: Path) -> None:
    """As the Trainer of transformers 4.28: v3 names, and the state comes back after the first step."""
    file = str(tmp_path / "optimizer.pt")

    def saves() -> Any:
        script = Script(OPTIMIZER_SHARED)
        script.train(3)
        smp = script.smp
        state = script.optimizer.local_state_dict(gather_if_shard=False)
        smp.barrier()
        smp.save(state, file, partial=True, v3=smp.state.cfg.shard_optimizer_state)
        whole = script.optimizer.local_state_dict(gather_if_shard=True)
        if smp.rdp_rank() == 0:
            smp.save(whole, str(tmp_path / "gathered.pt"), partial=True)
        return plain(script.optimizer.state_dict())

    (expected, _) = run_ranks(saves, 2)
    assert {path.name for path in tmp_path.iterdir()} == {
        "optimizer.pt_0_0_0",
        "optimizer.pt_0_0_1",
        "gathered.pt_0_0",
    }

    def loads(name: str) -> Any:
        script = Script(OPTIMIZER_SHARED)
        smp = script.smp

        def hook(model: Any, optimizer: Any) -> None:
            optimizer.load_state_dict(smp.load(str(tmp_path / name), partial=True))

        script.model.register_post_step_hook(hook)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(8, 8, generator=generator, dtype=torch.float64)
        script.step(script.model, x, torch.zeros(8, dtype=torch.long))
        return plain(script.optimizer.state_dict())

    for name in ("optimizer.pt", "gathered.pt"):
        for found in run_ranks(loads, 2, name):
            assert found["state"] == expected["state"]


def test_what_cannot_be_loaded_or_saved(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"

    def one(call: str, *args: Any, **options: Any) -> Any:
        def job() -> None:
            smp = Script({"partitions": 1}).smp
            getattr(smp, call)(*args, **options)

        return fails(job, 1)

    assert "there is no file for rank 0 (pipeline rank 0): model.pt_0_0 or" in one("load", str(file))
    assert f"{file} is not there, or is no file" in one("load", str(file), partial=False)
    torch.save(1, tmp_path / "model.pt_0_0")
    assert "model.pt_0_0 is: it was saved with partial=True" in one("load", str(file), partial=False)
    torch.save(1, tmp_path / "model.pt_1_0")
    assert "was saved by 2 partitions, and there are 1 now" in one("load", str(file))
    torch.save(1, tmp_path / "full.pt")
    assert "partial=False loads it" in one("load", str(tmp_path / "full.pt"))
    assert "takes the name of a file" in one("save", 1, 3)
    assert "cannot be pickled or copied" in fails(
        lambda: (s := Script({"partitions": 1})).smp.save(s.model, str(tmp_path / "whole")), 1
    )
    assert not list(tmp_path.glob("whole*"))


def stores(file: str) -> Any:
    script = Script({**TWO_STAGES, "partition_file": file})
    losses = script.train(2)
    script.smp.barrier()
    return losses


def test_a_partition_file_that_contradicts_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "partition.json"
    run_ranks(stores, 2, str(file))
    given = {**QUIET, "ddp": True, "load_partition": True, "partition_file": str(file)}

    def begin(settings: dict[str, Any]) -> Any:
        def job() -> None:
            smp.init(settings)

        return fails(job)

    text = begin({**given, "partitions": 1, "microbatches": 4})
    assert f"partition_file {file} contradicts the settings" in text
    assert "partitions is 2 in the file, and 1 in the settings" in text
    assert "microbatches is 2 in the file, and 4 in the settings" in text
    missing = str(tmp_path / "none")
    text = begin({**given, **TWO_STAGES, "partition_file": missing})
    assert f"ConfigError: partition_file {missing} cannot be read: No such file or directory. A run" in text
    text = begin({**QUIET, **TWO_STAGES, "load_partition": True})
    assert "load_partition is True, but partition_file is not set" in text
    file.write_text(file.read_text()[:100])
    assert "is no JSON" in begin({**given, **TWO_STAGES})


def some_ranks(root: str) -> Any:
    """The first rank alone makes a call; the other one goes on to the next step."""
    script = Script({**TWO_STAGES, "shared_memory": False})
    script.train(1)
    if script.smp.rank() == 0:
        script.smp.save_checkpoint(root, "a", model=script.model)
    else:
        script.train(1)


def test_a_call_on_some_ranks_names_the_missing_ones(tmp_path: Path) -> None:
    first, second = run_ranks_outcomes(some_ranks, 2, str(tmp_path), timeout_s=50)
    assert "smp.save_checkpoint() is to be called by all of ranks 0, 1. Rank 1 has not come" in first.cause
    assert "rank 1 is in the step function" in first.cause
    assert "Call it on all of them, in the same order" in first.cause
    assert first.seconds < 15
    assert "rank 0 failed first (UsageError" in second.cause


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
    [((), "partial"), (("b", "a"), "partial"), (("a", "b", "c"), "full")],
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
