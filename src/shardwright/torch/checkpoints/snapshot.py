"""Copies what a rank saves at one moment, and assembles everything but tensors.

Ranks of one replica draw the same numbers; different replicas draw different ones. A run resumed on other
ranks takes the generators of the saved replica with the same number. A replica with no saved counterpart
derives its generators from those of a saved replica and its own number.

::

    end of step k      copies of the tensors of this rank      (memory to memory; the only wait)
    step k + 1 ...     a thread writes the copies
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import Any, Literal, Self

import numpy
import torch
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from torch import Tensor, nn

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.disk import Record
from shardwright.checkpoint.importing import STATE
from shardwright.checkpoint.safe_files import parse
from shardwright.checkpoint.saved import TensorPart
from shardwright.checkpoint.tensor_file import StoredTensor
from shardwright.checkpoint.tensor_index import MODEL
from shardwright.errors import CheckpointError, CorruptCheckpointError
from shardwright.mesh import Mesh
from shardwright.run.saving import RankSnapshot
from shardwright.torch._private.modules import non_persistent_buffers
from shardwright.torch.checkpoints.encoded import encode
from shardwright.torch.checkpoints.own_parts import model_parts, optimizer_parts
from shardwright.torch.checkpoints.state_dict_files import stored
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.optimizer.distributed_optimizer import DistributedOptimizer
from shardwright.torch.parameters.parameter_kinds import BufferKind
from shardwright.torch.pytorch.functions import RELEASED
from shardwright.torch.startup import ScriptRun, script_run
from shardwright.torch.tensor_parallel.divide import all_elements


def generator_states(device: torch.device) -> dict[str, Any]:
    on_device = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {
        "torch": torch.random.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=False),
        **on_device,
    }


def set_generators(states: Any, device: torch.device) -> None:
    """Has all generators go on from what `generator_states` gave."""
    try:
        torch.random.set_rng_state(states["torch"])
        random.setstate(states["python"])
        numpy.random.set_state(states["numpy"])
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)
    except (LookupError, ArithmeticError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptCheckpointError(f"the checkpoint's random generators cannot be used: {error}") from error


def further_generators(states: Any, replica: int) -> None:
    """Seeds all generators for a replica that the run which saved did not have."""
    saved = states["torch"] if isinstance(states, dict) and "torch" in states else torch.empty(0)
    content = saved.numpy().tobytes() if isinstance(saved, Tensor) else b""
    seed = int.from_bytes(sha256(content + replica.to_bytes(8, "little")).digest()[:4], "little")
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def own_extra_states(model: DistributedModel) -> dict[str, Any]:
    """States of the modules that this rank runs, by name of the module; one rank saves each."""
    run = script_run()
    if run.data_rank:
        return {}
    own = {
        name: all_elements(module.get_extra_state())
        for name, module in _with_extra_states(model)
        if model.runs_here(name)
    }
    return own if run.is_first_holder else {}


def check_extra_states(model: DistributedModel, states: Mapping[str, Any]) -> None:
    """Refuses a checkpoint in which other modules have saved something than do here."""
    modules = dict(_with_extra_states(model))
    different = sorted(modules.keys() ^ states.keys())
    if different:
        raise CheckpointError(
            f"the checkpoint has extra states of {len(states)} modules, and this model has {len(modules)} "
            f"with get_extra_state(); they differ in {', '.join(map(repr, different[:5]))}. Build the model "
            "as it was when it was saved."
        )


def set_extra_states(model: DistributedModel, states: Mapping[str, Any]) -> None:
    """Gives modules their saved extra state; modules without one stay as they are."""
    for name, module in _with_extra_states(model):
        if name in states:
            module.set_extra_state(states[name])


def _with_extra_states(model: DistributedModel) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.get_module().named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def remade_buffers(model: DistributedModel) -> dict[str, list[Any] | None]:
    """The first form of this rank's buffers that were replaced since, as JSON; None for new ones."""
    transient = non_persistent_buffers(model.get_module())
    found: dict[str, list[Any] | None] = {}
    for name, buffer in model.get_module().named_buffers():
        first = model.first_buffers.get(name)
        if name in transient or not model.counts_here(name) or first == BufferKind.of(buffer):
            continue
        found[name] = None if first is None else first.to_json()
    return found


def remake(model: DistributedModel, kinds: Mapping[str, BufferKind]) -> None:
    """Gives buffers of this rank other shapes and types, without values; makes those that are not there."""
    modules = dict(model.get_module().named_modules(remove_duplicate=False))
    for name, module, key in _places(kinds, modules):
        kind, buffer = kinds[name], module._buffers.get(key)
        if buffer is None:
            if not model.partitioned or model.counts_here(name):
                device = _device_of(module, model)
                module.register_buffer(key, torch.empty(kind.shape, dtype=kind.dtype, device=device))
        elif not hasattr(buffer, RELEASED) and BufferKind.of(buffer) != kind:
            buffer.data = torch.empty(kind.shape, dtype=kind.dtype, device=buffer.device)


def _places(
    names: Mapping[str, BufferKind], modules: Mapping[str, nn.Module]
) -> Iterator[tuple[str, nn.Module, str]]:
    for name in names:
        path, _, key = name.rpartition(".")
        if path in modules:
            yield name, modules[path], key


def _device_of(module: nn.Module, model: DistributedModel) -> torch.device:
    """The device of a module's tensors, or else of the model's."""
    for tensors in (module.parameters(), module.buffers(), model.get_module().parameters()):
        if (first := next(tensors, None)) is not None:
            return first.device
    return torch.device("cpu")


@dataclass(slots=True, kw_only=True)
class RankDocument:
    """The JSON that a rank saves beside its parts of tensors.

    Attributes:
        extra_states: of the modules that it stands for, by name.
        optimizers: for each: ``groups``, a list of their options; ``members``, names of their parameters on
            this rank; ``others``, by parameter and key, what its
            state has that is no tensor.
        loss_scale: of ``fp16``; None without.
        states: of schedulers, samplers and the like, by name.
        buffers: of those of this rank that are others now what they were at first, see `remade_buffers`.
    """

    random: Any
    extra_states: dict[str, Any]
    optimizers: list[dict[str, Any]]
    loss_scale: dict[str, Any] | None
    states: dict[str, Any]
    buffers: dict[str, list[Any] | None]


def optimizer_prefix(number: int) -> str:
    """Of the names of the tensors of an optimizer: the first wrapped one, the second, ..."""
    return "optimizer/" if number == 0 else f"optimizer{number + 1}/"


def take_snapshot(
    context: ScriptRun,
    model: DistributedModel,
    states: Mapping[str, Any],
    *,
    alike: Mapping[str, bool],
    copies: bool,
) -> RankSnapshot:
    store = _stored_copy if copies else stored
    parts = model_parts(model, store)
    for number, optimizer in enumerate(context.optimizers):
        parts += optimizer_parts(model, optimizer, store, prefix=optimizer_prefix(number))
    extra: dict[str, Tensor] = {}
    rank = f"{context.rank:05}"
    own_state = {name: f"state/{name}" if alike[name] else f"state/{name}@{rank}" for name in states}
    document = RankDocument(
        random=encode(generator_states(context.device), name=f"random/{rank}", tensors=extra),
        extra_states={
            name: encode(state, name=f"extra_state/{name}", tensors=extra)
            for name, state in own_extra_states(model).items()
        },
        optimizers=[
            _optimizer_document(context, model, optimizer, optimizer_prefix(number), extra)
            for number, optimizer in enumerate(context.optimizers)
        ],
        loss_scale=None if model.scaling is None else asdict(model.scaling.scaler),
        states={name: encode(state, name=own_state[name], tensors=extra) for name, state in states.items()},
        buffers=remade_buffers(model),
    )
    for name, tensor in extra.items():
        box = Box.whole(tensor.shape)
        parts.append(TensorPart(name, whole=box.shape, box=box, stored=store(tensor)))
    trained = {f"{MODEL}{name}": p.requires_grad for name, p in model.local_named_parameters()}
    frozen = frozenset(name for name, is_trained in trained.items() if not is_trained)
    # Not by `asdict`, which copies states.
    beside = {field.name: getattr(document, field.name) for field in fields(document)}
    return RankSnapshot(parts, trained.keys(), beside, frozen)


def _stored_copy(tensor: Tensor) -> StoredTensor:
    """On the CPU, in memory of its own."""
    return stored(torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()))


def _optimizer_document(
    context: ScriptRun,
    model: DistributedModel,
    optimizer: DistributedOptimizer,
    prefix: str,
    tensors: dict[str, Tensor],
) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in model.get_module().named_parameters()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    shared: dict[str, Tensor] = {}  # options that are tensors: every rank has them, the first one saves them
    others: dict[str, dict[str, Any]] = {}
    for parameter, values in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None or not isinstance(values, Mapping):
            raise CheckpointError(
                f"the state of {type(optimizer.optimizer).__name__} has {str(parameter)[:40]!r}, which is no "
                "parameter of the model, and cannot be saved. Keep it in a parameter group."
            )
        plain = all_elements({key: value for key, value in values.items() if not isinstance(value, Tensor)})
        if plain and context.is_first_holder and model.counts_here(name):
            others[name] = encode(plain, name=f"{prefix}{name}/other", tensors=tensors)
    encoded_groups = encode(groups, name=f"{prefix}groups", tensors=shared)
    if context.rank == 0:
        tensors.update(shared)
    members = [
        [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        for group in optimizer.param_groups
    ]
    return {"groups": encoded_groups, "members": members, "others": others}


PLAN = "plan.json"
"""The name of the file of the plan, beside those of `STATE` and `CONFIG`."""


class SavedLayout(Record):
    """The ranks that saved.

    Attributes:
        tensor: ranks that shared every layer of a stage.
        context: ranks that shared the sequences of a batch.
        expert: ranks that shared the experts of a stage.
    """

    world_size: PositiveInt
    pipeline: PositiveInt
    data: PositiveInt
    tensor: PositiveInt = 1
    context: PositiveInt = 1
    expert: PositiveInt = 1
    shard: PositiveInt
    placement: str

    @classmethod
    def of(cls, mesh: Mesh) -> Self:
        return cls(
            world_size=mesh.world_size,
            pipeline=mesh.pipeline,
            data=mesh.data,
            tensor=mesh.tensor,
            context=mesh.context,
            expert=mesh.expert,
            shard=mesh.shard,
            placement=mesh.placement,
        )

    def rank_of_replica(self, replica: int) -> int:
        """The first rank of a replica; they are counted round where there were fewer."""
        return self.mesh.rank_of(rdp=replica % self.data)

    @property
    def mesh(self) -> Mesh:
        return Mesh.of(**self.model_dump())


class OptimizerDocument(Record):
    """An optimizer, but for the tensors of its state.

    Attributes:
        others: by parameter and key, what its state has that is no tensor.
    """

    groups: list[dict[str, Any]]
    members: list[list[str]]
    others: dict[str, Any]


class StateDocument(Record):
    """Everything but tensors.

    Attributes:
        calls: of step functions that trained, in all of the run: more than steps where a script accumulates
            gradients; None: as many.
        layout: the ranks that saved; None for a checkpoint that was imported.
        optimizers: in the order in which they were wrapped.
        loss_scale: of ``fp16``; None without.
        states: of schedulers, samplers and the like, by name, where all ranks had the same.
        states_of_ranks: by name and rank, where they had not.
        buffers: of those that a forward has given another shape or type: what they were at first.
    """

    version: Literal[1] = 1
    step: NonNegativeInt
    calls: NonNegativeInt | None = None
    layout: SavedLayout | None
    optimizers: list[OptimizerDocument] = Field(default_factory=list)
    loss_scale: dict[str, float | int | bool] | None = None
    extra_states: dict[str, Any] = Field(default_factory=dict)
    states: dict[str, Any] = Field(default_factory=dict)
    states_of_ranks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    random: dict[str, Any] = Field(default_factory=dict)
    buffers: dict[str, list[str | NonNegativeInt] | None] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _of_all_ranks(self) -> Self:
        number = 0 if self.layout is None else self.layout.world_size
        for name, by_rank in {**self.states_of_ranks, "random": self.random}.items():
            if len(by_rank) != number or any(str(rank) not in by_rank for rank in range(len(by_rank))):
                raise ValueError(f"{name} must have one entry for each of the {number} ranks that saved")
        return self

    @classmethod
    def joined(
        cls,
        step: int,
        mesh: Mesh,
        documents: Sequence[RankDocument],
        *,
        alike: Mapping[str, bool],
        calls: int | None = None,
    ) -> Self:
        first = documents[0]
        optimizers = [
            OptimizerDocument(
                groups=each["groups"],
                members=[
                    sorted({name for d in documents for name in d.optimizers[number]["members"][place]})
                    for place in range(len(each["groups"]))
                ],
                others={k: v for d in documents for k, v in d.optimizers[number]["others"].items()},
            )
            for number, each in enumerate(first.optimizers)
        ]
        return cls(
            step=step,
            calls=None if calls == step else calls,
            layout=SavedLayout.of(mesh),
            optimizers=optimizers,
            loss_scale=first.loss_scale,
            extra_states={name: state for d in documents for name, state in d.extra_states.items()},
            states={name: first.states[name] for name, same in alike.items() if same},
            states_of_ranks={
                name: {str(rank): d.states[name] for rank, d in enumerate(documents)}
                for name, same in alike.items()
                if not same
            },
            random={str(rank): d.random for rank, d in enumerate(documents)},
            buffers={name: kind for d in documents for name, kind in d.buffers.items()},
        )

    def to_bytes(self) -> bytes:
        """A file of it; what cannot be read again is refused."""
        content = json.dumps(self.to_content(), allow_nan=False).encode()
        parse(content, name=STATE)
        return content

    def to_content(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"calls"} if self.calls is None else None)
