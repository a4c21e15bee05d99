"""Tracks which rank holds which parameter, and releases the others."""

import gc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.model_graph import ModelGraph
from shardwright.torch._private import has_storage, storage_key
from shardwright.torch.parameters.remote import make_remote
from shardwright.torch.pytorch.functions import RELEASED

__all__ = ["Residency", "refuse_released", "release_remote"]


@dataclass(frozen=True, slots=True)
class Residency:
    """The ranks and stages that hold each parameter and buffer.

    Attributes:
        stages: first name -> stages that use it, ascending; empty for tensors that no unit and no glue uses.
        ranks: first name -> pipeline ranks that hold it, ascending. What no stage uses is held by all.
    """

    stages: Mapping[str, tuple[int, ...]]
    ranks: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, graph: ModelGraph, homes: Sequence[int], stage_ranks: Sequence[int]) -> "Residency":
        """Works it out from the stage that computes each node."""
        users: dict[str, set[int]] = {name: set() for name in graph.parameters}
        in_units = {name for unit in graph.units.values() for name in unit.parameters}
        glue: set[str] = set()
        for node, stage in zip(graph.nodes, homes, strict=True):
            if node.kind == "unit":
                for name in graph.units[node.name].parameters:
                    users[name].add(stage)
            for name in node.parameters:
                users[name].add(stage)
                if graph.parameters[name].is_buffer and name not in in_units:
                    glue.add(name)
        everyone = tuple(sorted(set(stage_ranks)))
        ranks = {}
        for name, stages in users.items():
            spread = not stages or name in glue
            ranks[name] = everyone if spread else tuple(sorted({stage_ranks[stage] for stage in stages}))
        return cls(stages={name: tuple(sorted(stages)) for name, stages in users.items()}, ranks=ranks)

    def covers(self, other: "Residency") -> bool:
        """Whether what some stage uses here is used by no further stages there."""
        known = ((set(stages), name) for name, stages in self.stages.items() if stages)
        return all(stages.issuperset(other.stages.get(name, ())) for stages, name in known)

    def held_by(self, rank: int) -> list[str]:
        """Names that a pipeline rank holds."""
        return [name for name, ranks in self.ranks.items() if rank in ranks]

    def shared(self) -> dict[str, tuple[int, ...]]:
        """Names that several ranks use, with those ranks."""
        return {name: ranks for name, ranks in self.ranks.items() if len(ranks) > 1 and self.stages[name]}


def release_remote(
    model: nn.Module,
    residency: Residency,
    names: Mapping[int, str],
    *,
    rank: int,
    world_ranks: Sequence[int],
    device: torch.device,
) -> None:
    """Leaves every parameter and buffer that this rank does not hold without values, and frees its memory.

    They stay the same objects, also in lists and optimizers of the script, and so do its views of them.
    """
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    given_up = {key: names[key] for key in tensors if rank not in residency.ranks[names[key]]}
    held = {storage_key(tensor) for key, tensor in tensors.items() if key not in given_up}
    by_memory = {storage_key(tensors[key]): name for key, name in given_up.items()}
    remote = by_memory.keys() - held
    for tensor in _views_of_script(remote) if remote else ():  # it looks at all objects of the process
        given_up.setdefault(id(tensor), by_memory[storage_key(tensor)])
        tensors.setdefault(id(tensor), tensor)
    for key, name in given_up.items():
        holders = [world_ranks[holder] for holder in residency.ranks[name]]
        make_remote(tensors[key], name, holders, device=device)


def _views_of_script(memories: Collection[int]) -> list[Tensor]:
    """Tensors in some memory, whoever has them: ``[p.data for p in model.parameters()]``."""
    objects = gc.get_objects()
    tensors = compress(objects, map({Tensor, nn.Parameter}.__contains__, map(type, objects)))
    return [tensor for tensor in tensors if has_storage(tensor) and storage_key(tensor) in memories]


def refuse_released(model: nn.Module) -> None:
    """Refuses a model of which an earlier run has left a part on each rank."""
    released = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if hasattr(tensor, RELEASED)
    ]
    if released:
        raise UsageError(
            f"an earlier run has spread this model over ranks, and {len(released)} of its tensors are on "
            f"other ones (for example {released[0]}). Build the model anew, and load into it what "
            "model.state_dict() gave before that run ended."
        )
