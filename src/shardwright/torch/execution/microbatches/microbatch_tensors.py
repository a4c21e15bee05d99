"""The tensors of a microbatch that its step function's variables do not hold (see `dataflow`)."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwright.errors import TraceMismatchError
from shardwright.runtime.dataflow import Copy, Keep
from shardwright.runtime.homes import Crossing
from shardwright.torch.backward.pending_logits import whole_logits
from shardwright.torch.interception.glue import plain_torch
from shardwright.torch.program.instructions import Instruction
from shardwright.torch.program.program import Program
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.tracing.together import GlueBuffers
from shardwright.torch.tracing.trace_data import Step


def refuse_other_contents(step: Step, *, microbatch: int) -> NoReturn:
    """Refuses the call of a unit that leaves other entries in containers than other ranks find in theirs."""
    raise TraceMismatchError(
        f"{step.call} leaves other entries in a list or a dictionary among its arguments in microbatch "
        f"{microbatch} than in the trace, by which other ranks go. Give it a new container in every "
        "microbatch, or return what it has made."
    )


class MicrobatchTensors:
    """The tensors that a microbatch receives, and those it keeps for other stages and later steps.

    Attributes:
        values: tensors made here that another stage, the loss or the result needs.
        held: tensors of this rank that steps cannot get from the user's variables.
        leaves: tensors that came in from another stage, by (value, stage): leaves of autograd.
        gradients: gradients of values for which both stages are on this rank, by (value, target stage).
    """

    def __init__(
        self,
        index: int,
        program: Program,
        receive: Callable[[int, Crossing], Tensor],
        buffers: GlueBuffers | None,
    ):
        self.values: dict[int, Tensor] = {}
        self.held: dict[int, Tensor] = {}
        self.leaves: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self._index = index
        self._program = program
        self._receive = receive
        self._buffers = buffers
        entering = (crossing for stage in program.stages for crossing in program.received_by(stage))
        self._crossings = {(crossing.value, crossing.target): crossing for crossing in entering}

    def clear(self) -> None:
        for kept in (self.values, self.held, self.leaves, self.gradients):
            kept.clear()

    def free(self, stage: int) -> None:
        """Releases a stage's values once its backward has ended, except those needed later."""
        home_of = self._program.home_of
        kept = self._program.read_late.union(self._program.trace.graph.outputs)
        for tensors in (self.values, self.held):
            for value in [v for v in tensors if home_of[v] == stage and v not in kept]:
                del tensors[value]

    def in_result(self, result: Any) -> Any:
        """Replaces tensors in the step function's result that stages have changed on copies."""
        wanted = [(p, v) for p, v in self._program.trace.result_values if v in self.held]
        if not wanted:
            return result
        items, structure = flatten(result)
        for position, value in wanted:
            items[position] = self.held[value]
        return structure.rebuild(items)

    def leaf(self, value: int, stage: int) -> Tensor:
        """A value of another stage, as a leaf of autograd."""
        leaf = self.leaves.get((value, stage))
        if leaf is None:
            crossing = self._crossings[value, stage]
            if crossing.source in self._program.stages:
                leaf = self.values[value].detach()
            else:
                leaf = self._receive(self._index, crossing)
                if self._program.boundary is not None:
                    leaf = self._program.boundary.joined(leaf, crossing.spec.shape, crossing.order)
            if crossing.has_gradient or crossing.detached:
                leaf.requires_grad_()  # also where no_grad() is in force: others of the stage may read it
            self.leaves[value, stage] = leaf
        return leaf

    def find(
        self, instruction: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, Tensor]]:
        """Puts the tensors in place that do not come from the user's variables."""
        items, structure = flatten((args, kwargs))
        given: dict[int, Tensor] = {}
        for position, value in instruction.flow.cuts:
            if value not in given:  # what is given twice is one tensor, also where it is changed in place
                leaf = self.leaf(value, instruction.stage)
                # The leaf itself is emptied after the backward. And autocast would keep the cast of a leaf,
                # as if it were a weight, and sum its gradients rounded. (`view_as` may change its strides.)
                given[value] = leaf[...] if leaf.requires_grad else leaf
            items[position] = given[value]
        for position, value in instruction.flow.held:
            items[position] = self.held[value]
        for position, name in instruction.flow.buffers:
            assert self._buffers is not None
            items[position] = self._buffers.now(name)
        copied: dict[int, Tensor] = {}
        for copy in instruction.flow.copies:
            base = self.leaf(copy.base, instruction.stage) if copy.from_stage else self.held[copy.base]
            for place, value, tensor in _copied(base, copy):
                copied[value] = tensor
                if place is not None:
                    items[place] = tensor
        args, kwargs = structure.rebuild(items)
        return args, kwargs, copied

    def keep(
        self,
        instruction: Instruction,
        result: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        copied: dict[int, Tensor],
    ) -> Any:
        """Keeps what a step made and changed, as far as it is needed; returns the step's result."""
        step, flow = instruction.step, instruction.flow
        if step.unit.fills:
            self._check_filled(step, result)
        if step.result.numbers:
            self._compare_numbers(step, result)
        if step.result.passed:
            self._check_passed(step, result, args, kwargs)
        if flow.keeps or instruction.shapes:
            items = [result] if isinstance(result, Tensor) else flatten(result)[0]
            items += [vars(module)[key] for module, key, _ in step.unit.attributes]
            for position, value in instruction.shapes:
                self._check_shape(step, items[position], value)
            for keep in flow.keeps:
                assert keep.position is not None
                item = whole_logits(items[keep.position])
                self._check_shape(step, item, keep.value)
                if keep.send:
                    self._check_dtype(step, item, keep.value)
                    self._check_gradient(step, item, keep.value)
                self._store(keep, item)
        if flow.changes:
            items = flatten((args, kwargs))[0]
            for keep in flow.changes:
                if keep.value in copied:
                    tensor = copied[keep.value]
                elif keep.position is None:
                    assert keep.before is not None
                    tensor = self.held[keep.before]
                else:
                    tensor = items[keep.position]
                    if keep.view is not None:
                        tensor = tensor if tensor._base is None else tensor._base
                        tensor = tensor.as_strided(keep.view.size, keep.view.stride, keep.view.offset)
                self._store(keep, tensor)
        return result

    def _check_filled(self, step: Step, result: Any) -> None:
        """Other ranks fill their containers as in the trace."""
        assert step.result.structure is not None
        if flatten(result)[1].key != step.result.structure.key:
            refuse_other_contents(step, microbatch=self._index)

    def _compare_numbers(self, step: Step, result: Any) -> None:
        items = flatten(result)[0]
        for position, expected in step.result.numbers:
            found = items[position] if position < len(items) else None
            if type(found) is not type(expected) or repr(found) != repr(expected):
                raise TraceMismatchError(
                    f"{step.call} returns {found!r} in microbatch {self._index}, but "
                    f"{expected!r} in the trace, which is what other ranks go by. Return a tensor in place "
                    "of a number that changes."
                )

    def _check_passed(self, step: Step, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses a new tensor in place of an argument, with which other stages go on."""
        results, items = flatten(result)[0], flatten((args, kwargs))[0]
        for position, source in step.result.passed:
            made, given = results[position], items[source]
            if isinstance(given, Tensor) and made is not given:
                raise TraceMismatchError(
                    f"{step.call} makes a tensor in microbatch "
                    f"{self._index}, but in the trace it gave back its argument as it was, with which other "
                    "stages go on. Let it do the same for every batch: give back a new tensor in both cases "
                    "(x.clone()), or choose by a mask, or put what is around it into the same module."
                )

    def _check_gradient(self, step: Step, item: Tensor, value: int) -> None:
        trains = self._program.trace.backward_at is not None
        if trains and item.requires_grad and not self._program.trace.graph.values[value].spec.requires_grad:
            raise TraceMismatchError(
                f"{step.call} gave a tensor that requires gradients "
                f"in microbatch {self._index}, but none in the trace, so that no other stage would send its "
                "gradient. Choose what is trained by requires_grad_() of parameters or by model.train() and "
                "model.eval(), or pass what decides it to the step function as an argument."
            )

    def _check_shape(self, step: Step, item: Tensor, value: int) -> None:
        expected = self._program.trace.graph.values[value].spec
        if tuple(item.shape) != expected.shape:
            raise TraceMismatchError(
                f"{step.call} gave a tensor of shape "
                f"{tuple(item.shape)} in microbatch {self._index}, but {expected.shape} in the trace. "
                "A tensor that another stage needs, or whose shape the code between modules asks for, must "
                "have a shape that follows from the shapes of the batch alone. Put what uses it into one "
                "module."
            )

    def _check_dtype(self, step: Step, item: Tensor, value: int) -> None:
        expected = self._program.trace.graph.values[value].spec.dtype
        if item.dtype is not getattr(torch, expected):
            raise TraceMismatchError(
                f"{step.call} gave {item.dtype} in microbatch "
                f"{self._index}, but {expected} in the trace, which is what the stage that needs it takes. "
                "Let the type follow from the types of the batch and the parameters alone, and pass what "
                "turns autocast on or off to the step function as an argument."
            )

    def _store(self, keep: Keep, tensor: Tensor) -> None:
        if keep.hold:
            self.held[keep.value] = tensor
        if keep.send:
            if self._program.boundary is not None and keep.value not in self._program.staying:
                with plain_torch():
                    tensor = self._program.boundary.placed(tensor)
            if keep.clone:
                # It is sent, and its gradient comes back, as it is now: the user's code will change it.
                with torch.enable_grad():
                    tensor = tensor.clone()
            self.values[keep.value] = tensor


def _copied(base: Tensor, copy: Copy) -> Iterator[tuple[int | None, int, Tensor]]:
    """Copies memory, and gives all tensors in it."""
    with torch.enable_grad():  # also under no_grad, a change in place leaves a tensor its history
        memory = base.permute(copy.order).clone(memory_format=torch.contiguous_format)
        values = {value: view for _, value, view in copy.views}
        made = {}
        for value, view in values.items():
            made[value] = memory
            if len(values) > 1:
                made[value] = memory.as_strided(view.size, view.stride, view.offset - copy.offset)
            elif copy.order != tuple(range(len(copy.order))):
                made[value] = memory.permute([copy.order.index(dim) for dim in range(len(copy.order))])
        for position, value, _ in copy.views:
            yield position, value, made[value]
