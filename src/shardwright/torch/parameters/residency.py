"""Tracks which rank holds what; remote parameters have shape and type, no values.

PyTorch accepts a tensor without values where it changes one that has some, and changes nothing::

    average.mul_(0.9).add_(parameter, alpha=0.1)     parameter on the meta device: average only shrinks

So a tensor on another rank is not just a meta tensor: its class refuses such an operation. A result computed
from remote tensors alone is remote too. A write to one is left to its holder, which makes the same write.
Where the holder draws random numbers for it (``p.add_(torch.randn_like(p))``, ``reset_parameters()``), all
ranks draw as many, so that the next parameter gets on its rank what it gets in one process.
"""

import copy
import functools
import gc
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.model_graph import ModelGraph
from shardwright.torch._private.tensors import (
    disabled_torch_function,
    has_storage,
    make_wrapper,
    num_sharing,
    put_in_place,
    storage_key,
)
from shardwright.torch.pytorch.functions import (
    RELEASED,
    is_written,
    map_arguments,
    one_by_one,
    takes_several,
    tensors_in,
    written_tensors,
)
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.pytorch.tree import map_tree
from shardwright.torch.randomness import draw_as_elsewhere


class _RemoteTensor(torch.Tensor):
    """A parameter or buffer with its values on another rank, or a tensor computed from one.

    Attributes:
        holders: the ranks of this replica that have its values, ascending.
    """

    first_name: str
    holders: tuple[int, ...]

    # What is asked in every iteration (`grad`, `requires_grad`) is answered without a detour through Python.
    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, like: Tensor, first_name: str, holders: Sequence[int]) -> "_RemoteTensor":
        """Makes a stand-in with the metadata of `like`, which is on the meta device."""
        remote: _RemoteTensor = make_wrapper(cls, like)
        remote.first_name, remote.holders = first_name, tuple(holders)
        return remote

    def __init__(self, like: Tensor, first_name: str, holders: Sequence[int]) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if takes_several(func) and len(args[0]) > 1:
            return one_by_one(func, args, kwargs)
        tensors = tensors_in((*args, *kwargs.values()))
        first = next(tensor for tensor in tensors if isinstance(tensor, _RemoteTensor))
        changed = _changed(func, args, kwargs)
        if changed and all(isinstance(tensor, _RemoteTensor) for tensor in changed):
            draw_as_elsewhere(func, args, kwargs, first._given_up_on)
            return changed[0] if func._schema.returns else None
        if not all(tensor.is_meta for tensor in tensors) or torch.Tag.data_dependent_output in func.tags:
            first.refuse()
        draw_as_elsewhere(func, args, kwargs, first._given_up_on)
        try:
            result = without_values(func, args, kwargs, name=first.first_name, holders=first.holders)
        except NotImplementedError:  # it needs values: to copy them to a device, or to know the shape
            first.refuse()
        return map_tree(lambda item: _as_given_up(first, item), result)

    @property
    def _given_up_on(self) -> torch.device:
        """The device on which this rank would have it."""
        return vars(self).get(RELEASED) or torch.device("cpu")

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Whether it is without values.

        `torch.nn.init` would draw nothing then, and is told that it has some: all ranks draw as its holder
        does (``orthogonal_``), and what follows from values is refused (``trunc_normal_``).
        """
        if sys._getframe(1).f_globals.get("__name__") == "torch.nn.init":
            return False
        is_meta: bool = Tensor.is_meta.__get__(self)  # type: ignore[attr-defined]
        return is_meta

    def __mul__(self, other: Any) -> Any:
        if other is None:  # p * p.grad, as AdaLoRA and pruning have it
            self._refuse_gradient()
        return super().__mul__(other)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        if other is None:
            self._refuse_gradient()
        return super().__add__(other)

    def __sub__(self, other: Any) -> Any:
        if other is None:
            self._refuse_gradient()
        return super().__sub__(other)

    def add_(self, other: Any, **kwargs: Any) -> Any:
        """Left to its holder, also where it adds its gradient, which is None here."""
        return self if other is None else super().add_(other, **kwargs)

    def sub_(self, other: Any, **kwargs: Any) -> Any:
        """Likewise."""
        return self if other is None else super().sub_(other, **kwargs)

    def _refuse_gradient(self) -> NoReturn:
        raise UsageError(
            f"{user_line()}: {self.first_name} meets None in an operation. If that is its gradient: "
            f"both are on rank {self._where} and not here, because the model is spread over stages. Take "
            "model.local_named_parameters(), what this rank holds, on each rank, in the place of "
            "model.named_parameters(); what needs the numbers of all of them (a ranking) is added up or "
            "gathered over ranks behind that."
        )

    def refuse(self) -> NoReturn:
        """Refuses what cannot be done without values."""
        raise UsageError(
            f"{user_line()}: this needs the values of {self.first_name}, which are on rank {self._where} and "
            "not here, because the model is spread over stages. For an average of the weights (EMA, SWA), a "
            "statistic or a copy take model.local_named_parameters(), what this rank holds, on each rank, or "
            "model.state_dict(), called on all ranks, which has the values of all. Where one part of the "
            "model follows another (a teacher), write `with model.gathered(student, teacher):` around it, on "
            "all ranks, with modules or parameters: inside, each rank has the values of both."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "_RemoteTensor":
        copied = _RemoteTensor(self, self.first_name, self.holders)
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.refuse()

    @property
    def _where(self) -> str:
        """The ranks that have its values, for messages."""
        return " and ".join(str(rank) for rank in self.holders)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"RemoteTensor({self.first_name}, shape={tuple(self.shape)}, dtype={self.dtype}, its values are "
            f"on rank {self._where})"
        )


def make_remote(tensor: Tensor, first_name: str, holders: Sequence[int], *, device: torch.device) -> None:
    """Makes a parameter or buffer remote: the same object without values; frees its memory."""
    remote = _RemoteTensor(_as_meta(tensor), first_name, holders).requires_grad_(tensor.requires_grad)
    attributes = vars(remote)
    if isinstance(tensor, nn.Parameter):
        attributes["_is_param"] = True
    put_in_place(tensor, remote)
    vars(tensor).update(attributes)
    setattr(tensor, RELEASED, device)


def _as_meta(tensor: Tensor) -> Tensor:
    """An ordinary tensor on the meta device, for one of any kind."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def without_values(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, holders: Sequence[int]
) -> Any:
    """The result of an operation without values: stand-ins; changed tensors stay as they are."""
    changed = _changed(func, args, kwargs)
    if changed:
        return changed[0] if func._schema.returns else None
    plain_args, plain_kwargs = map_arguments(_as_meta, args, kwargs)
    result = func(*plain_args, **plain_kwargs)
    return map_tree(lambda item: _stand_in(item, name, holders), result)


def _stand_in(item: Any, name: str, holders: Sequence[int]) -> Any:
    """For a result without values; what has some is left as it is."""
    return _RemoteTensor(item, name, holders) if isinstance(item, Tensor) and item.is_meta else item


def _as_given_up(remote: _RemoteTensor, item: Any) -> Any:
    """A result that says where it would be, if what it comes from does."""
    if isinstance(item, _RemoteTensor):
        setattr(item, RELEASED, vars(remote).get(RELEASED))
    return item


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a function changes in place, if it does nothing else."""
    return written_tensors(func, args, kwargs) if _only_writes(func) else []


@functools.cache
def _only_writes(func: Any) -> bool:
    return all(is_written(result) for result in func._schema.returns)


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
    """Leaves every parameter and buffer that this rank does not hold without values, and frees its memory."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    given_up = {key: names[key] for key in tensors if rank not in residency.ranks[names[key]]}
    held = {storage_key(tensor) for key, tensor in tensors.items() if key not in given_up}
    by_memory = {storage_key(tensors[key]): name for key, name in given_up.items()}
    remote = by_memory.keys() - held
    known = Counter(map(storage_key, tensors.values()))
    own = [tensor for tensor in map(tensors.__getitem__, given_up) if has_storage(tensor)]
    viewed = {key for each in own if (key := storage_key(each)) in remote and num_sharing(each) > known[key]}
    for tensor in _views_of_script(viewed) if viewed else ():  # it looks at all objects of the process
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
