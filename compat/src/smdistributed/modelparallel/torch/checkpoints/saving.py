"""``smp.save_checkpoint``: a partial checkpoint, into which every rank writes, or a full one of the model.

::

    all ranks    come together; make what they write
    rank 0       makes the folder {tag}_partial.tmp-...
    all ranks    write their files, each with fsync, and tell their sizes and checksums
    rank 0       writes user_content.pt, partition.json, manifest.json; renames the folder; replaces newest;
                 removes old ones
    all ranks    learn how it went
"""

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from shardwright.checkpoint.disk import Disk, FileEntry
from shardwright.errors import CheckpointError, UsageError
from shardwright.run.joint_calls import meet
from shardwright.torch.startup import ScriptRun
from smdistributed.modelparallel.comm import allgather
from smdistributed.modelparallel.groups import CommGroup
from smdistributed.modelparallel.torch.checkpoints.folder import (
    PARTITION,
    USER_CONTENT,
    CheckpointFolder,
    tag_of,
)
from smdistributed.modelparallel.torch.checkpoints.full import FullCheckpoints, content_name
from smdistributed.modelparallel.torch.checkpoints.rank_files import contents_of_this_rank
from smdistributed.modelparallel.torch.checkpoints.records import PartialRecord
from smdistributed.modelparallel.torch.checkpoints.sharded_rank_files import BUFFER_NAMES, PARAM_SHAPES
from smdistributed.modelparallel.torch.pickles.files import TRUST, load_file, saves
from smdistributed.modelparallel.torch.state_mod import current_run, state

_T = TypeVar("_T")
_CALL = "smp.save_checkpoint()"


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    partial: bool = True,
    model: Any = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Saves a checkpoint; all ranks call it, between two steps.

    It is there whole, or not at all: a save that is interrupted leaves what was there before.

    Args:
        path: the folder of checkpoints; one that all hosts share.
        partial: each rank saves what it has of model and optimizer. Else the first rank saves the whole
            model, and nothing of the optimizer.
        user_content: whatever the script wants back; that of the first rank is saved.
        translate_if_full: a full one has Hugging Face's names, where the model has others.
        num_kept_partial_checkpoints: older partial checkpoints than so many are removed; None: none are.
    """
    run, tag = current_run(), tag_of(tag)
    _check(run, partial, model, optimizer, num_kept_partial_checkpoints)
    meet(_CALL)
    if partial:
        content = _PartialSave(run, Path(path), tag, Disk())
        content.save(model, optimizer, user_content, keep=num_kept_partial_checkpoints)
    else:
        _save_full(run, Path(path), tag, model, user_content, translate=translate_if_full)


def _check(run: ScriptRun, partial: bool, model: Any, optimizer: Any, keep: Any) -> None:
    if model is not None and model is not state.model:
        raise UsageError(
            f"smp.save_checkpoint gets a {type(model).__name__} that is not the wrapped model. Pass what "
            "smp.DistributedModel(...) has returned."
        )
    if optimizer is not None and not any(optimizer is known for known in run.optimizers):
        raise UsageError(
            f"smp.save_checkpoint gets a {type(optimizer).__name__} that is no wrapped optimizer. Pass what "
            "smp.DistributedOptimizer(...) has returned."
        )
    if optimizer is not None and model is None:
        raise UsageError("smp.save_checkpoint gets an optimizer and no model. Pass both.")
    if not partial and model is None:
        raise UsageError("a full checkpoint is one of the model. Pass model=, or partial=True.")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise UsageError(
            f"num_kept_partial_checkpoints is {keep!r}, but it is a number of checkpoints, at least 1, or "
            "None."
        )
    if partial and model is not None and not model.partitioned:
        raise UsageError(
            "a partial checkpoint has what each rank holds, and the model is partitioned in the first step. "
            "Save after it, or with partial=False."
        )


def _on_first_rank(run: ScriptRun, make: Callable[[], _T]) -> _T:
    """What the first rank makes, on every rank; all fail with what it fails with; collective."""

    def guarded() -> _T:
        try:
            return make()
        except OSError as error:
            raise CheckpointError(f"the checkpoint could not be saved: {_told(error)}.") from error

    return run.from_first_rank(guarded)


class _PartialSave:
    """A save into which every rank writes."""

    def __init__(self, run: ScriptRun, path: Path, tag: str, disk: Disk):
        self._run = run
        self._tag = tag
        self._folder = CheckpointFolder(path, disk=disk)

    def save(self, model: Any, optimizer: Any, user_content: Any, *, keep: int | None) -> None:
        """Saves; collective over all ranks."""
        run, folder = self._run, self._folder
        contents = {} if model is None else contents_of_this_rank(run, model, optimizer)
        draft = _on_first_rank(run, lambda: folder.begin(self._tag))
        files, problem = self._write(draft, contents)
        told = allgather((files, problem), CommGroup.WORLD)
        problems = [f"rank {rank}: {each}" for rank, (_, each) in enumerate(told) if each]
        together = {name: entry for found, _ in told for name, entry in found.items()}
        described: dict[str, Any] = contents.get("model_0.pt", {})  # of sharded data parallelism
        _on_first_rank(
            run, lambda: self._finish(draft, together, problems, user_content, described, keep=keep)
        )

    def _write(self, draft: Path, contents: Mapping[str, Any]) -> tuple[dict[str, FileEntry], str]:
        """Writes the files of this rank; tells what went wrong."""
        files: dict[str, FileEntry] = {}
        try:
            for name, content in contents.items():
                files[name] = self._folder.add(draft, name, saves(_compact(content)))
        except FileNotFoundError:
            return files, f"{draft} is not there. Give a folder that all hosts share"
        except OSError as error:
            return files, _told(error)
        return files, ""

    def _finish(
        self,
        draft: Path,
        files: dict[str, FileEntry],
        problems: list[str],
        user_content: Any,
        described: Mapping[str, Any],
        *,
        keep: int | None,
    ) -> None:
        """Commits what the ranks have written; on the first rank."""
        try:
            problems = problems or [
                f"{name} was written with {entry.size} bytes, and rank 0 does not find it so in {draft}. "
                "Give a folder that all hosts share"
                for name, entry in files.items()
                if not (draft / name).is_file() or (draft / name).stat().st_size != entry.size
            ]
            if problems:
                raise CheckpointError(
                    f"the checkpoint could not be saved: {problems[0]}. Nothing was changed."
                )
            added = self._add_documents(draft, files, user_content, described)
            self._folder.commit(draft, self._record(files, added, has_user_content=user_content is not None))
        except BaseException:
            self._folder.discard(draft)
            raise
        self._folder.collect(keep=keep)

    def _add_documents(
        self, draft: Path, files: dict[str, FileEntry], user_content: Any, described: Mapping[str, Any]
    ) -> tuple[str, ...]:
        """Writes what belongs to no rank; returns what was added to the user's content."""
        added: dict[str, Any] = {}
        if self._run.mesh.shard > 1 and (user_content is None or isinstance(user_content, dict)):
            # Tools that merge shards look for it there.
            wanted = {key: described[key] for key in (BUFFER_NAMES, PARAM_SHAPES) if key in described}
            added = {key: value for key, value in wanted.items() if key not in (user_content or {})}
        if user_content is not None or added:
            content = {**(user_content or {}), **added} if added else user_content
            files[USER_CONTENT] = self._folder.add(draft, USER_CONTENT, saves(_compact(content)))
            _warn_of_content(draft / USER_CONTENT)
        if self._run.plan is not None:
            plan = self._run.plan.to_json().encode()
            files[PARTITION] = self._folder.add(draft, PARTITION, lambda file: file.write(plan))
        return tuple(added)

    def _record(
        self, files: Mapping[str, FileEntry], added: tuple[str, ...], *, has_user_content: bool
    ) -> PartialRecord:
        mesh = self._run.mesh
        return PartialRecord(
            tag=self._tag,
            files=dict(files),
            number=self._folder.next_number(),
            world_size=mesh.world_size,
            pipeline=mesh.pipeline,
            tensor=mesh.tensor,
            data=mesh.data,
            shard=mesh.shard,
            added=added,
            has_user_content=has_user_content,
        )


def _save_full(
    run: ScriptRun, path: Path, tag: str, model: Any, user_content: Any, *, translate: bool
) -> None:
    """Saves the whole model; collective over all ranks."""
    found: Mapping[str, Any] = {}
    if run.data_rank < run.mesh.shard:  # the ranks that have one whole model
        found = model.state_dict(gather_to_rank0=True)

    def write() -> None:
        functions = state.module_manager.translate_functions
        names = functions[0][0](found) if translate and len(functions) == 1 else found
        contents = {tag: names, **({} if user_content is None else {content_name(tag): user_content})}
        FullCheckpoints(path).commit(tag, {name: saves(_compact(each)) for name, each in contents.items()})
        if user_content is not None:
            _warn_of_content(path / content_name(tag))
        CheckpointFolder(path).point_to(tag)

    _on_first_rank(run, write)


def _compact(content: Any) -> Any:
    """The same, with tensors in memory of their own size: files get all of the memory that one is part of."""
    if isinstance(content, Tensor) and not content.is_meta:
        whole = content.detach()
        return whole.clone() if whole.untyped_storage().nbytes() > whole.nbytes else whole
    kind = type(content)
    if kind in (dict, OrderedDict):
        return kind((key, _compact(value)) for key, value in content.items())
    return kind(map(_compact, content)) if kind in (list, tuple) else content


def _warn_of_content(path: Path) -> None:
    """Warns where the script would not get back what it gave without more ado."""
    try:
        load_file(path, "cpu")
    except CheckpointError as error:
        warnings.warn(
            f"user_content is saved, but smp.resume_from_checkpoint will not load it without {TRUST}=1: "
            f"{error}",
            stacklevel=2,
        )


def _told(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}"
