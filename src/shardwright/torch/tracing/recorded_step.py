"""One step of a trace: an intercepted operation, or the call of a unit."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwright.runtime.traced import Change
from shardwright.torch.pytorch.functions import name_of_call
from shardwright.torch.pytorch.tree import Structure
from shardwright.torch.randomness import Draw

_NUMBERS = frozenset({bool, int, float, str})


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, for ranks that do not execute it.

    Attributes:
        structure: of the result; None for a step that every rank executes.
        leaves: its leaves as such a rank returns them.
        passed: (position in the result, position in the arguments) of arguments that are returned as they
            are.
    """

    structure: Structure | None = None
    leaves: tuple[Any, ...] = ()
    passed: tuple[tuple[int, int], ...] = ()

    @property
    def numbers(self) -> tuple[tuple[int, Any], ...]:
        """(position among the leaves, value) of what is neither a tensor nor an object."""
        return tuple((p, item) for p, item in enumerate(self.leaves) if type(item) in _NUMBERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCall:
    """The part of a step that only calls of units have.

    Attributes:
        attributes: where the unit leaves tensors: (module, name, what another rank finds there). Among the
            writes of the step they follow the leaves of the result.
        passed_attributes: where it leaves free arguments: (module, name, position in the arguments).
        recomputed: the step function itself computes it again in the backward (``torch.utils.checkpoint``).
        fills: numbers of the containers among its arguments that it changes (see `Containers`).
        found: attributes inside the unit that it reads (see `unit_attributes`): its last arguments.
        own_results: positions of results in memory of the unit's own, which its next call overwrites.
        shared_results: the same of a unit whose results are changed afterwards, under both names.
    """

    attributes: tuple[tuple[nn.Module, str, Tensor], ...] = ()
    passed_attributes: tuple[tuple[nn.Module, str, int], ...] = ()
    recomputed: bool = False
    fills: tuple[int, ...] = ()
    found: tuple[str, ...] = ()
    own_results: tuple[int, ...] = ()
    shared_results: tuple[int, ...] = ()


_NO_RESULT, _NO_UNIT = StepResult(), UnitCall()


@dataclass(slots=True, kw_only=True)
class Step:
    """One intercepted operation or unit call, in the order of execution.

    Attributes:
        func: the torch function, or the unit's module.
        node: index of its node in the graph; None for free operations.
        line: where in the user's code.
        draws: random numbers that it takes.
        looks_at_values: values decide what it does.
        reads: (position among the leaves of the arguments, value) of each value that it reads.
        writes: (position among the leaves of the result, value).
        changes: what it changes in place, and what shares memory with that and is read later.
        bases: for each memory of which several tensors change, the one that the others are views of.
        result: for ranks that do not execute it.
        unit: further facts about the call of a unit.
        changed_parameters: names of parameters that it changes in place.
        counters: names of buffers that it reads or changes on every rank.
        given_counters: its arguments have such buffers, although it has a place.
        flat: its arguments are the leaves themselves, all by position.
    """

    func: Any
    node: int | None
    line: str = ""
    draws: tuple[Draw, ...] = ()
    looks_at_values: bool = False
    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()
    changes: tuple[Change, ...] = ()
    bases: tuple[Change, ...] = ()
    result: StepResult = _NO_RESULT
    unit: UnitCall = _NO_UNIT
    changed_parameters: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    given_counters: bool = False
    flat: bool = False

    @property
    def call(self) -> str:
        """The call and its line, as messages name them: ``train.py:7: add()``."""
        return f"{self.line}: {name_of_call(self.func)}"

    @property
    def inputs(self) -> tuple[int, ...]:
        """The values that it depends on, each once."""
        changed = [c.before for c in (*self.changes, *self.bases) if c.before is not None]
        return tuple(dict.fromkeys([*(value for _, value in self.reads), *changed]))

    @property
    def shared_results(self) -> tuple[int, ...]:
        """Positions of results in memory of its unit's own that are changed afterwards."""
        return self.unit.shared_results
