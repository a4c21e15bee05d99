"""Compares parameter-group numbers (lr, betas, ...) and update counts between ranks in every step.

Replicas that update with different numbers drift apart, for example if each has a scheduler that follows its
own loss, or skips an update where that loss is large. So do the ranks of a pipeline if their optimizer
computes a number over the parameters that it has.

::

    numbers of this rank ── digest ──► row of the step's end ──► all ranks ── alike ──► go on
                                                                     └── not ──► which? ──► error

Some differences are no fault, and are not compared from then on: differences between stages that existed when
the optimizer was wrapped, and those of a rank without a parameter in the group.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwright.comm.joining.process_group import tell_all
from shardwright.comm.message_names import Purpose, listed
from shardwright.errors import UsageError
from shardwright.run.context import Context

# Optimizer, group, and name of the number in it.
_Key: TypeAlias = tuple[int, int, str]
_Numbers: TypeAlias = dict[_Key, Any]

_LARGEST = 64  # elements of a tensor, or list, that counts as numbers
_UPDATES = "number of updates"
_NONE = 0.7297352569e-2  # in a digest; nobody sets that
_UNCHANGING = (int, float, bool, str, NoneType)


class GroupNumbers:
    """The numbers of all optimizers of a run, on this rank.

    Attributes:
        compares_updates: ranks make equally many; else it is told on all of them.
    """

    def __init__(self, context: Context):
        self._context = context
        self._updates: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self.compares_updates = True
        self._unwrapped: list[ref[Optimizer]] = []
        self._num_known = 0
        self._of_groups: dict[tuple[int, int], tuple[list[Any], list[tuple[_Key, Any, list[float]]]]] = {}
        self._apart: set[_Key] = set()  # on the ranks of a pipeline
        self._incomplete: set[_Key] = set()  # not there on all ranks

    def note(self, optimizer: Optimizer) -> bool:
        """An optimizer updates parameters of the model; the script's own, also where it is wrapped."""
        is_first = optimizer not in self._updates
        if is_first:
            self._updates[optimizer] = 0
            if all(wrapped.optimizer is not optimizer for wrapped in self._context.optimizers):
                self._unwrapped.append(ref(optimizer))
        self._updates[optimizer] += 1
        return is_first

    def now(self) -> dict[tuple[Optimizer, int, str], Sequence[float]]:
        """Those that Python has, by the optimizers themselves, which stay as long as they are compared."""
        optimizers = list(self._optimizers())
        return {
            (optimizers[place], number, name): flat
            for (place, number, name), value, flat in self._numbers()
            if name != _UPDATES and not isinstance(value, Tensor)
        }

    def digests(self) -> tuple[float | Tensor, ...]:
        """Digests, equal on ranks with equal numbers: of all numbers, and of those common to stages.

        Two for the numbers that Python has, and two for those on a GPU, for which nobody waits: tensors.
        """
        plain, common = array("d"), array("d")
        on_device: list[Tensor] = []
        common_on_device: list[Tensor] = []
        for key, value, flat in self._numbers():
            if key in self._incomplete:
                continue
            if isinstance(value, Tensor):
                on_device.append(value.detach().reshape(-1))
                if key not in self._apart:
                    common_on_device.append(on_device[-1])
                continue
            plain.extend(flat)
            if key not in self._apart:
                common.extend(flat)
        device = self._context.device
        return (
            float(crc32(plain.tobytes())),
            float(crc32(common.tobytes())),
            _sum_of(on_device, device),
            _sum_of(common_on_device, device),
        )

    def judge(self, digests: Sequence[Sequence[float]], *, step: int) -> UsageError | None:
        """Reports differences of the numbers; collective over all ranks where they differ."""
        known, self._num_known = self._num_known, len(list(self._optimizers()))
        if self._alike(digests):
            return None
        return self._difference([_Written(told) for told in tell_all(self._written())], known, step)

    def compare(self, *, step: int) -> None:
        """Compares them now; collective over all ranks."""
        if self._context.links.world is None:
            return
        row = row_of(self.digests(), self._context.device)
        rows = self._context.links.world.gather(row, Purpose.FIGURES).tolist()
        problem = self.judge(rows, step=step)
        if problem is not None:
            raise problem

    # ---- on this rank ----

    def _optimizers(self) -> Iterator[Optimizer]:
        for wrapped in self._context.optimizers:
            yield wrapped.optimizer
        for reference in self._unwrapped:
            optimizer = reference()
            if optimizer is not None:
                yield optimizer

    def _numbers(self) -> Iterator[tuple[_Key, Any, list[float]]]:
        """Keys, values, and what goes into a digest of those that Python has."""
        for place, optimizer in enumerate(self._optimizers()):
            if self.compares_updates:
                updates = self._updates.get(optimizer, 0)
                yield (place, 0, _UPDATES), updates, [float(updates)]
            for number, group in enumerate(optimizer.param_groups):
                yield from self._of_group(place, number, group)

    def _of_group(
        self, place: int, number: int, group: Mapping[str, Any]
    ) -> list[tuple[_Key, Any, list[float]]]:
        """Those of one group, worked out anew where one has changed."""
        now = [item for item in group.items() if item[0] != "params"]
        # To compare others may fail, or wait for a GPU.
        is_plain = all(_is_unchanging(item) for _, item in now)
        before = self._of_groups.get((place, number)) if is_plain else None
        if before is not None and before[0] == now:
            return before[1]
        numbers: list[tuple[_Key, Any, list[float]]] = []
        for name, item in sorted(now):
            value = _number(item)
            if value is not ...:
                flat = [] if isinstance(value, Tensor) else _flat(value)
                numbers.append(((place, number, name), value, flat))
        if is_plain:
            self._of_groups[place, number] = now, numbers
        return numbers

    def _written(self) -> dict[str, Any]:
        optimizers = list(self._optimizers())
        used = [
            (place, number)
            for place, optimizer in enumerate(optimizers)
            for number, group in enumerate(optimizer.param_groups)
            if any(not parameter.is_meta for parameter in group["params"])
        ]
        numbers = [
            (key, value.tolist() if isinstance(value, Tensor) else value) for key, value, _ in self._numbers()
        ]
        names = [type(optimizer).__name__ for optimizer in optimizers]
        return {"names": names, "used": used, "numbers": numbers}

    # ---- over ranks ----

    def _alike(self, digests: Sequence[Sequence[float]]) -> bool:
        if all(each == digests[0] for each in digests):
            return True
        mesh = self._context.mesh
        rows = [(row[0::2], row[1::2]) for row in digests]
        for ranks in mesh.groups("dp"):
            if len({str(rows[rank][0]) for rank in ranks}) > 1:  # as text, NaN is itself
                return False
        return all(len({str(rows[rank][1]) for rank in ranks}) == 1 for ranks in mesh.groups("pp"))

    def _difference(self, written: Sequence["_Written"], known: int, step: int) -> UsageError | None:
        """The first number that ranks must have in common, and have not."""
        keys = dict.fromkeys(key for each in written for key in each.numbers)
        self._incomplete |= {key for key in keys if any(key not in each.numbers for each in written)}
        for key in (key for key in keys if key not in self._incomplete):
            for ranks in self._context.mesh.groups("dp"):
                if _differ(written, key, ranks):
                    return UsageError(_told(written, key, ranks, step, _FOR_REPLICAS))
            for ranks in self._context.mesh.groups("pp"):
                if key in self._apart or not _differ(written, key, ranks):
                    continue
                if key[0] < known and _differ(written, key, [r for r in ranks if key[:2] in written[r].used]):
                    return UsageError(_told(written, key, ranks, step, _FOR_STAGES))
                self._apart.add(key)
        return None


_FOR_UPDATES = (
    "They train one model, and must make the same updates. Call step() on all of them, or on none: where a "
    "loss decides, it is that of all replicas."
)
_FOR_REPLICAS = (
    "They are replicas of one model, and must make the same updates, or their weights drift apart. Give all "
    "the same number: a scheduler that follows a loss (ReduceLROnPlateau) needs that of all replicas: "
    "torch.distributed.all_reduce(loss, group=sw.get_dp_process_group()); loss /= sw.dp_size()."
)
_FOR_STAGES = (
    "They have parts of one model, and a number over all parameters: the optimizer computes it from those of "
    "its own rank, and so makes other updates than for the whole model. Train by replicas alone "
    "(pipeline_parallel_degree 1; with sharded_data_parallel_degree they share the memory), or with an "
    "optimizer that treats each parameter by itself. What is to differ between stages is set before the "
    "first step."
)


class _Written:
    """The numbers of a rank, as it has told them."""

    def __init__(self, told: Mapping[str, Any]):
        self.names: list[str] = told["names"]
        self.used: set[tuple[int, int]] = set(told["used"])
        self.numbers: _Numbers = dict(told["numbers"])


def _differ(written: Sequence[_Written], key: _Key, ranks: Sequence[int]) -> bool:
    return len({str(_flat(written[rank].numbers[key])) for rank in ranks}) > 1


def _told(written: Sequence[_Written], key: _Key, ranks: Sequence[int], step: int, remedy: str) -> str:
    """The equation with its values, and what to do."""
    place, number, name = key
    of_value: dict[str, list[int]] = {}
    for rank in ranks:
        of_value.setdefault(str(written[rank].numbers[key]), []).append(rank)
    values = [f"{value} on rank{'s' * (len(those) > 1)} {listed(those)}" for value, those in of_value.items()]
    shown = " and ".join(values[:3]) + (f" and {len(values) - 3} others" if len(values) > 3 else "")
    optimizer = written[0].names[place]
    if name == _UPDATES:
        return f"in step {step}, the number of updates that {optimizer} has made is {shown}. {_FOR_UPDATES}"
    return f"in step {step}, {name} of parameter group {number} of {optimizer} is {shown}. {remedy}"


def _is_unchanging(item: Any) -> bool:
    return type(item) in _UNCHANGING or (type(item) is tuple and all(map(_is_unchanging, item)))


def _number(value: Any) -> Any:
    """A number, some of them, or a tensor on a device that others wait for; ... for anything else."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Tensor):
        if value.numel() > _LARGEST or value.is_complex() or value.is_meta:
            return ...
        return value.tolist() if value.device.type == "cpu" else value
    if isinstance(value, tuple | list) and len(value) <= _LARGEST:
        found = [_number(each) for each in value]
        plain = not any(each is ... or isinstance(each, Tensor) for each in found)
        return found if plain else ...
    return ...


def _flat(value: Any) -> list[float]:
    if isinstance(value, list):
        return [number for each in value for number in _flat(each)]
    return [_NONE if value is None else float(value)]


def row_of(numbers: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """Numbers that Python has, and tensors of one, as a row."""
    # A number that is computed on a GPU stays there: the host does not wait for it.
    on_device = [place for place, number in enumerate(numbers) if isinstance(number, Tensor)]
    plain = [0.0 if place in on_device else number for place, number in enumerate(numbers)]
    row = torch.tensor(plain if on_device else numbers, dtype=torch.float64, device=device)
    for place in on_device:
        row[place] = numbers[place]
    return row


def _sum_of(tensors: Sequence[Tensor], device: torch.device) -> Tensor | float:
    """One number of several, in which each has a weight of its own."""
    if not tensors:
        return 0.0
    parts = [tensor.to(device, torch.float64) for tensor in tensors]
    numbers = torch.cat(parts)
    weights = torch.arange(1, len(numbers) + 1, dtype=torch.float64, device=device).sqrt()
    return (numbers * weights).sum()
