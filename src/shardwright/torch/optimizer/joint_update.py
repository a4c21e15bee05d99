"""One update of an optimizer that needs all parameters, over ranks that each hold some.

All ranks run the optimizer over all parameters, operation by operation. A parameter on another rank is a
stand-in (`RemoteTensor`), and an operation on it does nothing. A number that the optimizer reads, or that
meets tensors of other ranks, comes from the rank that holds it::

    rank 0   a.grad.norm() = 3 ──┐  ┌── 4   total = 5   a -= a.grad / total   nothing
    rank 1   nothing          3 ─┘  └── b.grad.norm() = 4   total = 5   nothing   b -= b.grad / total

So every rank gets the numbers of the whole model, bit for bit, and updates the parameters it holds.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.comm.identity.purpose import Purpose
from shardwright.comm.identity.rank_set import listed
from shardwright.comm.joining.process_group import tell_all
from shardwright.errors import UsageError
from shardwright.torch.model.distributed_model import wrapped_model
from shardwright.torch.optimizer.joint_program import Holding, JointProgram
from shardwright.torch.optimizer.optimizer_trial import inner_optimizers
from shardwright.torch.parameters.remote import RemoteTensor
from shardwright.torch.pytorch.tree import leaves, map_tree
from shardwright.torch.run.context import Context

__all__ = ["AllOfGroup", "JointUpdate", "is_running"]

# A group of an optimizer, and all its parameters, also those of other ranks.
AllOfGroup: TypeAlias = tuple[dict[str, Any], Sequence[nn.Parameter]]

_NO_GRADIENT, _GRADIENT, _SPARSE_GRADIENT = 1.0, 2.0, 3.0


def is_running() -> bool:
    """Whether an optimizer runs over all parameters, so that what it computes is of all stages already."""
    return RemoteTensor.told_device is not None


class JointUpdate:
    """Runs methods of an optimizer over all parameters; collective over the replica.

    Args:
        optimizer: the script's own; between updates it has the parameters of this rank.
        groups: its groups when they were given to it, and all parameters of each, in their order.
        context: the run, whose model is placed.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[AllOfGroup], context: Context):
        self._optimizer = optimizer
        self._with_states = list(_with_states(optimizer))
        self._groups = groups
        self._context = context
        self._program = JointProgram(context, type(optimizer).__name__)
        self._known_states: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
        self._states_of_others: dict[Optimizer, dict[nn.Parameter, Any]] = defaultdict(dict)
        self._holdings: dict[nn.Parameter, Holding] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the optimizer has all parameters, and operations are those of the whole pipeline.

        Raises:
            UsageError: optimizers of ranks have other parameters, or gradients are sparse.
        """
        program = self._program
        self._find_holdings()
        self._exchange()
        for parameter, holding in self._holdings.items():
            if not isinstance(parameter, RemoteTensor):
                program.holds((parameter, parameter.grad), holding)
        shown = list(self._show_all_parameters())
        for optimizer in self._with_states:
            optimizer.state.update(self._states_of_others.pop(optimizer, {}))  # type: ignore[arg-type]
        before, RemoteTensor.told_device = RemoteTensor.told_device, self._context.device
        try:
            with program:
                yield
            program.tell_numbers([group for group, _ in shown])
        finally:
            RemoteTensor.told_device = before
            for group, parameters in shown:
                group["params"] = parameters
            self._put_away()
            program.forget()

    def _show_all_parameters(self) -> Iterator[tuple[dict[str, Any], list[nn.Parameter]]]:
        """Gives groups all parameters; yields each with what it had.

        An optimizer and those inside of it share groups at first, and no more when a state was loaded.
        """
        for place, (given, everything) in enumerate(self._groups):
            groups = [given]
            for optimizer in (self._optimizer, *self._with_states):
                groups += optimizer.param_groups[place : place + 1]
            for group in groups:
                if _has_its_own(group, everything):
                    yield group, group["params"]
                    group["params"] = list(everything)

    def _find_holdings(self) -> None:
        parameters = [parameter for _, everything in self._groups for parameter in everything]
        if len(parameters) == len(self._holdings):
            return
        model = wrapped_model()
        assert model is not None
        names = {id(parameter): name for name, parameter in model.get_module().named_parameters()}
        for parameter in parameters:
            name = names[id(parameter)]
            self._holdings[parameter] = Holding(name, frozenset(model.ranks_with(name)))

    def _exchange(self) -> None:
        """Tells which parameters have gradients, and after states were loaded or cleared, states."""
        context = self._context
        assert context.links.replica is not None
        news = any(
            optimizer.state and self._known_states.get(optimizer) is not optimizer.state
            for optimizer in self._with_states
        )
        names = crc32("\n".join(holding.name for holding in self._holdings.values()).encode())
        changed = not all(
            _has_its_own(group, everything)
            for group, (_, everything) in zip(self._optimizer.param_groups, self._groups, strict=True)
        )
        kinds = [0.0 if isinstance(p, RemoteTensor) else _kind_of_gradient(p) for p in self._holdings]
        states = [float(self._num_states(parameter)) for parameter in self._holdings]
        numbers = [float(names), float(changed), float(news), *kinds, *states]
        row = torch.tensor(numbers, dtype=torch.float64, device=context.device)
        rows = context.links.replica.gather(row, Purpose.UPDATE)
        told_names, told_changed, told_news, *told = rows.t().tolist()
        told_kinds, told_states = told[: len(kinds)], told[len(kinds) :]
        if any(other != names for other in told_names):
            raise UsageError(
                f"ranks give {self._name} the parameters of the model in other orders, and it updates each "
                "by what it knows of all. Nothing was updated. Give them in one order on all ranks: "
                "model.parameters() has it."
            )
        if any(told_changed):
            raise UsageError(
                f"the list of parameters in a group of {self._name} was changed on rank "
                f"{listed([context.pipeline_ranks[i] for i, told in enumerate(told_changed) if told])}, and "
                "it updates each by what it knows of all. Nothing was updated. Leave the list as it is: "
                "p.requires_grad_(False) freezes a parameter, add_param_group adds one."
            )
        self._stand_in_gradients([max(told) for told in told_kinds])
        if any(told_news) or any(len(set(told)) > 1 for told in told_states):
            self._exchange_states()
        for optimizer in self._with_states:
            self._known_states[optimizer] = optimizer.state

    def _num_states(self, parameter: nn.Parameter) -> int:
        """The number of optimizers that have a state of a parameter, as far as this rank knows."""
        states = (
            self._states_of_others[optimizer] if isinstance(parameter, RemoteTensor) else optimizer.state
            for optimizer in self._with_states
        )
        return sum(parameter in each for each in states)

    @property
    def _name(self) -> str:
        return type(self._optimizer).__name__

    def _stand_in_gradients(self, kinds: Sequence[float]) -> None:
        if _SPARSE_GRADIENT in kinds:
            first = list(self._holdings.values())[kinds.index(_SPARSE_GRADIENT)]
            raise UsageError(
                f"the gradient of {first.name} is sparse, and {self._name} updates each parameter by what it "
                "knows of all: over stages its gradients must be dense (sparse=False of the embedding). "
                "Nothing was updated."
            )
        for (parameter, holding), kind in zip(self._holdings.items(), kinds, strict=True):
            if isinstance(parameter, RemoteTensor):
                parameter.grad = _stand_in(parameter, holding) if kind == _GRADIENT else None

    def _exchange_states(self) -> None:
        """Learns of the states that other ranks have: their shapes, and what is no tensor."""
        own = {holding.name: p for p, holding in self._holdings.items() if not isinstance(p, RemoteTensor)}
        self._states_of_others.clear()
        described = [
            {name: _described(optimizer.state[p]) for name, p in own.items() if p in optimizer.state}
            for optimizer in self._with_states
        ]
        for parameter in own.values():
            for optimizer in self._with_states:
                held = [
                    item for item in leaves(optimizer.state.get(parameter, {})) if isinstance(item, Tensor)
                ]
                self._program.holds(held, self._holdings[parameter])
        by_name = {holding.name: parameter for parameter, holding in self._holdings.items()}
        for told in tell_all(described, group=self._context.groups.pipeline):
            for optimizer, states in zip(self._with_states, told, strict=True):
                for name, state in states.items():
                    parameter = by_name[name]
                    if isinstance(parameter, RemoteTensor):
                        made = _made(state, self._holdings[parameter])
                        self._states_of_others[optimizer][parameter] = made

    def _put_away(self) -> None:
        """Takes what concerns parameters of other ranks out of the optimizer's sight."""
        for parameter, holding in self._holdings.items():
            if not isinstance(parameter, RemoteTensor):
                continue
            parameter.grad = None
            for optimizer in self._with_states:
                if parameter in optimizer.state:
                    state = optimizer.state.pop(parameter)
                    self._states_of_others[optimizer][parameter] = self._without_values(state, holding)

    def _without_values(self, state: Any, holding: Holding) -> Any:
        """A state of a parameter of another rank, without the memory that it took here."""

        def give_up(item: Any) -> Any:
            is_away = isinstance(item, Tensor) and not self._program.has_values(item)
            return item if not is_away or isinstance(item, RemoteTensor) else _stand_in(item, holding)

        return map_tree(give_up, state)


def _has_its_own(group: Mapping[str, Any], everything: Sequence[nn.Parameter]) -> bool:
    """Whether a group has those of all its parameters that are here."""
    own = [id(parameter) for parameter in everything if not isinstance(parameter, RemoteTensor)]
    return [id(parameter) for parameter in group["params"]] == own


def _with_states(optimizer: Optimizer) -> Iterator[Optimizer]:
    """An optimizer, and those that it calls, as SAM does; one that only puts others together shows theirs."""
    if "state" in vars(optimizer):
        yield optimizer
    for inner in inner_optimizers(optimizer):
        yield from _with_states(inner)


def _kind_of_gradient(parameter: Tensor) -> float:
    if parameter.grad is None:
        return _NO_GRADIENT
    return _GRADIENT if parameter.grad.layout is torch.strided else _SPARSE_GRADIENT


def _stand_in(like: Tensor, holding: Holding) -> RemoteTensor:
    meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return RemoteTensor(meta, holding.name, sorted(holding.ranks))


def _described(value: Any) -> Any:
    """A state, with shape and type in place of each tensor."""
    if isinstance(value, Tensor):
        return ("tensor", list(value.shape), str(value.dtype).removeprefix("torch."))
    if isinstance(value, Mapping):
        return ("dict", [(key, _described(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return ("list" if isinstance(value, list) else "tuple", [_described(item) for item in value])
    return ("value", value)


def _made(described: Any, holding: Holding) -> Any:
    """The inverse of `_described`, with stand-ins."""
    kind, *rest = described
    if kind == "tensor":
        shape, dtype = rest
        return RemoteTensor(
            torch.empty(shape, dtype=getattr(torch, dtype), device="meta"),
            holding.name,
            sorted(holding.ranks),
        )
    if kind == "dict":
        return {key: _made(item, holding) for key, item in rest[0]}
    if kind in ("list", "tuple"):
        made = [_made(item, holding) for item in rest[0]]
        return made if kind == "list" else tuple(made)
    return rest[0]
