"""Resumes a run from a checkpoint of any layout."""

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwright.checkpoint.folder import CheckpointFolder, Commit
from shardwright.checkpoint.importing import STATE
from shardwright.checkpoint.safe_files import reading
from shardwright.checkpoint.saved import SavedCheckpoint
from shardwright.comm.codec import declare
from shardwright.errors import CheckpointError, CorruptCheckpointError, PlanError
from shardwright.plan import MeshPlan, Plan
from shardwright.planner import overruled_settings
from shardwright.run.launch_settings import following
from shardwright.torch.checkpoints.encoded import StateObjects, decode
from shardwright.torch.checkpoints.own_loading import (
    WEIGHTS_ALONE,
    check_fits,
    load_model,
    load_optimizer_state,
    refuse_another_kind,
)
from shardwright.torch.checkpoints.snapshot import (
    PLAN,
    OptimizerDocument,
    SavedLayout,
    StateDocument,
    check_extra_states,
    further_generators,
    optimizer_prefix,
    remake,
    set_extra_states,
    set_generators,
)
from shardwright.torch.checkpoints.state_dict_files import dtype_of, read_part
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.optimizer.distributed_optimizer import DistributedOptimizer
from shardwright.torch.parameters.parameter_kinds import BufferKind
from shardwright.torch.startup import ScriptRun

declare(Commit)

log = logging.getLogger(__name__)

_UPDATES = "shard_optimizer_state"  # whose groups the run has made already


def open_verified(
    context: ScriptRun, folder: CheckpointFolder, name: str | None, *, allow_older: bool
) -> SavedCheckpoint | None:
    """Opens a checkpoint, and compares all checksums; collective over all ranks, which share that work."""
    commits = context.from_first_rank(lambda: _candidates(folder, name))
    problems: list[str] = []
    for commit in reversed(commits):
        try:
            opened = _opened(context, folder, commit)
        except CorruptCheckpointError as error:
            problems.append(str(error))
            if allow_older:
                continue
            remedy = (
                " resume(allow_older=True) goes on from the one before it; so does resume() once the damaged "
                "folder is removed."
            )
            text = f"{error} Nothing was loaded.{remedy if len(commits) > 1 else ''}"
            raise CorruptCheckpointError(text) from error
        if problems and context.rank == 0:
            warnings.warn(
                f"{problems[0]} Going on from {commit.name}, which is older, as allow_older says.",
                stacklevel=4,
            )
        return opened
    if not problems:
        return None
    raise CorruptCheckpointError(
        f"none of {len(problems)} checkpoints in {folder.root} can be used. {problems[0]}"
    )


def _candidates(folder: CheckpointFolder, name: str | None) -> tuple[Commit, ...]:
    """The checkpoints up to the one that is asked for, oldest first."""
    commits = folder.commits()
    names = [commit.name for commit in commits]
    if name is None:
        return commits
    if name not in names:
        raise CheckpointError(
            f"{folder.root} has no checkpoint {name}. It has {', '.join(names) or 'none at all'}."
        )
    return commits[: names.index(name) + 1]


def _opened(context: ScriptRun, folder: CheckpointFolder, commit: Commit) -> SavedCheckpoint:
    share = (context.rank, context.mesh.world_size)
    saved: list[SavedCheckpoint] = []

    def compare_checksums() -> None:
        saved.append(folder.open(commit.name, verify=False))
        with reading(saved[0].path):
            saved[0].manifest.check(saved[0].path, share=share)

    # Only when all checksums are right: what else is wrong may follow from a damaged file.
    for look in (compare_checksums, lambda: saved[0].check()):
        problem = problem_of(look, rank=context.rank)
        found = context.from_all_ranks(problem)
        problems = [each for each in found if each is not None]
        if problems:  # a rank that could not read comes first: no older checkpoint is taken for that
            raise min(problems, key=lambda each: isinstance(each, CorruptCheckpointError))
    return saved[0]


def problem_of(look: Callable[[], None], *, rank: int) -> CheckpointError | None:
    """Describes the failure of a rank's look at a checkpoint, whatever it raises: the others wait for it."""
    try:
        look()
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):  # it may be of this rank's machine
            return type(error)(f"On rank {rank}: {error}")
        return error
    except Exception as error:  # no memory: nothing is known of the checkpoint
        log.info("a checkpoint could not be verified", exc_info=True)
        return CheckpointError(
            f"rank {rank} could not verify its part of the checkpoint, which says nothing of that: "
            f"{type(error).__name__}: {error}"
        )
    return None


class Resumed:
    """A run resumed from a checkpoint.

    Attributes:
        calls: of step functions that trained until then.
        waits: the first step loads what this rank has of it.
        missing: names of the run's states that an imported checkpoint does not have.
    """

    def __init__(self, context: ScriptRun, model: DistributedModel, saved: SavedCheckpoint, *, strict: bool):
        self._context = context
        self._model = model
        self._saved = saved
        self._strict = strict
        name = str(saved.path / STATE)
        self._document = StateDocument.from_content(saved.document(STATE), name=name)
        self.step = self._document.step
        self.calls = self.step if self._document.calls is None else self._document.calls
        self._remade = _remade(model, self._document, saved)
        self.waits = False
        self.missing: list[str] = []

    def check(self, states: Mapping[str, Any]) -> None:
        """Refuses a checkpoint of another model, or of a run with other optimizers or states."""
        check_fits(self._model, self._saved, strict=self._strict, remade=self._remade)
        document, optimizers = self._document, self._context.optimizers
        imported = document.layout is None
        if imported and not document.optimizers:  # a model and nothing else
            return
        if len(document.optimizers) != len(optimizers):
            raise CheckpointError(
                f"{self._saved.path} has {len(document.optimizers)} optimizers, and this run has "
                f"{len(optimizers)}. Wrap in sw.DistributedOptimizer those that were wrapped when it was "
                "saved, in the same order, before resume()."
            )
        if self._strict and not imported:
            check_extra_states(self._model, document.extra_states)
            self._check_types()
        for saved, optimizer in zip(document.optimizers, optimizers, strict=True):
            if len(saved.groups) != len(optimizer.param_groups):
                raise CheckpointError(
                    f"{self._saved.path} has an optimizer with {len(saved.groups)} parameter groups, and "
                    f"here it has {len(optimizer.param_groups)}. Make the groups as they were; or "
                    f"{WEIGHTS_ALONE}"
                )
            for options, group in zip(saved.groups, optimizer.param_groups, strict=True):
                refuse_another_kind(self._saved.path, options, group, optimizer.optimizer)
            self._places_of_groups(saved, optimizer)
        theirs = document.states.keys() | document.states_of_ranks.keys()
        if theirs != states.keys() and not imported:
            raise CheckpointError(
                f"{self._saved.path} has the states {sorted(theirs)}, and this run has {sorted(states)}. "
                "Give sw.Checkpoints(state={...}) the names that were there when it was saved."
            )
        apart = [name for name in document.states_of_ranks if self._saved_rank(name) is None]
        if apart:
            assert document.layout is not None
            raise CheckpointError(
                f"{self._saved.path} has states that differ by rank ({', '.join(apart)}), of "
                f"{document.layout.world_size} ranks with {document.layout.data} replicas, and this run has "
                f"{self._context.mesh.world_size} with {self._context.mesh.data}. Resume with as many "
                "replicas, if the ranks of each have one state, or with the same ranks; or leave these "
                "states out. The state of sw.data_loader goes with any number of ranks, also for a stream, "
                "which it reads for all replicas."
            )

    def load(self, states: Mapping[str, Any]) -> None:
        remake(self._model, self._remade)
        self._adopt_plan()
        model, document = self._model, self._document
        for saved, optimizer in zip(document.optimizers, self._context.optimizers, strict=False):
            places = self._places_of_groups(saved, optimizer)
            for place, group in zip(places, optimizer.param_groups, strict=True):
                group.update(self._decoded(saved.groups[place], f"optimizer.groups[{place}]"))
        if not model.waits_for_memory:
            load_model(model, self._saved)
        self._saved.map_files()  # they may be collected before the first step
        self.waits = not model.settled
        late = model.waits_for_memory
        model.when_settled(lambda: self._load_when_settled(model_too=late))
        set_extra_states(model, self._named(document.extra_states, "extra_state"))
        if model.scaling is not None and document.loss_scale is not None:
            model.scaling.scaler.restore(document.loss_scale)
        for name, each in states.items():
            if document.layout is None and name not in document.states:
                self.missing.append(name)
            else:
                each.load_state_dict(self._state_of(name))
        self._restore_generators()
        if not self.waits:
            self._saved.forget_files()

    def _load_when_settled(self, *, model_too: bool) -> None:
        if model_too:
            load_model(self._model, self._saved)
        for number, optimizer in enumerate(self._context.optimizers[: len(self._document.optimizers)]):
            others = self._document.optimizers[number].others
            load_optimizer_state(
                self._model,
                optimizer,
                self._saved,
                others={name: self._decoded(value, name) for name, value in others.items()},
                prefix=optimizer_prefix(number),
            )
        if self.waits:
            self._saved.forget_files()
        self.waits = False

    def _places_of_groups(self, saved: OptimizerDocument, optimizer: DistributedOptimizer) -> list[int]:
        """Matches groups with saved ones, by the parameters in them."""
        names = {id(parameter): name for name, parameter in self._model.module.named_parameters()}
        left, places = list(range(len(saved.groups))), []
        for number, group in enumerate(optimizer.param_groups):
            own = {names[id(parameter)] for parameter in group["params"] if id(parameter) in names}
            fitting = [place for place in left if own <= set(saved.members[place])]
            if not fitting:
                raise CheckpointError(
                    f"{self._saved.path} has no parameter group with the parameters of group {number} of the "
                    f"optimizer here ({', '.join(sorted(own)[:3])}, ...). Make the groups as they were; or "
                    f"{WEIGHTS_ALONE}"
                )
            places.append(number if number in fitting else fitting[0])
            left.remove(places[-1])
        return places

    @property
    def _same_layout(self) -> bool:
        """Whether each rank is where it was; how replicas share parameters is no matter."""
        layout, own = self._document.layout, SavedLayout.of(self._context.mesh)
        return layout is not None and layout.model_copy(update={"shard": own.shard}) == own

    def _state_of(self, name: str) -> Any:
        of_ranks = self._document.states_of_ranks.get(name)
        content = self._document.states[name] if of_ranks is None else of_ranks[str(self._saved_rank(name))]
        return self._decoded(content, f"state {name}")

    def _saved_rank(self, name: str) -> int | None:
        """Whose state this rank takes, of one that differed by rank; None where nobody's is its own.

        What replicas have, such as the position in a stream of theirs, goes along with as many of them.
        """
        layout, mesh, states = self._document.layout, self._context.mesh, self._document.states_of_ranks[name]
        if self._same_layout:
            return self._context.rank
        if layout is None or layout.data != mesh.data:
            return None
        for ranks in layout.mesh.groups("mp"):
            if len({self._digest(name, states[str(rank)]) for rank in ranks}) > 1:
                return None
        return layout.rank_of_replica(self._context.data_rank)

    def _digest(self, name: str, content: Any) -> str:
        return StateObjects({}).digest(name, self._decoded(content, f"state {name}"))

    def _restore_generators(self) -> None:
        document, context = self._document, self._context
        if document.layout is None:
            return
        rank, replica = context.rank, context.data_rank
        if not self._same_layout:
            rank = document.layout.rank_of_replica(replica)
        states = self._decoded(document.random[str(rank)], "random")
        if replica >= document.layout.data:
            further_generators(states, replica)
        else:
            set_generators(states, context.device)

    def _adopt_plan(self) -> None:
        """Follows the plan of the checkpoint, if that is one for these ranks, settings and types."""
        context = self._context
        if context.plan is not None or PLAN not in self._saved.manifest.files:
            return
        if self._remade:
            log.info("the plan of the checkpoint is not followed: buffers had other shapes when it was made")
            return
        try:
            plan = Plan.of_document(self._saved.document(PLAN), source=str(self._saved.path / PLAN))
        except PlanError as error:
            raise CorruptCheckpointError(str(error)) from error
        same = plan.mesh == MeshPlan.of(context.mesh)
        if same:  # true, and the number of all replicas, mean the same
            of_plan = context.config.model_copy(update={_UPDATES: plan.pins.get(_UPDATES, False)})
            same = of_plan.num_updating(context.mesh) == context.config.num_updating(context.mesh)
        overruled = list(overruled_settings(plan, context.config)) if same else []
        if not same or overruled or not self._has_types():
            log.info("the plan of the checkpoint is not followed: %s", overruled or "other ranks or types")
            return
        try:
            plan.check_world(context.mesh.world_size)
        except PlanError as error:
            log.info("the plan of the checkpoint is not followed: %s", error)
            return
        context.plan = plan
        context.config = following(plan, context.config, warns=False)

    def _check_types(self) -> None:
        """Refuses a model of other types: the state of its optimizer would not go with it."""
        own = (*self._model.module.named_parameters(), *self._model.module.named_buffers())
        for name, tensor in own:
            entry = self._saved.index.tensors.get(f"model/{name}")
            if entry is not None and name not in self._remade and dtype_of(entry.dtype) is not tensor.dtype:
                raise CheckpointError(
                    f"{self._saved.path} has {name} in {dtype_of(entry.dtype)}, and here it is in "
                    f"{tensor.dtype}. Resume with the type and the precision settings (bf16, fp16) that were "
                    "saved; or take the model alone over: shardwright ckpt export, then import. strict=False "
                    "converts."
                )

    def _has_types(self) -> bool:
        """Whether tensors of the model have the types that were saved: plans are for models with types."""
        saved = self._saved
        own = (*self._model.module.named_parameters(), *self._model.module.named_buffers())
        types = {name: tensor.dtype for name, tensor in own}
        entries = saved.index.tensors
        return all(
            dtype_of(entries[f"model/{name}"].dtype) is dtype
            for name, dtype in types.items()
            if f"model/{name}" in entries
        )

    def _named(self, states: Mapping[str, Any], what: str) -> dict[str, Any]:
        return {name: self._decoded(state, f"{what} {name}") for name, state in states.items()}

    def _decoded(self, content: Any, name: str) -> Any:
        return decode(content, name=name, tensor=self._tensor)

    def _tensor(self, name: str) -> torch.Tensor:
        return read_part(self._saved, name)


def _remade(
    model: DistributedModel, document: StateDocument, saved: SavedCheckpoint
) -> dict[str, BufferKind]:
    """Buffers that were saved with another shape or type than at first, where they were as here at first."""
    found = {}
    for name, first in document.buffers.items():
        entry = saved.index.tensors.get(f"model/{name}")
        was = None if first is None else BufferKind.from_json(first)
        if entry is not None and model.first_buffers.get(name) == was:
            found[name] = BufferKind(tuple(entry.shape), dtype_of(entry.dtype))
    return found
