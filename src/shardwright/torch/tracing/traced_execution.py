"""Executes traced calls: on fake tensors, or on random data of which only shapes are used.

Some units look at values (a router that skips unused experts), and some kernels have no fake version.
"""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import TraceError
from shardwright.torch._private.tensors import FAKE_FAILURES
from shardwright.torch.counting.cost_counter import CostCounter
from shardwright.torch.counting.operation_work import TracedDraws
from shardwright.torch.counting.stand_in_data import copy_of_module, random_like
from shardwright.torch.interception.step_code import is_own, point_out
from shardwright.torch.python_state.shared_state import filled_copy
from shardwright.torch.python_state.snapshot import Snapshot, snapshot_of
from shardwright.torch.pytorch import functions
from shardwright.torch.pytorch.tensors import base_nodes, copy_of_object, gradient_nodes, unreached
from shardwright.torch.pytorch.tree import flatten, leaves
from shardwright.torch.randomness import get_state, set_state
from shardwright.torch.script_collectives import refusal_behind
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor
from shardwright.torch.tracing.hidden_inputs import HiddenInputs
from shardwright.torch.tracing.path import PathRecorder
from shardwright.torch.tracing.traced_call import Outcome, TracedCall, UnitState
from shardwright.torch.tracing.traced_values import TracedValues, with_history

log = logging.getLogger(__name__)


class TracedExecution:
    """Calls on fake tensors, and on random data where these cannot get through."""

    def __init__(
        self,
        values: TracedValues,
        hidden: HiddenInputs,
        path: PathRecorder,
        draws: TracedDraws,
        device: torch.device,
    ):
        self._values = values
        self._hidden = hidden
        self._path = path
        self._draws = draws
        self._device = device

    def operation(self, call: TracedCall) -> Outcome | None:
        """Runs an operation; None if the shape of its result depends on values that only one rank has."""
        try:
            with self._values.fake_mode:
                return call.run(CostCounter(row=self._draws))
        except FAKE_FAILURES:
            return self._operation_on_data(call, CostCounter(row=self._draws))

    def unit(self, call: TracedCall, name: str, kept: list[Any]) -> Outcome:
        """Runs a unit on fake tensors, or, where it cannot, a copy of it on random data."""
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
            outcome = self._unit_on_data(call, name, kept, cost, error)
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

    def _unit_on_data(
        self, call: TracedCall, name: str, kept: list[Any], cost: CostCounter, error: Exception
    ) -> Outcome:
        """Runs a copy of a unit.

        It gets the free tensors that it would get (token ids, masks), and random data in place of others.
        """
        module = call.func
        assert isinstance(module, nn.Module)
        generators = get_state(self._device)
        spare = [self._real(item, leaf) for item, leaf in zip(call.items, kept, strict=True)]
        log.info("unit %s cannot run on fake tensors (%s): tracing it with random data", name, error)
        twin = self._twin(module)
        self._hidden.gives([*spare, *twin.parameters(), *twin.buffers()])
        args, kwargs = call.structure.rebuild(spare)
        before = self._path.versions(spare)
        attributes = snapshot_of(twin)
        state = UnitState(module, twin)
        set_state(generators, self._device)
        try:
            with cost:
                output = filled_copy(twin, args, kwargs)
        except Exception as second:
            if is_own(error, second):
                point_out(second, twin, name)
                raise second from None
            raise _cannot_be_traced(module, name, error, second) from second
        modules = dict(zip(twin.modules(), module.modules(), strict=True))
        own = {id(s): i for i, s in enumerate(spare) if self._values.is_free(call.items[i])}
        new = [(modules[sub], key, tensor) for sub, key, tensor in attributes.new_tensors]
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in twin.parameters())
        outcome = self._faked(output, call.fakes, spare, before, cost, trained=trained)
        return replace(
            state.with_writes(outcome, leaves(output)),
            attributes=[(m, key, self._fake_result(t)) for m, key, t in new if id(t) not in own],
            passed_attributes=[(m, key, own[id(t)]) for m, key, t in new if id(t) in own],
        )

    def _twin(self, module: nn.Module) -> nn.Module:
        """A copy of a unit with random data in place of fake tensors."""
        twin = copy_of_module(
            module,
            self._device,
            originals=self._values.lent_for,
            shared=self._draws.generators,
            stands_for=self._hidden.stands_for,
        )
        self._hidden.stands_for(twin, module)
        return twin

    def _operation_on_data(self, call: TracedCall, cost: CostCounter) -> Outcome | None:
        """Runs an operation without a fake kernel (a CTC loss), on random data and on zeros.

        None if the shape of its result follows from the values of deferred tensors: it must be the same for
        both, and whole numbers, which mostly are sizes and indices, are not tried at all, but for operations
        of which it is known. It may follow from free tensors: then it is noted as a read of these.
        """
        is_free = self._values.is_free
        pairs = list(zip(call.items, call.fakes, strict=True))
        deferred = [isinstance(fake, Tensor) and not is_free(item) for item, fake in pairs]
        whole = (d and not _has_fractions(fake) for d, fake in zip(deferred, call.fakes, strict=True))
        if call.func not in functions.KEEP_SHAPE and any(whole):
            return None
        slices = [item for item in call.items if isinstance(item, slice)]
        ends = [end for item in slices for end in (item.start, item.stop, item.step)]
        if any(isinstance(end, Tensor) and not is_free(end) for end in ends):
            return None
        generators = get_state(self._device)
        spare = [self._real(item, fake) for item, fake in pairs]
        zeros = [self._real(item, fake) for item, fake in pairs]
        zeros = [torch.zeros_like(own) if d else own for d, own in zip(deferred, zeros, strict=True)]
        before, blank = self._path.versions(spare), self._path.versions(zeros)
        set_state(generators, self._device)
        try:
            args, kwargs = call.structure.rebuild(spare)
            with cost:
                output = call.func(*args, **kwargs)
            generators = get_state(self._device)
            args, kwargs = call.structure.rebuild(zeros)
            again = call.func(*args, **kwargs)
        except Exception as error:
            log.info("%s() cannot run on random data: %s", functions.name_of(call.func), error)
            return None
        finally:
            set_state(generators, self._device)
        first, second = ([getattr(item, "shape", None) for item in leaves(o)] for o in (output, again))
        if first != second or None in first:
            return None
        known = [own if d else item for d, own, item in zip(deferred, zeros, call.items, strict=True)]
        self._path.note(call.func, known, call.structure, again, blank, draws=False, reads=True)
        return self._faked(output, call.fakes, spare, before, cost)

    def _faked(
        self,
        output: Any,
        fakes: list[Any],
        spare: list[Any],
        before: list[int | None],
        cost: CostCounter,
        *,
        trained: bool = False,
    ) -> Outcome:
        """Translates the outcome of a call that ran for real into one on fake tensors.

        On other data it may compute what on these it gave back as it was, so that is a new tensor: one that
        requires gradients where `trained`.
        """
        items, shape = flatten(output)
        versions = [
            None if count is None else fake._version - (item._version - count)
            for fake, item, count in zip(fakes, spare, before, strict=True)
        ]
        given = {id(own): fake for own, fake in zip(spare, fakes, strict=True)}
        same = {
            id(own)
            for own, fake, version in zip(spare, fakes, versions, strict=True)
            if version is not None and version == fake._version
        }
        results = []
        for item in items:
            if id(item) in same:
                results.append(self._fake_result(item, requires_grad=item.requires_grad or trained))
            else:
                results.append(given[id(item)] if id(item) in given else self._fake_result(item))
        return Outcome(shape.rebuild(results), versions, cost)

    def _real(self, item: Any, leaf: Any) -> Any:
        """The real argument of a call: free tensors as they are, random data for all others."""
        if not isinstance(item, Tensor):  # a slice or a cache with tensors inside
            copy = copy_of_object(leaf, self._real_inside)
            if copy is not leaf:
                self._hidden.stands_for(copy, item)
            return copy
        if not self._values.is_free(item):
            own = random_like(leaf, self._device)
            # A leaf of autograd could not be changed in place, as what another unit returned can.
            return own.clone() if isinstance(own, Tensor) and own.requires_grad else own
        own = item.detach().to(self._device, copy=True)
        return own.requires_grad_() if item.requires_grad else own

    def _real_inside(self, tensor: Tensor) -> Tensor:
        fake = self._values.fake(tensor)
        own: Tensor = self._real(tensor, fake)
        self._hidden.stands_for(own, fake)
        return own

    def _fake_result(self, item: Any, *, requires_grad: bool | None = None) -> Any:
        if not isinstance(item, Tensor):
            return item
        fake = self._without_data(item)
        wanted = item.requires_grad if requires_grad is None else requires_grad
        can = fake.is_floating_point() or fake.is_complex()
        return with_history(fake, self._values.fake_mode) if wanted and can else fake

    def _without_data(self, item: Tensor) -> Tensor:
        mode = self._values.fake_mode
        if not isinstance(item, DividedTensor):
            return mode.from_tensor(item.detach(), static_shapes=True)
        # Parts are of no interest to a trace, and operations on them may ask other ranks.
        with mode:
            return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)


def _cannot_be_traced(module: nn.Module, name: str, first: Exception, second: Exception) -> TraceError:
    what = f"unit {name}" if name else "the model"
    return TraceError(
        f"{what} ({type(module).__name__}) cannot be traced: on tensors without data it raises "
        f"{type(first).__name__} ({first}), on random data {type(second).__name__} ({second})."
    )


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
