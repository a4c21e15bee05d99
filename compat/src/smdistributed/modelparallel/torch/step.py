"""The decorator ``smp.step``, and what a step gives back."""

import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwright.comm.launchers import detect
from shardwright.torch.batch.step_output import StepOutput
from shardwright.torch.step_function import step_function
from smdistributed.modelparallel.torch.peer_batches import with_batches_of_peers
from smdistributed.modelparallel.torch.state_mod import current_run

__all__ = ["StepOutput", "step"]


def step(
    function: Callable[..., Any] | None = None,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Any:
    """Makes a function run once for each microbatch; works bare and called.

    Tensors among its arguments, also inside containers, are cut along axis 0; objects with
    ``smp_slice(num_microbatches, microbatch, axis)`` cut themselves; anything else goes to every microbatch.
    Of what it returns, tensors become `StepOutput`, and other things lists with one item a microbatch.

    Args:
        input_split_axes: name -> axis along which an argument is cut; 0 where it is not named.
        detach_outputs: accepted. Outputs have no autograd history, also where it is False.
    """
    if function is None:
        return functools.partial(
            step,
            non_split_inputs=non_split_inputs,
            input_split_axes=input_split_axes,
            detach_outputs=detach_outputs,
        )
    if not detach_outputs and detect(os.environ).rank == 0:
        warnings.warn(
            "detach_outputs=False changes nothing here: the backward of a microbatch is over when the step "
            "returns, so that its outputs have no autograd history. Call model.backward inside the step.",
            stacklevel=2,
        )
    run = step_function(
        function,
        non_split_inputs=tuple(non_split_inputs or ()),
        input_split_axes=input_split_axes,
        loss_reduction="mean",  # SMP divides any loss by the number of microbatches
        prepared=with_batches_of_peers,
    )

    @functools.wraps(function)
    def step_of_all_microbatches(*args: Any, **kwargs: Any) -> Any:
        current = current_run()
        result = run(*args, **kwargs)
        if (after := getattr(current.model, "after_step", None)) is not None:
            after()
        return result

    return step_of_all_microbatches
