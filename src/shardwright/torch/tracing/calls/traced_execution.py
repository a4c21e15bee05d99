"""Executes the calls of a step function that is traced."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from shardwright.torch._private import FAKE_FAILURES
from shardwright.torch.counting.cost_counter import CostCounter
from shardwright.torch.counting.traced_draws import TracedDraws
from shardwright.torch.python_state.snapshot import Snapshot, snapshot_of
from shardwright.torch.pytorch.tensors import base_nodes, gradient_nodes, unreached
from shardwright.torch.pytorch.tree import leaves
from shardwright.torch.script_collectives import refusal_behind
from shardwright.torch.tracing.calls.real_execution import RealExecution
from shardwright.torch.tracing.calls.traced_call import Outcome, TracedCall
from shardwright.torch.tracing.calls.unit_state import UnitState
from shardwright.torch.tracing.hidden_inputs import HiddenInputs
from shardwright.torch.tracing.traced_values import TracedValues

__all__ = ["TracedExecution"]


class TracedExecution:
    """Calls on fake tensors, and on random data where these cannot get through.

    Args:
        values: of the trace.
        hidden: finds out what units use without having been given it.
        draws: random numbers of the trace.
        real: runs on random data.
    """

    def __init__(self, values: TracedValues, hidden: HiddenInputs, draws: TracedDraws, real: RealExecution):
        self._values = values
        self._hidden = hidden
        self._draws = draws
        self._real = real

    def operation(self, call: TracedCall) -> Outcome | None:
        """Runs an operation; None if the shape of its result depends on values that only one rank has."""
        try:
            with self._values.fake_mode:
                return call.run(CostCounter(row=self._draws))
        except FAKE_FAILURES:
            return self._real.operation(call, CostCounter(row=self._draws))

    def unit(self, call: TracedCall, name: str, kept: list[Any]) -> Outcome:
        """Runs a unit on fake tensors, or, where it cannot, a copy of it on random data.

        Args:
            call: of the unit.
            name: of the unit.
            kept: leaves of the arguments, as an attempt cannot change them.

        Raises:
            TraceError: neither works.
        """
        module = call.func
        assert isinstance(module, nn.Module)
        attributes = snapshot_of(module)
        state = UnitState(module)
        given, bases = gradient_nodes(call.fakes), base_nodes(call.fakes)
        try:
            with self._values.fake_mode:
                outcome = call.run(CostCounter(self._values.names, self._hidden, self._draws))
        except Exception as error:
            if (refusal := refusal_behind(error)) is not None:
                raise refusal from None
            attributes.put_back()
            cost = CostCounter(self._values.names, self._hidden, self._draws)
            outcome = self._real.unit(call, name, kept, cost, error)
            plain = [tensor for tensor in outcome.written if type(tensor) is Tensor]
            self._hidden.ran_on_a_copy(state.plain, plain)
            for sub, key, fake in outcome.attributes:
                vars(sub)[key] = fake
            for sub, key, position in outcome.passed_attributes:
                vars(sub)[key] = call.items[position]
        else:
            outcome = self._with_attributes(call, outcome, attributes)
            outcome = state.with_writes(outcome, leaves(outcome.output))
            made = [*leaves(outcome.output), *(fake for _, _, fake in outcome.attributes)]
            changed = call.changed(outcome)
            made += [call.fakes[position] for position in changed]
            bases = {position: node for position, node in bases.items() if position in changed}
            outcome = replace(outcome, unreached=unreached(given, made, bases))
        return replace(outcome, written_names=self._values.names_of(outcome.written))

    def _with_attributes(self, call: TracedCall, outcome: Outcome, attributes: Snapshot) -> Outcome:
        """Adds what a unit left in attributes; the step function finds its own tensors there, if free."""
        given = {
            id(fake): position
            for position, (item, fake) in enumerate(zip(call.items, call.fakes, strict=True))
            if self._values.is_free(item)
        }
        left: list[tuple[nn.Module, str, Tensor]] = []
        passed: list[tuple[nn.Module, str, int]] = []
        for module, key, fake in attributes.new_tensors:
            if id(fake) in given:
                passed.append((module, key, given[id(fake)]))
                vars(module)[key] = call.items[given[id(fake)]]
            elif self._values.is_made(fake):
                left.append((module, key, fake))
        return replace(outcome, attributes=left, passed_attributes=passed)
