"""Refuses a model that ranks have registered in different orders, or that is not the same on all of them.

A model may register its parts in another order on each rank: a loop over a set of names has its own order in
each interpreter. Then first values are drawn in another order, too, and walks over parameters do not match::

    rank 0    audio, video, text
    rank 1    text, audio, video      refused: write sorted(names)
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.comm.joining.process_group import tell_all
from shardwright.comm.message_names import Purpose
from shardwright.errors import UsageError
from shardwright.run.context import Context
from shardwright.torch._private.modules import non_persistent_buffers_of


class WrappedOptimizer(Protocol):
    """An optimizer of the script, with the parameters of this rank: see `DistributedOptimizer`."""

    optimizer: Optimizer
    scaler_wanted: Any

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Its groups, of parameters of this rank."""

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuses to optimize other parameters than these."""

    def keep(self, identifiers: set[int]) -> None:
        """Drops the parameters whose ids are not among these."""

    def match_names(self) -> None:
        """Loads a state that has waited for the names of parameters."""


@dataclass(frozen=True, slots=True)
class _Table:
    """The parameters and buffers that a model has registered, in order.

    Attributes:
        modules: path of a module -> names of its children.
        tensors: path of a module -> name of a parameter or buffer of it -> what that is.
        groups: for each optimizer the groups of it -> names of the parameters, sorted.
    """

    modules: dict[str, list[str]]
    tensors: dict[str, dict[str, str]]
    groups: list[list[list[str]]]

    @classmethod
    def of(cls, model: nn.Module, optimizers: Sequence[WrappedOptimizer]) -> "_Table":
        """Looks at all modules, under each of their names."""
        found = list(_modules(model))
        names: dict[int, list[str]] = {}
        for path, module in found:
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    names.setdefault(id(tensor), []).append(_joined(path, key))
        return cls(
            modules={path: [k for k, _ in _children(module)] for path, module in found},
            tensors={path: dict(_tensors(path, module, names)) for path, module in found},
            groups=[
                [
                    sorted(min(names[id(p)]) for p in group["params"] if id(p) in names)
                    for group in optimizer.param_groups
                ]
                for optimizer in optimizers
            ],
        )

    @property
    def digest(self) -> int:
        """The same for the same parts in the same order."""
        tensors = [[path, list(own.items())] for path, own in self.tensors.items()]
        text = json.dumps([list(self.modules.items()), tensors, self.groups])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)

    @property
    def flat(self) -> dict[str, str]:
        """Full names of modules, parameters, buffers, and parameters in optimizers -> what they are."""
        tensors = {_joined(p, k): what for p, own in self.tensors.items() for k, what in own.items()}
        groups = {
            f"{name} in optimizer {number}": f"in parameter group {place}"
            for number, optimizer in enumerate(self.groups)
            for place, group in enumerate(optimizer)
            for name in group
        }
        return {**dict.fromkeys(self.modules, "a module"), **tensors, **groups}


def agree_on_registration(model: nn.Module, context: Context) -> None:
    """Refuses ranks whose models have other parts, or in another order; collective over all ranks."""
    if context.links.world is None:
        return
    own = _Table.of(model, context.optimizers)
    digest = torch.tensor(own.digest, dtype=torch.int64, device=context.device)
    digests = context.links.world.gather(digest, Purpose.AGREEMENT).tolist()
    if len(set(digests)) == 1:
        return
    first, *others = (_Table(**told) for told in tell_all(asdict(own)))
    for rank, table in enumerate(others, start=1):
        _refuse_other_parts(first, table, rank)
    for rank, table in enumerate(others, start=1):
        _refuse_other_order(first, table, rank)


def in_order(parameters: Sequence[nn.Parameter], model: nn.Module) -> list[nn.Parameter]:
    """Sorts parameters by the model's registration order; foreign ones come last."""
    place = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    return sorted(parameters, key=lambda parameter: place.get(id(parameter), len(place)))


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under all of its names, but not inside of itself."""
    pending: list[tuple[str, nn.Module, frozenset[int]]] = [("", model, frozenset())]
    while pending:
        path, module, around = pending.pop()
        if id(module) in around:
            continue
        yield path, module
        inside = around | {id(module)}
        pending += [(_joined(path, key), child, inside) for key, child in reversed(_children(module))]


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """By name, also those that are false, as their length is 0."""
    return [(key, child) for key, child in module._modules.items() if child is not None]


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _tensors(path: str, module: nn.Module, names: Mapping[int, list[str]]) -> Iterator[tuple[str, str]]:
    transient = non_persistent_buffers_of(module)
    for key, parameter in module._parameters.items():
        yield key, _described(parameter, "parameter", names)
    for key, buffer in module._buffers.items():
        yield key, _described(buffer, "transient buffer" if key in transient else "buffer", names)


def _described(tensor: Tensor | None, kind: str, names: Mapping[int, list[str]]) -> str:
    if tensor is None:
        return f"no {kind}"
    trained = "" if kind != "parameter" or tensor.requires_grad else " frozen"
    text = f"a{trained} {kind} of shape {tuple(tensor.shape)} and {tensor.dtype}"
    ties = sorted(names[id(tensor)])
    return text if len(ties) == 1 else f"{text}, the same as {', '.join(ties)}"


def _refuse_other_parts(first: _Table, table: _Table, rank: int) -> None:
    expected, found = first.flat, table.flat
    for name in (*expected, *found):
        one, other = expected.get(name), found.get(name)
        if one != other:
            raise UsageError(
                f"ranks 0 and {rank} have different models: {name or 'the model'} is {one or 'not there'} on "
                f"rank 0, and {other or 'not there'} on rank {rank}. Build the same model on all ranks, with "
                "the same names, shapes and types, and the same groups in its optimizers."
            )


def _refuse_other_order(first: _Table, table: _Table, rank: int) -> None:
    for one, other in ((first.modules, table.modules), (first.tensors, table.tensors)):
        for path, names in one.items():
            for expected, found in zip(names, other[path], strict=True):
                if expected != found:
                    raise UsageError(
                        f"ranks 0 and {rank} have different models: {path or 'the model'} registers "
                        f"{expected} on rank 0 where it registers {found} on rank {rank}. Register its parts "
                        "in one order on all ranks, for example in a loop over sorted(names) in the place of "
                        "a set."
                    )
