"""The decorator ``smp.step``, and what a step gives back."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwright.torch.step import step_function
from shardwright.torch.step_output import StepOutput
from smdistributed.modelparallel.torch.state_mod import current_run

__all__ = ["StepOutput", "step"]


def step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Makes a function run once for each microbatch; works bare and called.

    Args:
        function: the step function.
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: name -> axis along which an argument is cut; 0 where it is not named.
        detach_outputs: outputs have no autograd history, which False does not change.
    """
    if function is None:
        return functools.partial(
            step,
            non_split_inputs=non_split_inputs,
            input_split_axes=input_split_axes,
            detach_outputs=detach_outputs,
        )
    if not detach_outputs:
        warnings.warn(
            "detach_outputs=False changes nothing here: what a step returns has no autograd history.",
            stacklevel=2,
        )
    run = step_function(
        function, non_split_inputs=tuple(non_split_inputs or ()), input_split_axes=input_split_axes
    )

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        current = current_run()
        result = run(*args, **kwargs)
        if current.model is not None:
            current.model.step_done()  # type: ignore[attr-defined]
        return result

    return checked
