"""The tensors of a traced step function, and parameters that it must not use or return.

The step function holds a *holder* for each value: a `DeferredTensor`, or the user's own tensor where that was
changed in place. Units compute with its *fake*: shape and memory, no data. Parameters and buffers are lent
fakes, too.
"""

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.model_graph import TensorSpec
from shardwright.torch._private.tensors import FakeTensor, new_fake_mode, storage_key
from shardwright.torch.interception.deferred import DeferredTensor, spec_of
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.pytorch.tree import Structure, leaves

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _TracedValue:
    """A value of the graph.

    Attributes:
        position: among what the node makes; -1 for what was changed in place, or is there at the start.
        holder: the tensor that the step function has.
        had_gradient: it required a gradient when it was made.
    """

    producer: int
    position: int
    fake: Tensor
    holder: Tensor
    had_gradient: bool

    @property
    def has_history(self) -> bool:
        """Whether a gradient goes on from it: not where it is a view that was made under no_grad."""
        return self.had_gradient and not (self.fake._is_view() and self.fake.grad_fn is None)

    @property
    def spec(self) -> TensorSpec:
        # A change in place may have given it a history, or taken it.
        return replace(spec_of(self.fake), requires_grad=self.had_gradient)


class TracedValues:
    """All values of a trace, in the order in which they are made, and all fake tensors.

    Attributes:
        fake_mode: to be in force where fake tensors are computed with.
        names: those given, and those of what was lent.
    """

    def __init__(self, names: Mapping[int, str], device: torch.device):
        self.fake_mode = new_fake_mode()
        self.names = dict(names)
        self._device = device
        self._values: list[_TracedValue] = []
        self._value_of: dict[int, int] = {}
        self._in_memory: dict[int, list[int]] = {}
        self._fakes: dict[int, Tensor] = {}
        self._lent_for: dict[int, Tensor] = {}
        self._keep_alive: list[Tensor] = []

    def __getitem__(self, value: int) -> _TracedValue:
        return self._values[value]

    def __iter__(self) -> Iterator[_TracedValue]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    # ---- values ----

    def new(self, producer: int, position: int, fake: Tensor, holder: Tensor | None = None) -> int:
        """Adds a value; a deferred tensor holds it unless another holder is given."""
        value = len(self._values)
        if holder is None:
            holder = DeferredTensor(fake, value)
        self._values.append(_TracedValue(producer, position, fake, holder, fake.requires_grad))
        self._value_of[id(holder)] = value
        self._in_memory.setdefault(storage_key(fake), []).append(value)
        self._keep_alive.append(holder)
        return value

    def find(self, item: Any) -> int | None:
        """The value that a tensor holds now; None for anything else."""
        return self._value_of.get(id(item)) if isinstance(item, Tensor) else None

    def has(self, item: Any) -> bool:
        return self.find(item) is not None

    def stand_ins(self) -> tuple[int | None, ...]:
        """Of each value, the one that its stand-in names; None where every rank has a tensor of its own."""
        firsts: dict[int, int] = {}
        for value, made in enumerate(self._values):
            if isinstance(made.holder, DeferredTensor | FakeTensor):
                firsts.setdefault(id(made.holder), value)
        return tuple(firsts.get(id(made.holder)) for made in self._values)

    def memory_of(self, value: int) -> int:
        """Equal for values that share memory."""
        return storage_key(self._values[value].fake)

    def in_memory(self, memory: int) -> Sequence[int]:
        """The values that share this memory, in the order in which they were made."""
        return self._in_memory.get(memory, ())

    def is_free(self, item: Any) -> bool:
        """Whether it is a tensor that every rank has, with its values."""
        known = isinstance(item, Tensor) and not isinstance(item, FakeTensor | nn.Parameter)
        return known and self.find(item) is None and not item.is_meta

    def is_made(self, item: Any) -> bool:
        """Whether it is a fake tensor that a unit made: no value yet, and nothing that was lent."""
        return isinstance(item, FakeTensor) and self.find(item) is None and id(item) not in self._lent_for

    # ---- fake tensors ----

    def fake(self, item: Any) -> Any:
        """The fake tensor with which units compute in place of a tensor; anything else as it is."""
        if not isinstance(item, Tensor):
            return item
        value = self.find(item)
        return self.as_fake(item) if value is None else self._values[value].fake

    def as_fake(self, tensor: Tensor) -> Tensor:
        """The fake of a tensor that is no value; always the same one."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._fakes:
            self._fakes[id(tensor)] = self._new_fake(tensor)
            self._keep_alive.append(tensor)
        return self._fakes[id(tensor)]

    def follow(
        self, func: Callable[..., Any], items: Sequence[Any], structure: Structure, result: Any
    ) -> None:
        """Has the fakes of free tensors the history of these: a gradient by one of them may be asked for.

        ``x = pos * 2; torch.autograd.grad(energy(x).sum(), pos)`` finds its way back through the fakes.
        """
        if not any(
            isinstance(item, Tensor) and self._has_history(item) for item in (*items, *leaves(result))
        ):
            return
        try:
            with self.fake_mode:
                args, kwargs = structure.rebuild([self.fake(item) for item in items])
                fakes = leaves(func(*args, **kwargs))
        except Exception as error:
            log.debug("%s() has no history on fake tensors: %s", func, error)
            return
        for item, fake in zip(leaves(result), fakes, strict=False):
            if isinstance(item, Tensor) and isinstance(fake, FakeTensor):
                self._fakes[id(item)] = fake
                self._keep_alive.append(item)

    def _has_history(self, tensor: Tensor) -> bool:
        fake = self._fakes.get(id(tensor))
        return tensor.requires_grad or (fake is not None and fake.requires_grad)

    def _new_fake(self, tensor: Tensor) -> Tensor:
        if tensor.is_leaf:
            return self.fake_mode.from_tensor(tensor, static_shapes=True)
        return with_history(self.fake_mode.from_tensor(tensor.detach(), static_shapes=True), self.fake_mode)

    def lend(self, tensor: Tensor) -> Tensor:
        """A fake tensor on the computing device, in place of a parameter or buffer."""
        with self.fake_mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        self.names[id(fake)] = self.names[id(tensor)]
        self._lent_for[id(fake)] = tensor
        self._keep_alive.append(fake)
        return fake

    @property
    def lent_for(self) -> Mapping[int, Tensor]:
        """Id of what was lent -> the parameter or buffer that it stands for."""
        return self._lent_for

    def lent_in(self, memories: Sequence[int]) -> tuple[str, ...]:
        """Names of what was lent and lies in one of these memories."""
        # In which memory one lies may change: `tensor.data = other` gives it another.
        lent = (item for item in self._keep_alive if id(item) in self._lent_for)
        return tuple(self.names[id(fake)] for fake in lent if storage_key(fake) in memories)

    # ---- names ----

    def parameters_among(self, items: Sequence[Any]) -> tuple[str, ...]:
        """Names of the parameters, and of the buffers of units, among the leaves of arguments."""
        lent = (i for i in items if isinstance(i, nn.Parameter) or id(i) in self._lent_for)
        names = (self.names.get(id(item)) for item in lent)
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def names_of(self, tensors: Sequence[Tensor]) -> tuple[str, ...]:
        """Names of the parameters and buffers among tensors, and of those that share memory with them."""
        named = (self.names[id(tensor)] for tensor in tensors if id(tensor) in self.names)
        lent = self.lent_in([storage_key(tensor) for tensor in tensors]) if tensors else ()
        return tuple(dict.fromkeys((*named, *lent)))

    def names_in(self, module: nn.Module) -> set[str]:
        tensors = [*module.parameters(), *module.buffers()]
        return {self.names[id(tensor)] for tensor in tensors if id(tensor) in self.names}


def with_history(fake: Tensor, mode: AbstractContextManager[Any]) -> Tensor:
    """Makes a fake tensor one that requires gradients, and is no leaf: those cannot be changed in place."""
    with mode, torch.enable_grad():
        return fake.add_(torch.zeros((), dtype=fake.dtype, device=fake.device, requires_grad=True))


def point_out_foreign(
    items: Sequence[Any], known: Collection[int], was_there: Callable[[Tensor], bool]
) -> None:
    """Warns of trained parameters that are not the model's, be they `nn.Parameter` or plain tensors."""
    for item in items:
        if not isinstance(item, Tensor) or not item.requires_grad or id(item) in known:
            continue
        is_plain = type(item) is Tensor and item.is_leaf and was_there(item)
        if torch.is_grad_enabled() and (is_plain or isinstance(item, nn.Parameter)):
            kind = "trained tensor" if is_plain else "parameter"
            warnings.warn(
                f"{user_line()}: a {kind} of shape {tuple(item.shape)} is used here, and is not part of "
                "the wrapped model: its gradient comes to be on one rank alone. To train it, register it in "
                "the module that is wrapped (model.extra = nn.Parameter(tensor), before DistributedModel); "
                "else freeze it with requires_grad_(False).",
                stacklevel=2,
            )


def point_out_foreign_behind(loss: Tensor, parameters: Iterable[Tensor]) -> None:
    """Warns of trained parameters behind a loss that are not the model's, where there are replicas."""
    known = {id(parameter) for parameter in parameters}
    pending = [loss.grad_fn]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
        parameter = getattr(node, "variable", None)
        if isinstance(parameter, nn.Parameter) and id(parameter) not in known:
            warnings.warn(
                f"the loss has a gradient for a parameter of shape {tuple(parameter.shape)} that is not part "
                "of the wrapped model: each replica trains it by its own batches, so that replicas drift "
                "apart. Register it in the module that is wrapped (model.loss = loss_module, before "
                "DistributedModel), which averages its gradient; else freeze it with requires_grad_(False).",
                stacklevel=2,
            )


def refuse_returned(results: Iterable[Any], values: TracedValues) -> None:
    """Refuses parameters and buffers among the leaves of what a traced step function returns."""
    for item in results:
        if id(item) in values.lent_for:
            name = values.names[id(item)]
            raise UsageError(
                f"the step function returns the parameter or buffer {name} itself, which other ranks do "
                f"not have. Return what it holds: {name.rpartition('.')[2]}.detach().clone()."
            )
