"""The path of a step function with a microbatch: the values that Python read, and how they were computed.

Python may branch on values of the batch: ``if mask.all():``, ``if pad_token_id in input_ids:``. Then one
trace does not hold for every microbatch. The operations that lead from the batch to what was read are free:
they rest on no unit and no parameter. So a trace keeps them, with what was read, and whether another
microbatch goes the same way is found by running these few operations alone on its tensors, without Python::

    the trace:   mask ──▶ mask[:, :9] ──▶ all ──▶ __bool__ = True        embed, block, block, loss ...
                                            │
    a new microbatch: run again  ◀──────────┘    also True: the same steps will follow
                                                 False: another trace is needed

This is decided before the batch starts, by every rank of a replica for itself: all have the same batch. Had
the step function to find out when it gets there, ranks would already have sent and received by its program.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch._private.tensors import FakeTensor, storage_key
from shardwright.torch.pytorch.tensors import AutocastState, autocast_as, autocast_state
from shardwright.torch.pytorch.tree import Structure, leaves

log = logging.getLogger(__name__)

# What an operation may get besides tensors, if it is to be run again later: things that nothing changes.
_FIXED = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    type(Ellipsis),
    torch.Size,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
# These exchange the memory of a tensor, which is what operations are told apart by.
_EXCHANGES_MEMORY = frozenset(
    {Tensor.data.__set__, Tensor.set_, Tensor.resize_, Tensor.resize_as_}  # type: ignore[attr-defined]
)


@dataclass(frozen=True, slots=True)
class _Key:
    """A tensor of the trace, in place of the tensor: identities do not repeat while it is being recorded."""

    identity: int


@dataclass(frozen=True, slots=True)
class _Call:
    """A free operation that leads to what Python reads, or reads it.

    Attributes:
        items: leaves of its arguments, keys in place of tensors.
        arguments: makes (args, kwargs) of them.
        results: (position among the leaves of the result, key).
        outcome: what it gave, as far as Python can see it; None unless it reads.
        autocast: in force when it was called.
    """

    func: Any
    items: tuple[Any, ...]
    arguments: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    results: tuple[tuple[int, _Key], ...]
    outcome: str | None
    autocast: AutocastState


@dataclass(frozen=True, slots=True)
class Path:
    """The operations that lead from the batch to the values that Python read, and these values.

    Attributes:
        calls: in order of execution; empty where Python read nothing, so that every microbatch takes it.
        batch: key -> position among the leaves of the step function's arguments.
        constants: key -> tensor that is neither of the batch nor computed, or the name of the model's buffer.
        copied: keys of tensors that the calls change in place.
    """

    calls: tuple[_Call, ...]
    batch: Mapping[_Key, int]
    constants: Mapping[_Key, Tensor | str]
    copied: frozenset[_Key]
    model: nn.Module

    def taken_by(self, leaves: Sequence[Any]) -> bool:
        """Whether Python would read the same values with these arguments."""
        if not self.calls:
            return True
        try:
            with torch.no_grad():
                known, autocast = self._start(leaves), autocast_state()
                return all(self._agrees(call, known, autocast) for call in self.calls)
        except Exception as error:
            # Not the same way, then (a buffer of another shape). If the error is the user's, the trace that
            # follows raises it in the user's own code.
            log.debug("the path cannot be followed: %s", error)
            return False

    def _start(self, leaves: Sequence[Any]) -> dict[_Key, Tensor]:
        known = {key: leaves[position].detach() for key, position in self.batch.items()}
        for key, constant in self.constants.items():
            known[key] = self.model.get_buffer(constant) if isinstance(constant, str) else constant
        for key in self.copied:
            known[key] = known[key].clone()
        return known

    def _agrees(self, call: _Call, known: dict[_Key, Tensor], autocast: AutocastState) -> bool:
        args, kwargs = call.arguments(
            [known[item] if item.__class__ is _Key else item for item in call.items]
        )
        if call.autocast == autocast:
            result = call.func(*args, **kwargs)
        else:
            with autocast_as(call.autocast):
                result = call.func(*args, **kwargs)
        if call.outcome is not None and _outcome(result) != call.outcome:
            return False
        if call.results:
            found = leaves(result)
            for position, key in call.results:
                known[key] = found[position]
        return True


@dataclass(slots=True)
class _Noted:
    func: Any
    items: list[Any]
    structure: Structure
    results: list[Any]
    changed: set[int]
    draws: bool
    outcome: str | None
    autocast: AutocastState


class PathRecorder:
    """Notes the free operations of a trace."""

    def __init__(self, batch: Sequence[Any]):
        self._reads_data = False  # values that may differ from one microbatch to the next
        self._batch = {id(item): i for i, item in enumerate(batch) if isinstance(item, Tensor)}
        self._varying = {_memory(item) for item in batch if isinstance(item, Tensor)}
        self._keep_alive = list(batch)
        self._noted: list[_Noted] = []
        self._can_be_followed = True

    def versions(self, items: list[Any]) -> list[int | None]:
        """Counts the changes of each tensor so far, for `note`."""
        return [_version(item) for item in items]

    def note(
        self,
        func: Any,
        items: list[Any],
        structure: Structure,
        result: Any,
        versions: list[int | None],
        *,
        draws: bool,
        reads: bool,
    ) -> None:
        results = leaves(result)
        changed = {
            _memory(item)
            for item, before in zip(items, versions, strict=True)
            if isinstance(item, Tensor) and (before is None or _version(item) != before)
        }
        varying = draws or not self._varying.isdisjoint(_memory(item) for item in _tensors(items))
        if varying:
            self._varying |= changed | {_memory(item) for item in results if isinstance(item, Tensor)}
        # Values made of shapes alone (position numbers) are the same next time: only what depends on the
        # batch, or on random numbers, can lead Python another way.
        outcome = None
        if varying and reads:
            self._reads_data = True
            outcome = _outcome(result)
            self._can_be_followed &= outcome is not None
        self._can_be_followed &= func not in _EXCHANGES_MEMORY
        autocast = autocast_state()
        self._noted.append(_Noted(func, items, structure, results, changed, draws, outcome, autocast))

    def path(self, model: nn.Module, names: Mapping[int, str]) -> Path | None:
        """The operations that lead to reads, none where nothing was read; None if they cannot run again."""
        if not self._reads_data:
            return Path((), {}, {}, frozenset(), model)
        if not self._can_be_followed:
            return None
        chosen = self._leading_to_reads()
        calls: list[_Call] = []
        constants: dict[_Key, Tensor | str] = {}
        memory_of = {_Key(i): _memory(self._keep_alive[position]) for i, position in self._batch.items()}
        made: set[_Key] = set()
        for noted in chosen:
            for item in noted.items:
                if not isinstance(item, Tensor):
                    continue
                key = _Key(id(item))
                if key not in memory_of and key not in made:
                    constants[key] = names.get(id(item), item)
                    memory_of[key] = _memory(item)
            results = tuple((i, _Key(id(r))) for i, r in enumerate(noted.results) if isinstance(r, Tensor))
            made.update(key for _, key in results)
            items = tuple(_Key(id(item)) if isinstance(item, Tensor) else item for item in noted.items)
            arguments = noted.structure.arguments()
            calls.append(_Call(noted.func, items, arguments, results, noted.outcome, noted.autocast))
        changed = {memory for noted in chosen for memory in noted.changed}
        copied = [key for key, memory in memory_of.items() if memory in changed]
        shared = len({memory_of[key] for key in copied}) < len(copied)
        if shared or any(not _can_run_again(noted) for noted in chosen):
            return None
        return Path(
            calls=tuple(calls),
            batch={_Key(identity): position for identity, position in self._batch.items()},
            constants=constants,
            copied=frozenset(copied),
            model=model,
        )

    def _leading_to_reads(self) -> list[_Noted]:
        """The operations that are read, or that write to memory that is read later."""
        needed: set[int] = set()
        chosen: list[_Noted] = []
        for noted in reversed(self._noted):
            written = noted.changed | {_memory(item) for item in noted.results if isinstance(item, Tensor)}
            if noted.outcome is not None or not needed.isdisjoint(written):
                chosen.append(noted)
                needed.update(_memory(item) for item in _tensors(noted.items))
        return chosen[::-1]


def _can_run_again(noted: _Noted) -> bool:
    if noted.draws:
        return False
    for item in noted.items:
        if isinstance(item, FakeTensor) or (isinstance(item, slice) and _tensors([item])):
            return False
        if not isinstance(item, Tensor) and not isinstance(item, _FIXED):
            return False
    return True


def _tensors(items: Sequence[Any]) -> list[Tensor]:
    """Tensors among the leaves of arguments, ends of slices included."""
    found = []
    for item in items:
        parts = (item.start, item.stop, item.step) if isinstance(item, slice) else (item,)
        found += [part for part in parts if isinstance(part, Tensor)]
    return found


def _memory(tensor: Tensor) -> int:
    """Equal for tensors that share memory, as long as they live."""
    return storage_key(tensor) if tensor.layout == torch.strided else id(tensor)


def _version(item: Any) -> int | None:
    """The number of changes in place of a tensor; None if torch does not count them."""
    return item._version if isinstance(item, Tensor) and not item.is_inference() else None


def _outcome(result: Any) -> str | None:
    """The part of a result that Python sees without another operation; None if that cannot be compared."""
    seen = []
    for item in leaves(result):
        if isinstance(item, Tensor):
            seen.append(str(tuple(item.shape)))
        elif isinstance(item, bool | int | float | complex | str | None):
            seen.append(repr(item))
        else:
            return None
    return ", ".join(seen)
