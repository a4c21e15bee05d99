"""Runs a step function once on tensors without data, and writes down what it does.

Units run under fake tensors: shapes, no memory, no weights needed. Operations between units that depend on
no unit and no parameter (*free*: masks, positions) run for real, so Python may look at their values. What a
unit returns is a `DeferredTensor`.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import DeferredReadError, TraceError, UsageError
from shardwright.model_graph import ModelGraph, Node, TensorSpec, Together, Unit, Value
from shardwright.torch import functions
from shardwright.torch._private import (
    FAKE_FAILURES,
    FakeTensor,
    new_fake_mode,
    num_hooks_registered,
    storage_key,
)
from shardwright.torch.aliases import follow_changes, view_of
from shardwright.torch.batch import is_batch_tensor
from shardwright.torch.cost import CostCounter, class_key, cost_class
from shardwright.torch.deferred import REMEDY, DeferredTensor, spec_of
from shardwright.torch.glue import GlueMode, set_active_handler, without_hooks
from shardwright.torch.glue_buffers import BufferWatch
from shardwright.torch.grad_scaler import adopt_scaler
from shardwright.torch.path import PathRecorder
from shardwright.torch.recording import Change, Sample, Step, Trace
from shardwright.torch.rng import get_state, set_state
from shardwright.torch.samples import copy_of_module, copy_of_object, random_like
from shardwright.torch.source_line import called_from, outermost_checkpoint, user_line
from shardwright.torch.together import (
    Regions,
    buffer_together,
    counters_together,
    gradient_together,
    parameters_together,
)
from shardwright.torch.trace_guard import Attributes, OpenModules, Unchanged
from shardwright.torch.tree import Structure, flatten, leaves
from shardwright.torch.unit_map import UnitMap
from shardwright.torch.working_memory import WorkingMemory, working_memory

log = logging.getLogger(__name__)

__all__ = ["trace_step"]

_PRODUCTS = frozenset({Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul})


@dataclass(slots=True)
class _Recorded:
    producer: int
    position: int
    fake: Tensor
    holder: Tensor | None
    had_gradient: bool

    @property
    def spec(self) -> TensorSpec:
        # A change in place may have given it a history, or taken it.
        return replace(spec_of(self.fake), requires_grad=self.had_gradient)


class Tracer:
    """The handler of a step function that is being traced."""

    def __init__(
        self,
        unit_map: UnitMap,
        device: torch.device,
        batch: Sequence[Any] = (),
        *,
        count_memory: bool = False,
    ):
        self._count_memory = count_memory
        self.unit_map = unit_map
        self._device = device
        self._names = dict(unit_map.parameters)
        self._lent_for: dict[int, Tensor] = {}
        self.fake_mode = new_fake_mode()
        self.steps: list[Step] = []
        self.nodes: list[Node] = []
        self.values: list[_Recorded] = []
        self.loss: int | None = None
        self.backward_at: int | None = None
        self.samples: dict[str, Sample] = {}
        self.batch_bytes = 0
        self._recomputes = False
        self._path = PathRecorder(batch)
        self._value_of: dict[int, int] = {}
        self._fakes: dict[int, Tensor] = {}
        self._keep_alive: list[Any] = []
        self._calls: dict[str, int] = {}
        self._mutates: set[str] = set()
        self._changers: dict[int, list[Step]] = {}
        self._changed_memory: dict[int, int] = {}
        self._state: dict[int, str] = {}
        self._counters: dict[int, str] = {}
        self._initial: dict[int, str] = {}
        self._regions = Regions()
        self._gradients: dict[int, bool] = {}
        self._batch_storages: set[int] = set()
        self._values_in: dict[int, list[int]] = {}
        self._memory: dict[str, WorkingMemory] = {}

    # ---- what the step function calls ----

    def operation(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records a torch function; executes it for real if it is free, else on fake tensors."""
        if func is Tensor.backward:
            return self.backward(args[0], kwargs.get("gradient", args[1] if len(args) > 1 else None))
        items, structure = flatten((args, kwargs))
        reads = self._reads(items)
        parameters = self._parameters(items)
        if not reads and not parameters:
            return self._free_operation(func, args, kwargs, items, structure)
        if func in _PRODUCTS:
            adopt_scaler()
        line = user_line()
        if func in functions.READS_DATA:
            raise self._unreadable(
                f"{line}: {functions.reader_of(func)} reads the value of a tensor that only one rank "
                f"has. {REMEDY}",
                reads,
            )
        arguments = structure.rebuild([self._fake(item) for item in items])
        cost = CostCounter()
        fakes = leaves(arguments)
        key = self._sample(func, functions.name_of(func), items, fakes, fakes, structure)
        memory = self._working_memory(key, func, items, fakes, structure)
        try:
            output, versions = self._execute(func, arguments, cost)
        except FAKE_FAILURES as error:
            cost = CostCounter()
            found = self._operation_for_real(func, items, fakes, structure, cost)
            if found is None:
                raise self._unreadable(
                    f"{line}: the shape of the result of {functions.name_of(func)}() depends on the values "
                    f"of a tensor that only one rank has. {REMEDY}",
                    reads,
                ) from error
            output, versions = found
        node = Node(
            kind="op",
            name=functions.name_of(func),
            inputs=tuple(dict.fromkeys(value for _, value in reads)),
            outputs=(),
            parameters=parameters,
            cost_class=key,
            flops=cost.flops,
            saved_bytes=cost.saved_bytes,
            work_bytes=memory.work_bytes,
            weight_bytes=memory.weight_bytes,
            random=cost.random,
            line=line,
        )
        unnoticed = functions.unnoticed_changes(func, *arguments)
        if func is torch.autograd.grad:
            asked = (item for item in items if isinstance(item, Tensor) and item.requires_grad)
            self._gradients[len(self.nodes)] = any(self._value(item) is None for item in asked)
        return self._record(func, node, items, reads, fakes, output, versions, cost, unnoticed)

    def unit_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records a call of a unit and runs it on fake tensors."""
        with without_hooks(module):
            return self._unit_call(module, args, kwargs)

    def _unit_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self.unit_map.units[id(module)]
        self._recomputes = self._recomputes or called_from("torch.utils.checkpoint")
        items, structure = flatten((args, kwargs))
        reads = self._reads(items)
        line = user_line()
        arguments = structure.rebuild([self._fake(item) for item in items])
        fakes = leaves(arguments)
        # Before the call: it may put fake tensors into such an object.
        kept = [
            copy_of_object(fake) if _is_opaque(item) else fake
            for item, fake in zip(items, fakes, strict=True)
        ]
        key = self._sample(module, class_key(module), items, fakes, kept, structure)
        memory = self._working_memory(key, module, items, fakes, structure)
        attributes = Attributes(module)
        cost = CostCounter(self._names)
        own = self._names_in(module)
        buffers = _buffers_of(module)
        try:
            output, versions = self._execute(module, arguments, cost)
        except Exception as error:
            attributes.restore()
            cost = CostCounter(self._names)
            spare = [self._real(item, leaf) for item, leaf in zip(items, kept, strict=True)]
            output, versions = self._execute_for_real(module, name, fakes, spare, structure, cost, error)
        ordinal = self._calls.get(name, 0)
        self._calls[name] = ordinal + 1
        if cost.mutated_buffers or buffers != _buffers_of(module):
            self._mutates.add(name)
        node = Node(
            kind="unit",
            name=name,
            ordinal=ordinal,
            inputs=tuple(dict.fromkeys(value for _, value in reads)),
            outputs=(),
            parameters=tuple(sorted(cost.parameters - own)),
            cost_class=key,
            flops=cost.flops,
            saved_bytes=cost.saved_bytes,
            work_bytes=memory.work_bytes,
            weight_bytes=memory.weight_bytes,
            random=cost.random,
            line=line,
        )
        return self._record(module, node, items, reads, fakes, output, versions, cost)

    def backward(self, loss: Tensor, gradient: Tensor | None) -> None:
        """Records where the backward starts."""
        if self.backward_at is not None:
            raise UsageError(
                f"{user_line()}: backward is called a second time in one step function. "
                "Add the losses and call backward once."
            )
        value = self._value(loss)
        if value is None or not self.values[value].fake.requires_grad:
            raise TraceError(
                f"{user_line()}: the loss does not depend on any trained parameter of the model, so there is "
                "nothing to train. Compute it from what the model returns, without detach() or no_grad()."
            )
        if gradient is None and self.values[value].fake.numel() != 1:
            raise UsageError(
                f"{user_line()}: the loss has shape {tuple(loss.shape)}. Reduce it to one number, for "
                f"example with "
                "loss.mean()."
            )
        self.loss = value
        self.backward_at = len(self.steps)

    def _unreadable(self, message: str, reads: list[tuple[int, int]]) -> DeferredReadError:
        error = DeferredReadError(message)
        pending, seen = [value for _, value in reads], set[int]()
        while pending:
            value = pending.pop()
            if value not in seen and value not in self._initial:
                pending.extend(self.nodes[self.values[value].producer].inputs)
            seen.add(value)
        error.buffers = frozenset(self._initial[value] for value in seen if value in self._initial)
        return error

    def _sample(
        self,
        func: Any,
        kind: str,
        items: list[Any],
        fakes: list[Any],
        kept: list[Any],
        structure: Structure,
    ) -> str:
        """The cost class of a call, whose arguments are kept if it is the first."""
        # What comes from the batch takes no memory when it is kept, unlike what another call made.
        from_batch = [at for at, item in enumerate(items) if self._is_somebody_elses(item)]
        key = cost_class(func, f"{kind} {from_batch}" if from_batch else kind, fakes)
        if key not in self.samples:
            self.samples[key] = Sample(func, kept, structure.without_template())
        return key

    def _working_memory(
        self, key: str, func: Any, items: list[Any], fakes: list[Any], structure: Structure
    ) -> WorkingMemory:
        """What a cost class needs for a moment; counted for the first of its calls."""
        # A gradient leads back through what ran before, where recomputation would call units once more.
        if not self._count_memory or func is torch.autograd.grad:
            return WorkingMemory()
        if key not in self._memory:
            given = [self._is_somebody_elses(item) for item in items]
            with self.fake_mode:
                self._memory[key] = working_memory(func, fakes, structure, given=given)
        return self._memory[key]

    def _is_somebody_elses(self, item: Any) -> bool:
        """Whether a leaf is a tensor that no node made: the batch's, or a parameter."""
        return isinstance(item, Tensor) and self._value(item) is None

    def note_batch(self, tensors: Sequence[Tensor]) -> None:
        """Takes note of the tensors of the microbatch: that they are saved takes no memory."""
        for tensor in tensors:
            self._batch_storages.add(storage_key(self._as_fake(tensor)))
            self.batch_bytes += tensor.nbytes

    # ---- recording ----

    def _free_operation(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        items: list[Any],
        structure: Structure,
    ) -> Any:
        step = Step(func=func, node=None, counters=self._counters_of(items))
        self.steps.append(step)
        versions = self._path.versions(items)
        with CostCounter() as cost:
            result = func(*args, **kwargs)
        step.draws = tuple(cost.draws)
        reads = cost.reads_data or func in functions.READS_DATA
        self._path.note(func, items, structure, result, versions, draws=bool(cost.draws), reads=reads)
        return result

    def _counters_of(self, items: list[Any]) -> tuple[str, ...]:
        if not self._counters:
            return ()
        real = [item for item in items if type(item) is Tensor and item.layout is torch.strided]
        found = (self._counters.get(storage_key(item)) for item in real)
        return tuple(dict.fromkeys(name for name in found if name is not None))

    def watch(self, buffers: Mapping[str, Tensor], state: Collection[str], counters: Collection[str]) -> None:
        """Makes some buffers values of the graph, and notes where others are used on every rank."""
        self._state = {id(buffer): name for name, buffer in buffers.items() if name in state}
        self._counters = {storage_key(buffer): name for name, buffer in buffers.items() if name in counters}

    def is_value(self, item: Any) -> bool:
        """Whether a tensor is a value of the graph."""
        return self._value(item) is not None

    def _execute(
        self, func: Callable[..., Any], arguments: Any, cost: CostCounter
    ) -> tuple[Any, list[int | None]]:
        args, kwargs = arguments
        versions = [item._version if isinstance(item, Tensor) else None for item in leaves(arguments)]
        with self.fake_mode, cost:
            return func(*args, **kwargs), versions

    def _execute_for_real(
        self,
        module: nn.Module,
        name: str,
        fakes: list[Any],
        spare: list[Any],
        structure: Structure,
        cost: CostCounter,
        error: Exception,
    ) -> tuple[Any, list[int | None]]:
        """Runs a unit that fake tensors cannot get through: only its shapes are used.

        It gets the free tensors that it would get (token ids, masks), and random data in place of others.
        Some units look at values (a router that skips unused experts), and some kernels have no fake version.
        """
        log.info("unit %s cannot run on fake tensors (%s): tracing it with random data", name, error)
        twin = copy_of_module(module, self._device, originals=self._lent_for)
        args, kwargs = structure.rebuild(spare)
        before = self._path.versions(spare)
        generators = torch.random.get_rng_state()
        try:
            with cost:
                output = twin(*args, **kwargs)
        except Exception as second:
            raise TraceError(
                f"unit {name} ({type(module).__name__}) cannot be traced: on tensors without data it raises "
                f"{type(error).__name__} ({error}), on random data {type(second).__name__} ({second})."
            ) from second
        finally:
            torch.random.set_rng_state(generators)
        return self._faked(output, fakes, spare, before)

    def _operation_for_real(
        self,
        func: Callable[..., Any],
        items: list[Any],
        fakes: list[Any],
        structure: Structure,
        cost: CostCounter,
    ) -> tuple[Any, list[int | None]] | None:
        """Runs an operation without a fake kernel (a CTC loss), on random data and on zeros.

        None if the shape of its result follows from the values of deferred tensors: it must be the same for
        both, and whole numbers, which mostly are sizes and indices, are not tried at all. It may follow from
        free tensors: then it is noted as a read of these.
        """
        pairs = list(zip(items, fakes, strict=True))
        deferred = [isinstance(fake, Tensor) and not self._is_free(item) for item, fake in pairs]
        if any(d and not fake.is_floating_point() for d, fake in zip(deferred, fakes, strict=True)):
            return None
        ends = [
            end for item in items if isinstance(item, slice) for end in (item.start, item.stop, item.step)
        ]
        if any(isinstance(end, Tensor) and not self._is_free(end) for end in ends):
            return None
        spare = [self._real(item, fake) for item, fake in pairs]
        zeros = [self._real(item, fake) for item, fake in pairs]
        zeros = [torch.zeros_like(own) if d else own for d, own in zip(deferred, zeros, strict=True)]
        before, blank = self._path.versions(spare), self._path.versions(zeros)
        generators = get_state(self._device)
        try:
            args, kwargs = structure.rebuild(spare)
            with cost:
                output = func(*args, **kwargs)
            args, kwargs = structure.rebuild(zeros)
            again = func(*args, **kwargs)
        except Exception as error:
            log.info("%s() cannot run on random data: %s", functions.name_of(func), error)
            return None
        finally:
            set_state(generators, self._device)
        first, second = ([getattr(item, "shape", None) for item in leaves(o)] for o in (output, again))
        if first != second or None in first:
            return None
        known = [own if d else item for d, own, item in zip(deferred, zeros, items, strict=True)]
        self._path.note(func, known, structure, again, blank, draws=False, reads=True)
        return self._faked(output, fakes, spare, before)

    def _faked(
        self, output: Any, fakes: list[Any], spare: list[Any], before: list[int | None]
    ) -> tuple[Any, list[int | None]]:
        """What a call that ran for real would have given and done on fake tensors."""
        items, shape = flatten(output)
        versions = [
            None if count is None else fake._version - (item._version - count)
            for fake, item, count in zip(fakes, spare, before, strict=True)
        ]
        given = {id(own): fake for own, fake in zip(spare, fakes, strict=True)}
        results = [given[id(item)] if id(item) in given else self._fake_result(item) for item in items]
        return shape.rebuild(results), versions

    def _real(self, item: Any, leaf: Any) -> Any:
        """What a call gets when it runs for real: free tensors as they are, random data for all others."""
        if not isinstance(item, Tensor):  # a slice or a cache with tensors inside
            return copy_of_object(leaf, lambda tensor: self._real(tensor, self._fake(tensor)))
        if not self._is_free(item):
            own = random_like(leaf, self._device)
            # A leaf of autograd could not be changed in place, as what another unit returned can.
            return own.clone() if isinstance(own, Tensor) and own.requires_grad else own
        own = item.detach().to(self._device, copy=True)
        return own.requires_grad_() if item.requires_grad else own

    def _is_free(self, item: Any) -> bool:
        """Whether it is a tensor that every rank has, with its values."""
        known = isinstance(item, Tensor) and not isinstance(item, FakeTensor | nn.Parameter)
        return known and self._value(item) is None and not item.is_meta

    def _fake_result(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        fake = self.fake_mode.from_tensor(item.detach(), static_shapes=True)
        return fake.requires_grad_() if item.requires_grad else fake

    def _record(
        self,
        func: Any,
        node: Node,
        items: list[Any],
        reads: list[tuple[int, int]],
        fakes: list[Any],
        output: Any,
        versions: list[int | None],
        cost: CostCounter,
        unnoticed: tuple[Any, ...] = (),
    ) -> Any:
        index = len(self.nodes)
        region = outermost_checkpoint() if torch.is_grad_enabled() else None
        if region is not None:
            self._regions.note(index, region, user_line(region))
        changed_parameters = self._changed_parameters(fakes, versions)
        changes = self._changes(func, index, items, fakes, versions, unnoticed)
        results, structure = flatten(output)
        positions = {id(fake): position for position, fake in enumerate(fakes) if isinstance(fake, Tensor)}
        opaque = {id(item): position for position, item in enumerate(items) if _is_opaque(item)}
        writes: list[tuple[int, int]] = []
        passed: list[tuple[int, int]] = []
        returned: list[Any] = []
        for position, result in enumerate(results):
            source = positions.get(id(result), opaque.get(id(result)))
            if source is not None:
                passed.append((position, source))
                returned.append(items[source])
            elif isinstance(result, Tensor):
                value = self._new_value(index, len(writes), self._as_fake(result))
                writes.append((position, value))
                returned.append(self.values[value].holder)
            else:
                returned.append(result)
        outputs = tuple(value for _, value in writes)
        cost.ignore(self._batch_storages)
        saved = (value for value in (*node.inputs, *outputs) if cost.saves(self._storage_of(value)))
        self.nodes.append(
            replace(
                node,
                outputs=outputs,
                saved_bytes=cost.saved_bytes,
                saved_values=tuple(dict.fromkeys(self._values_in[self._storage_of(v)][0] for v in saved)),
            )
        )
        blank = [None if position in dict(passed) else item for position, item in enumerate(returned)]
        step = Step(
            func=func,
            node=index,
            line=node.line,
            draws=tuple(cost.draws),
            reads=tuple(reads),
            writes=tuple(writes),
            changes=tuple(changes),
            structure=structure.without_template(),
            result=tuple(blank),
            passed=tuple(passed),
            changed_parameters=changed_parameters,
        )
        for memory in {change.view.memory for change in changes}:
            self._changers.setdefault(memory, []).append(step)
        self.steps.append(step)
        return structure.rebuild(returned)

    def _changed_parameters(self, fakes: list[Any], versions: list[int | None]) -> tuple[str, ...]:
        changed = [
            storage_key(fake)
            for fake, version in zip(fakes, versions, strict=True)
            if version is not None and fake._version != version
        ]
        if not changed:
            return ()
        lent = (item for item in self._keep_alive if id(item) in self._lent_for)
        return tuple(self._names[id(fake)] for fake in lent if storage_key(fake) in changed)

    def _changes(
        self,
        func: Any,
        node: int,
        items: list[Any],
        fakes: list[Any],
        versions: list[int | None],
        unnoticed: tuple[Any, ...],
    ) -> list[Change]:
        """Gives every tensor that was changed in place, and every alias of it, a new value."""
        changed = [
            position
            for position, (fake, version) in enumerate(zip(fakes, versions, strict=True))
            if version is not None and (fake._version != version or any(fake is item for item in unnoticed))
        ]
        changes: list[Change] = []
        memories = {storage_key(fakes[position]) for position in changed}
        done: set[int] = set()
        for position in changed:
            item, fake = items[position], fakes[position]
            if isinstance(item, nn.Parameter) or id(item) in self._lent_for or id(item) in done:
                continue
            done.add(id(item))
            before = self._value(item)
            if tuple(item.shape) != tuple(fake.shape):
                raise UsageError(
                    f"{user_line()}: {functions.name_of(func)}() changes the shape of a tensor in place from "
                    f"{tuple(item.shape)} to {tuple(fake.shape)}, which other ranks cannot follow. Give the "
                    "result a name instead: x = x.unsqueeze(0), not x.unsqueeze_(0)."
                )
            if before is None:
                self._changed_memory[storage_key(item)] = storage_key(fake)
            after = self._new_value(node, -1, fake, holder=item)
            changes.append(Change(position, before, after, view_of(fake)))
        for value in sorted(value for memory in memories for value in self._values_in.get(memory, ())):
            recorded = self.values[value]
            current = recorded.holder is not None and self._value_of.get(id(recorded.holder)) == value
            if current and id(recorded.holder) not in done:
                done.add(id(recorded.holder))
                after = self._new_value(node, -1, recorded.fake, holder=recorded.holder)
                changes.append(Change(None, value, after, view_of(recorded.fake)))
        return changes

    def _initial_value(self, buffer: Tensor) -> int:
        """What a buffer holds at the start; the node that reads it first counts as its producer."""
        value = self._new_value(len(self.nodes), -1, self._as_fake(buffer), holder=buffer)
        self._initial[value] = self._state[id(buffer)]
        return value

    def _changed_elsewhere(self, item: Tensor) -> int | None:
        """The value of a tensor that every rank had, until a step changed it through another name."""
        if not self._changed_memory or isinstance(item, DeferredTensor | FakeTensor | nn.Parameter):
            return None
        if item.layout is not torch.strided or storage_key(item) not in self._changed_memory:
            return None
        value, fake = None, self._as_fake(item)
        for step in self._changers[self._changed_memory[storage_key(item)]]:
            assert step.node is not None
            after = self._new_value(step.node, -1, fake, holder=item)
            step.changes = (*step.changes, Change(None, value, after, view_of(fake)))
            value = after
        return value

    def _new_value(self, producer: int, position: int, fake: Tensor, holder: Tensor | None = None) -> int:
        value = len(self.values)
        if holder is None:
            holder = DeferredTensor(fake, value)
        self.values.append(_Recorded(producer, position, fake, holder, fake.requires_grad))
        self._value_of[id(holder)] = value
        self._values_in.setdefault(storage_key(fake), []).append(value)
        self._keep_alive.append(holder)
        return value

    def _storage_of(self, value: int) -> int:
        return storage_key(self.values[value].fake)

    def lend(self, tensor: Tensor) -> Tensor:
        """A fake tensor on the computing device, in place of a parameter or buffer."""
        with self.fake_mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        self._names[id(fake)] = self.unit_map.parameters[id(tensor)]
        self._lent_for[id(fake)] = tensor
        self._keep_alive.append(fake)
        return fake

    # ---- looking things up ----

    def _value(self, item: Any) -> int | None:
        return self._value_of.get(id(item)) if isinstance(item, Tensor) else None

    def _reads(self, items: list[Any]) -> list[tuple[int, int]]:
        found = []
        for position, item in enumerate(items):
            value = self._value(item)
            if value is None and isinstance(item, Tensor):
                value = (
                    self._initial_value(item) if id(item) in self._state else self._changed_elsewhere(item)
                )
            if value is not None:
                found.append((position, value))
            elif isinstance(item, FakeTensor) and id(item) not in self._lent_for:
                raise DeferredReadError(
                    f"{user_line()}: a tensor that was made inside a unit left it by another way than as its "
                    f"result (through an attribute, a list, a hook of a module inside it). {REMEDY}"
                )
            elif isinstance(item, DeferredTensor):
                raise UsageError(
                    f"{user_line()}: a tensor of an earlier call of a step function is used here. Its "
                    f"data is on "
                    "another rank and gone: return what you need from the step function as a StepOutput."
                )
        return found

    def _parameters(self, items: list[Any]) -> tuple[str, ...]:
        names = (self._names.get(id(item)) for item in items if isinstance(item, nn.Parameter))
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def _names_in(self, module: nn.Module) -> set[str]:
        return {self._names[id(tensor)] for tensor in _tensors_of(module) if id(tensor) in self._names}

    def _fake(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        value = self._value_of.get(id(item))
        if value is not None:
            return self.values[value].fake
        return self._as_fake(item)

    def _as_fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._fakes:
            self._fakes[id(tensor)] = self.fake_mode.from_tensor(tensor, static_shapes=True)
            self._keep_alive.append(tensor)
        return self._fakes[id(tensor)]

    # ---- the result ----

    def finish(
        self,
        result: Any,
        batch_size: int,
        *,
        together: tuple[Together, ...],
        changes_batch: bool,
        temporary_hooks: bool,
    ) -> Trace:
        """Makes the graph."""
        self._regions.clear()
        result_values = tuple(self._reads(leaves(result)))
        outputs = tuple(dict.fromkeys(value for _, value in result_values))
        follow_changes(self.steps, outputs if self.loss is None else (*outputs, self.loss))
        units: dict[str, Unit] = {}
        for name, num_calls in self._calls.items():
            module = self.unit_map.modules[name]
            units[name] = Unit(
                name=name,
                class_name=type(module).__name__,
                parameters=tuple(dict.fromkeys(self.unit_map.parameters[id(t)] for t in _tensors_of(module))),
                num_calls=num_calls,
                mutates_buffers=name in self._mutates,
            )
        graph = ModelGraph(
            nodes=self._finished_nodes(),
            values=tuple(Value(v.producer, v.position, v.spec) for v in self.values),
            units=units,
            parameters=self.unit_map.specs,
            loss=self.loss,
            outputs=outputs,
            batch_size=batch_size,
            batch_bytes=self.batch_bytes,
            together=together,
        )
        return Trace(
            graph=graph,
            steps=self.steps,
            backward_at=self.backward_at,
            result_values=result_values,
            reads_data=self._path.reads_data,
            path=self._path.path(self.unit_map.model, self._names),
            recomputes=self._recomputes,
            changes_batch=changes_batch,
            samples=self.samples,
            temporary_hooks=temporary_hooks,
            state=tuple(dict.fromkeys(self._initial.values())),
            initial=self._initial,
            memory=tuple(storage_key(v.fake) for v in self.values),
        )

    def _finished_nodes(self) -> tuple[Node, ...]:
        """The nodes, with all values that they make and depend on, and the buffers that they read first."""
        nodes = list(self.nodes)
        for step in self.steps:
            if step.node is not None and (step.changes or self._initial):
                node, after = nodes[step.node], tuple(change.after for change in step.changes)
                first = [
                    v for v in step.inputs if v in self._initial and self.values[v].producer == step.node
                ]
                nodes[step.node] = replace(
                    node,
                    inputs=tuple(value for value in step.inputs if value not in first),
                    outputs=node.outputs + after,
                    parameters=node.parameters + tuple(self._initial[value] for value in first),
                )
        return tuple(nodes)

    def together(self, watch: BufferWatch) -> tuple[Together, ...]:
        """Nodes that must have one home."""
        found = self._regions.together()
        for value, name in self._initial.items():
            memory = storage_key(self.values[value].fake)
            readers = {s.node for s in self.steps if s.node is not None and value in s.inputs}
            writers = {
                s.node
                for s in self.steps
                if s.node is not None and any(c.view.memory == memory for c in s.changes)
            }
            last = self._value(watch.last(name))
            if last is not None and last != value:
                writers.add(self.values[last].producer)
            found.append(buffer_together(name, self.nodes, readers, writers))
        producers = {value: recorded.producer for value, recorded in enumerate(self.values)}
        trained = {value for value, recorded in enumerate(self.values) if recorded.fake.requires_grad}
        for node, deep in self._gradients.items():
            found.append(gradient_together(self.nodes, node, producers, trained, deep=deep))
        held = {name: self._names_in(self.unit_map.modules[name]) for name in self._calls}
        found += parameters_together(self.steps, self.nodes, held)
        found += counters_together(self.steps, self.nodes)
        return tuple(group for group in found if len(group.nodes) > 1)


def trace_step(
    unit_map: UnitMap,
    function: Callable[..., Any],
    arguments: Any = ((), {}),
    *,
    device: torch.device | str = "cpu",
    batch_size: int = 1,
    count_memory: bool = False,
) -> Trace:
    """Traces one microbatch.

    Args:
        unit_map: the units, whose calls must be intercepted (`glue.intercept_calls`).
        function: the step function.
        arguments: its (args, kwargs).
        device: where the units compute.
        batch_size: samples in the microbatch.
        count_memory: find out what units need for a moment; takes three more forwards on fake tensors for
            each cost class.

    Raises:
        DeferredReadError: Python code reads a value that only one rank will have; the line is named.
        TraceError: the loss does not depend on the model.
    """
    run = _Run(unit_map, function, arguments, torch.device(device), batch_size, count_memory)
    trace, changed = run.trace()
    if not changed:
        return trace
    counters: set[str] = set()
    while True:
        try:
            return run.trace(state=changed.keys() - counters, counters=counters)[0]
        except DeferredReadError as error:
            # Python looks at a counter: every rank counts for itself.
            found = {name for name in error.buffers - counters if not changed[name]}
            if not found:
                raise
            counters |= found


@dataclass(frozen=True, slots=True)
class _Run:
    """A step function and its arguments; each call of `trace` runs it once."""

    unit_map: UnitMap
    function: Callable[..., Any]
    arguments: Any
    device: torch.device
    batch_size: int
    count_memory: bool

    def trace(
        self, state: Collection[str] = frozenset(), counters: Collection[str] = frozenset()
    ) -> tuple[Trace, dict[str, bool]]:
        """Traces, and tells which buffers outside of units were changed (`BufferWatch.changed`).

        Args:
            state: buffers whose content is a value of the graph.
            counters: changed buffers that every rank keeps.
        """
        items, structure = flatten(self.arguments)
        # On copies: a step function that changes its batch in place must find it unchanged when it runs.
        copies = [item.detach().clone() if is_batch_tensor(item) else item for item in items]
        versions = [item._version if isinstance(item, Tensor) else 0 for item in copies]
        tracer = Tracer(self.unit_map, self.device, copies, count_memory=self.count_memory)
        tracer.note_batch([c for item, c in zip(items, copies, strict=True) if is_batch_tensor(item)])
        args, kwargs = structure.rebuild(copies)
        before = set_active_handler(tracer)
        generators = get_state(self.device)
        open_modules = OpenModules(tracer)
        unchanged = Unchanged(self.unit_map, tracer.lend, device=self.device)
        watch = BufferWatch(self.unit_map)
        tracer.watch(watch.tensors(), state, counters)
        try:
            with unchanged, open_modules, GlueMode(tracer):
                hooks_before = num_hooks_registered()
                result = self.function(*args, **kwargs)
                registers_hooks = num_hooks_registered() > hooks_before
                set_active_handler(None)
                changed = watch.changed(tracer.is_value)
                together = tracer.together(watch)
            changes_batch = any(
                isinstance(c, Tensor) and c._version != v for c, v in zip(copies, versions, strict=True)
            )
            trace = tracer.finish(
                result,
                self.batch_size,
                together=together,
                changes_batch=changes_batch,
                temporary_hooks=registers_hooks and not unchanged.left_hooks,
            )
            return trace, changed
        except DeferredReadError as error:
            error.inside = open_modules.at_failure
            raise
        finally:
            set_active_handler(before)
            set_state(generators, self.device)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _buffers_of(module: nn.Module) -> list[int]:
    return [id(buffer) for buffer in module.buffers()]


def _is_opaque(item: Any) -> bool:
    return not isinstance(item, Tensor | type(None) | bool | int | float | str | bytes | complex)
