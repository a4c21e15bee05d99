"""The result of a traced call, as the step function and other ranks get it."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.pytorch.tree import Structure, flatten
from shardwright.torch.tracing.calls.traced_call import Outcome, TracedCall, is_opaque
from shardwright.torch.tracing.recorded_step import StepResult
from shardwright.torch.tracing.traced_values import TracedValues

__all__ = ["CallResults"]


@dataclass(frozen=True, slots=True)
class CallResults:
    """The result of a call, and the tensors that it left in attributes of a unit.

    Attributes:
        structure: of the result.
        leaves: of the result: deferred tensors in place of fake ones, and arguments that are passed on.
        passed: position among the leaves -> position of the argument that is passed on.
        attributes: where a unit leaves tensors: (module, name, what another rank finds there).
        writes: (position among the leaves, and the attributes behind them, value) of what is new.
    """

    structure: Structure
    leaves: tuple[Any, ...]
    passed: dict[int, int]
    attributes: tuple[tuple[nn.Module, str, Tensor], ...]
    writes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, call: TracedCall, outcome: Outcome, values: TracedValues, node: int) -> "CallResults":
        """Gives a value to every new tensor.

        Args:
            call: the call.
            outcome: what it gave and did, with fake tensors.
            values: of the trace.
            node: index of the call's node.
        """
        sources = {id(item): position for position, item in enumerate(call.items) if is_opaque(item)}
        sources |= {id(fake): p for p, fake in enumerate(call.fakes) if isinstance(fake, Tensor)}
        results, structure = flatten(outcome.output)
        returned: list[Any] = []
        writes: list[tuple[int, int]] = []
        passed: dict[int, int] = {}
        for position, result in enumerate(results):
            if id(result) in sources:
                passed[position] = sources[id(result)]
                returned.append(call.items[passed[position]])
            elif isinstance(result, Tensor):
                value = values.new(node, len(writes), values.as_fake(result))
                writes.append((position, value))
                returned.append(values[value].holder)
            else:
                returned.append(result)
        left: list[tuple[nn.Module, str, Tensor]] = []
        for module, key, fake in outcome.attributes:
            # Units find the fake tensor itself in the attribute, and so does the step function.
            value = values.new(node, len(writes), fake, holder=fake)
            writes.append((len(results) + len(left), value))
            left.append((module, key, DeferredTensor(fake, value)))
        return cls(structure, tuple(returned), passed, tuple(left), tuple(writes))

    def here(self) -> Any:
        """The result as the step function gets it in the trace."""
        return self.structure.rebuild(self.leaves)

    def elsewhere(self) -> StepResult:
        """The result as a rank returns it that does not execute the call."""
        return StepResult(
            structure=self.structure.without_template(),
            leaves=tuple(None if at in self.passed else item for at, item in enumerate(self.leaves)),
            passed=tuple(self.passed.items()),
        )
