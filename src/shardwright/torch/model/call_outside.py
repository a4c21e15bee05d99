"""A call of a spread model outside of step functions, without gradients: evaluations as scripts have them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwright.errors import UsageError
from shardwright.torch.batch.batch import Batch
from shardwright.torch.batch.batch_result import BatchResult
from shardwright.torch.batch.splitter import Splitter
from shardwright.torch.interception.step_code import ReadingStep
from shardwright.torch.pytorch.source_line import user_line

__all__ = ["CallOutside", "refuse_call"]


class CallOutside:
    """Runs a model on a batch that is not cut, so that each rank gets what it returns in one process.

    Stages work one after the other. A step function has them work at once, on microbatches.

    Args:
        forward: calls the model.
    """

    def __init__(self, forward: Callable[..., Any]):
        def call_of_the_model(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        self._function = ReadingStep(call_of_the_model)

    def run(
        self,
        run_step: Callable[[Callable[..., Any], Batch], BatchResult],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Runs the model; collective over the ranks of the replica.

        Args:
            run_step: runs a step function on a batch.
            args: of the model.
            kwargs: of the model.
        """
        batch = Batch((tuple(args), dict(kwargs)), Splitter(in_one=True))
        return run_step(self._function, batch).results[0]


def refuse_call(*, trains: bool, has_parts: bool) -> None:
    """Refuses calls outside of step functions that cannot be evaluations.

    Args:
        trains: gradients are recorded.
        has_parts: ranks have their parts of the model: a step has been made.
    """
    if trains:
        raise UsageError(
            f"{user_line()}: the model is spread over ranks, so what trains it is called inside a function "
            "decorated with @sw.step. For an evaluation, call the model under torch.no_grad(), on all ranks."
        )
    if not has_parts:
        raise UsageError(
            f"{user_line()}: the model is to be spread over ranks, which its first step decides by a batch "
            "that is cut into microbatches. Decorate the function that calls it here with @sw.step, or "
            "call it after the first training step."
        )
