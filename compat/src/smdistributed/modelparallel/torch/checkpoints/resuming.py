"""``smp.resume_from_checkpoint``: has a run go on from what ``smp.save_checkpoint`` has saved."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwright.checkpoint.safe_files import reading
from shardwright.errors import CheckpointError, CorruptCheckpointError
from shardwright.plan import Plan
from shardwright.run.joint_calls import meet
from shardwright.torch.checkpoints.resuming import problem_of
from shardwright.torch.pytorch.modules import stacklevel_of_user
from shardwright.torch.startup import ScriptRun
from smdistributed.modelparallel.comm import allgather
from smdistributed.modelparallel.groups import CommGroup
from smdistributed.modelparallel.torch.checkpoints.folder import (
    PARTITION,
    USER_CONTENT,
    CheckpointFolder,
    PartialCheckpoint,
    tag_of,
)
from smdistributed.modelparallel.torch.checkpoints.full import FullCheckpoints
from smdistributed.modelparallel.torch.checkpoints.rank_files import model_state, optimizer_state
from smdistributed.modelparallel.torch.deferred_calls import when_model_is_there
from smdistributed.modelparallel.torch.pickles.files import load_file
from smdistributed.modelparallel.torch.state_mod import current_run, state


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[Any], Any] | None = None,
) -> Any:
    """Loads a checkpoint; all ranks call it, before the first step or between two.

    A partial one holds for the partition that it was saved with, which is that of this run from now on.

    Args:
        partial: a partial one; else a full one, which has nothing of the optimizer.
        translate_function: makes the state of this model from that of a full checkpoint.

    Returns:
        What the script had given as ``user_content``; None where that was nothing.

    Raises:
        CheckpointError: there is no such checkpoint, or it is of another model or of another layout.
    """
    run = current_run()
    meet("smp.resume_from_checkpoint()")
    root = Path(path)
    chosen = run.from_first_rank(lambda: CheckpointFolder(root).newest() if tag is None else tag_of(tag))
    if not partial:
        return _resume_full(run, root, chosen, strict=strict, translate=translate_function)
    checkpoint = _opened(run, root, chosen)
    folder = checkpoint.path
    same = _lock_partition(run, checkpoint)
    content = _content_of(checkpoint)

    def load(model: Any) -> None:
        with _named(folder):
            model.load_state_dict(model_state(run, folder), strict=strict, same_partition_load=same)
            if load_optimizer:
                saved = optimizer_state(run, folder, shared_too=load_sharded_optimizer_state)
                _load_optimizer(model, saved, folder)

    when_model_is_there(load)
    return content


def _resume_full(
    run: ScriptRun, root: Path, tag: str, *, strict: bool, translate: Callable[[Any], Any] | None
) -> Any:
    path, content = run.from_first_rank(lambda: FullCheckpoints(root).find(tag))

    def load(model: Any) -> None:
        found = load_file(path, "cpu", mmap=True)
        with _named(path):
            model.load_state_dict(found if translate is None else translate(found), strict=strict)

    when_model_is_there(load)
    return None if content is None else load_file(content, "cpu")


def _opened(run: ScriptRun, root: Path, tag: str) -> PartialCheckpoint:
    """Opens a checkpoint whose files were compared with their checksums; ranks share that work."""
    chosen = run.from_first_rank(lambda: CheckpointFolder(root).partial(tag).path)
    opened: list[PartialCheckpoint] = []

    def verify() -> None:
        with reading(chosen):
            opened.append(CheckpointFolder(root).partial_at(chosen))
            opened[0].verified(share=(run.rank, run.mesh.world_size))

    problem = problem_of(verify, rank=run.rank)
    problems = [each for each in allgather(problem, CommGroup.WORLD) if each is not None]
    if problems:  # what a rank cannot read for a reason of its own says nothing of the checkpoint
        raise min(problems, key=lambda each: isinstance(each, CorruptCheckpointError))
    return opened[0]


def _lock_partition(run: ScriptRun, checkpoint: PartialCheckpoint) -> bool:
    """Has the units run where they ran when it was saved; returns whether they do.

    They do not where this run was partitioned before: by its first step, or by a file.
    """
    record, mesh = checkpoint.record, run.mesh
    pairs = {
        "ranks": (record.world_size, mesh.world_size),
        "partitions": (record.pipeline, mesh.pipeline),
        "tensor_parallel_degree": (record.tensor, mesh.tensor),
        "sharded_data_parallel_degree": (record.shard, mesh.shard),
    }
    problems = [f"{key}: {there} there, {here} here" for key, (there, here) in pairs.items() if there != here]
    if problems:
        raise CheckpointError(
            f"{checkpoint.path} is a partial checkpoint of another layout ({'; '.join(problems)}), and each "
            "rank loads what the rank in its place has saved. Start as many ranks with the same settings; or "
            "save a full one (smp.save_checkpoint(..., partial=False)); or use sw.Checkpoints of "
            "shardwright.torch, whose checkpoints go with any layout."
        )
    if PARTITION not in record.files:
        return True
    plan = Plan.read(checkpoint.path / PARTITION)
    if run.plan is not None:
        return [(s.rank, s.units) for s in plan.stages] == [(s.rank, s.units) for s in run.plan.stages]
    microbatches = run.config.microbatches
    if microbatches is not None and microbatches != plan.schedule.microbatches:
        warnings.warn(
            f"microbatches was {plan.schedule.microbatches} when the checkpoint was saved, and is "
            f"{microbatches} now. The partition stays as it was.",
            stacklevel=stacklevel_of_user(),
        )
        schedule = plan.schedule.model_copy(update={"microbatches": microbatches})
        plan = plan.model_copy(update={"schedule": schedule, "prediction": None})
    run.plan, state.resumed_from = plan, str(checkpoint.path)
    return True


@contextmanager
def _named(source: Path) -> Iterator[None]:
    """Names the checkpoint in errors of what it has."""
    try:
        yield
    except CheckpointError as error:
        if str(source) in str(error):
            raise
        raise type(error)(f"{source} cannot be loaded: {error}") from error


def _content_of(checkpoint: PartialCheckpoint) -> Any:
    record = checkpoint.record
    if USER_CONTENT not in record.files or not record.has_user_content:
        return None
    content = load_file(checkpoint.path / USER_CONTENT, "cpu")
    for key in record.added:
        content.pop(key, None)
    return content


def _load_optimizer(model: Any, saved: dict[str, Any] | None, folder: Path) -> None:
    """Loads the optimizer: now, or when it is wrapped."""
    if saved is None:
        is_there = any(folder.glob("optimizer_*.pt"))
        if state.optimizer is not None and not is_there and current_run().rank == 0:
            warnings.warn(f"{folder} has no state of an optimizer that is to be loaded here.", stacklevel=2)
        return
    if state.optimizer is not None:
        state.optimizer.load_state_dict(saved)
        return

    def load() -> None:
        if state.optimizer is None:
            raise CheckpointError(
                f"{folder} has the state of an optimizer, and none is wrapped. Wrap it by "
                "smp.DistributedOptimizer before the first step, or resume with load_optimizer=False."
            )
        state.optimizer.load_state_dict(saved)

    model.when_settled(load)
