"""A unit as its rank runs it: divided, watched for changes that others could not follow, recomputed."""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torch import nn

from shardwright.errors import TraceMismatchError
from shardwright.torch.backward.activation_checkpointing import call_recomputed
from shardwright.torch.execution.microbatches.own_attributes import called_as_now
from shardwright.torch.interception.glue import call_without_hooks
from shardwright.torch.program.instructions import Instruction
from shardwright.torch.program.refused_changes import refusing_changes
from shardwright.torch.python_state.filled_containers import returning_contents
from shardwright.torch.tensor_parallel.boundary import Boundary
from shardwright.torch.tracing.recorded_step import Step

__all__ = ["refuse_other_contents", "unit_run"]


def unit_run(instruction: Instruction, *, boundary: Boundary | None, microbatch: int) -> Callable[..., Any]:
    """Runs the unit of an instruction.

    Args:
        instruction: the call of the unit.
        boundary: places what ranks share; None where they share nothing.
        microbatch: which one.
    """
    unit, allowed = instruction.step.func, instruction.flow.may_change
    call: Callable[..., Any] = partial(call_without_hooks, unit)
    if not instruction.step.flat:
        refuse = partial(refuse_other_contents, instruction.step, microbatch=microbatch)
        call = returning_contents(call, instruction.step.unit.fills, refuse)
    if instruction.divided and boundary is not None:
        left = [(module, key) for module, key, _ in instruction.step.unit.attributes]
        call = boundary.around(unit, call, attributes=left, stays=instruction.stays)
    if allowed is not None:
        call = refusing_changes(call, unit, allowed, line=instruction.step.line, microbatch=microbatch)
    if instruction.recompute:
        call = called_as_now(call, instruction.attributes.set_before)
        call = partial(_recomputed, unit, call)
    return call


def _recomputed(unit: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call_recomputed(unit, call, args, kwargs)


def refuse_other_contents(step: Step, *, microbatch: int) -> NoReturn:
    """Refuses the call of a unit that leaves other entries in containers than other ranks find in theirs.

    Raises:
        TraceMismatchError: always.
    """
    raise TraceMismatchError(
        f"{step.call} leaves other entries in a list or a dictionary among its arguments in microbatch "
        f"{microbatch} than in the trace, by which other ranks go. Give it a new container in every "
        "microbatch, or return what it has made."
    )
