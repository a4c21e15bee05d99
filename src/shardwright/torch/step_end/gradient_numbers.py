"""Looks at what a script does with gradients between a step and the update, where ranks have stages.

::

    train_step(...)
    norm = torch.stack([p.grad.norm() for p in ... if p.grad is not None]).norm()    of this rank's stages
    for p in ...: p.grad.mul_(0.1 / norm)                                            refused
    optimizer.step()

A number that rests on the gradients of several parameters is one rank's, unless the script adds it up over
ranks. It is looked for before the first updates, and further only where such numbers are read: a clipping may
begin late. Other scripts have no part in it after that.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from shardwright.errors import UsageError
from shardwright.torch._private import top_dispatch_mode
from shardwright.torch.pytorch.operator_schema import takes_several, tensors_in, written_tensors
from shardwright.torch.pytorch.source_line import user_line

__all__ = ["GradientNumbers", "unwatched"]

log = logging.getLogger(__name__)

_UPDATES = 2
_SCALES = ("aten::mul", "aten::mul_", "aten::div", "aten::div_")
_NOTHING: frozenset[int] = frozenset()
_REMEDY = (
    "Use torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm), whose norm is over all stages; with "
    "max_norm math.inf it returns the norm and scales nothing."
)


class GradientNumbers(TorchDispatchMode):
    """Follows gradients of this rank to the numbers that a script makes of them.

    Args:
        warns: whether this is the rank that warns.
    """

    hidden = False

    def __init__(self, *, warns: bool):
        super().__init__()  # type: ignore[no-untyped-call]
        self._warns = warns
        self._left = _UPDATES
        self._is_pushed = False
        self._gradients: list[Tensor] = []
        self._places: dict[int, int] = {}  # of gradients, by their memory
        self._rests_on: Any = WeakTensorKeyDictionary()
        self._read: frozenset[int] = _NOTHING  # gradients of which numbers were read
        self._line = ""  # where one was read that rests on several

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """A step has ended, and gradients are there."""
        if self._is_pushed:
            self.end()
        if self._left and not self._is_pushed and top_dispatch_mode() is None:
            # Held: freed, their memory would soon be that of another tensor, which is none of them.
            self._gradients = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
            self._places = {_key(gradient): number for number, gradient in enumerate(self._gradients)}
            self._rests_on.clear()
            self._read, self._line = _NOTHING, ""
            self._is_pushed = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """The update begins, or the next step."""
        if not self._is_pushed or top_dispatch_mode() is not self:
            return
        self._is_pushed = False
        self._gradients, self._places = [], {}
        self.__exit__(None, None, None)
        if self._left and not len(self._read) > 1:
            self._left -= 1
        if self._line and self._warns:
            log.warning(
                "%s: the number that is read here rests on the gradients of this rank's stages alone. %s",
                *(self._line, _REMEDY),
            )
            self._warns = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "_schema", None) and func._schema.name
        if self.hidden or not self._is_pushed or not name or "_amp_" in name:
            return func(*args, **kwargs)
        if not takes_several(func):
            return self._called(func, args, kwargs)
        several = [_element(args, index) for index in range(len(args[0]))]
        for own in several:
            self._look(func, own, kwargs)
        results = func(*args, **kwargs)
        for own, result in zip(several, results or (), strict=False):
            self._note(tensors_in([result]), self._basis(tensors_in(own)))
        return results

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = tensors_in([*args, *kwargs.values()])
        basis = self._basis(given)
        if func.namespace == "c10d":
            self._communicated(basis)
        else:
            self._look(func, args, kwargs)
        result = func(*args, **kwargs)
        if func.namespace != "c10d":
            self._note(tensors_in([result]), basis)
        return result

    def _look(self, func: Any, args: Sequence[Any], kwargs: Any) -> None:
        """Looks for numbers that are read, and for gradients that are scaled by one."""
        given = tensors_in([*args, *kwargs.values()])
        basis = self._basis(given)
        if not basis:
            return
        if torch.Tag.data_dependent_output in func.tags:
            self._read |= basis
            self._line = self._line or (user_line() if len(basis) > 1 else "")
            return
        name = func._schema.name.replace("aten::_foreach_", "aten::")
        written = {id(tensor) for tensor in written_tensors(func, tuple(args), kwargs)}
        for tensor in given:
            own = self._of_gradient(tensor)
            if own is None or not (id(tensor) in written or name in _SCALES):
                continue
            others = [other for other in given if other is not tensor]
            for other in others:
                found = self._basis([other])
                if len(found) > 1 and (other.dim() == 0 or id(tensor) in written):
                    self._refuse(found)
            by_number = all(other.dim() == 0 for other in others)
            if name in _SCALES and by_number and self._read - {own}:
                self._refuse(self._read)
            self._read -= {own}

    def _refuse(self, found: frozenset[int]) -> None:
        read = f", and which was read at {self._line}" if self._line else ""
        self._left = 0
        raise UsageError(
            f"{user_line()}: a gradient is scaled by a number that rests on the gradients of {len(found)} "
            f"parameters{read}: those of this rank's stages, so that each rank scales by another one. "
            f"{_REMEDY} A number of your own has to be added up over the ranks of sw.get_mp_group() before."
        )

    def _communicated(self, basis: frozenset[int]) -> None:
        """The script adds something up over ranks: these numbers, or what was read of them."""
        if basis or self._read:
            self._left, self._read, self._line = 0, _NOTHING, ""
            self._rests_on.clear()
            self._places = {}

    def _of_gradient(self, tensor: Tensor) -> int | None:
        """The gradient that it is, or that has become it: not a number made of one."""
        own = self._places.get(_key(tensor))
        if own is None and tensor.numel() > 1:
            basis = self._rests_on.get(tensor, _NOTHING)
            own = next(iter(basis)) if len(basis) == 1 else None
        return own

    def _basis(self, tensors: Sequence[Tensor]) -> frozenset[int]:
        """The gradients on which they rest."""
        found = set[int]()
        for tensor in tensors:
            own = self._places.get(_key(tensor))
            found |= self._rests_on.get(tensor, _NOTHING) if own is None else {own}
        return frozenset(found)

    def _note(self, tensors: Sequence[Tensor], basis: frozenset[int]) -> None:
        for tensor in tensors:
            if basis and _key(tensor) not in self._places:
                self._rests_on[tensor] = basis


@contextmanager
def unwatched() -> Iterator[None]:
    """Around what the library itself does with gradients."""
    before, GradientNumbers.hidden = GradientNumbers.hidden, True
    try:
        yield
    finally:
        GradientNumbers.hidden = before


def _key(tensor: Tensor) -> int:
    """Equal for a gradient and its `data`."""
    return tensor.data_ptr() if type(tensor) is Tensor and tensor.layout is torch.strided else id(tensor)


def _element(args: Sequence[Any], index: int) -> list[Any]:
    """The arguments of an operator of lists for one of the tensors."""
    return [item[index] if isinstance(item, list | tuple) else item for item in args]
