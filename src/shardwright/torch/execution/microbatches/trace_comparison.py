"""Checks that a microbatch selects the tensors of the trace, which ranks then exchange."""

from collections.abc import Sequence
from typing import Any, NoReturn

from shardwright.errors import TraceMismatchError
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.program.instructions import Instruction
from shardwright.torch.program.program import Program
from shardwright.torch.pytorch.functions import name_of_call
from shardwright.torch.pytorch.source_line import user_line
from shardwright.torch.pytorch.tree import flatten

__all__ = ["TraceComparison"]


class TraceComparison:
    """Compares the stand-ins of a microbatch with those of the trace.

    Args:
        index: which microbatch.
        program: what this rank does.
    """

    def __init__(self, index: int, program: Program):
        self._index = index
        self._program = program

    def arguments(self, instruction: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses another argument of a step than in the trace.

        Raises:
            TraceMismatchError: there is one.
        """
        step = instruction.step
        items: Sequence[Any] = args if step.flat else flatten((args, kwargs))[0]
        for position, expected, elsewhere in instruction.expects:
            item = items[position] if position < len(items) else None
            if item.value != expected if type(item) is DeferredTensor else elsewhere:
                self._refuse(f"{name_of_call(step.func)} gets", step.line)

    def loss(self, loss: Any) -> None:
        """Refuses another loss; raises as `arguments` does."""
        self._compare(loss, self._program.trace.graph.loss, "the loss")

    def result(self, result: Any) -> None:
        """Refuses other tensors in what the step function returns; raises as `arguments` does."""
        items = flatten(result)[0] if self._program.trace.result_values else []
        for position, value in self._program.trace.result_values:
            self._compare(items[position] if position < len(items) else None, value, "the result")

    def _compare(self, item: Any, value: int | None, what: str) -> None:
        expected = None if value is None else self._program.trace.tensors.stand_ins[value]
        if expected is not None and type(item) is DeferredTensor and item.value != expected:
            self._refuse(f"{what} is", "")

    def _refuse(self, what: str, line: str) -> NoReturn:
        raise TraceMismatchError(
            f"{line or user_line()}: {what} another tensor in microbatch {self._index} than in the trace, by "
            "which ranks send each other what they need. What is chosen among tensors must be the same for "
            "every batch, or follow from the arguments of the step function: pass what decides it to the "
            "step function as an argument, or put the choice inside one module."
        )
