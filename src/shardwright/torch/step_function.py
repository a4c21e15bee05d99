"""The decorator that turns a function into a training or evaluation step."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, Protocol, overload

from torch import Tensor

from shardwright.config.config import refuse_misplaced
from shardwright.errors import UsageError
from shardwright.runtime.step_function import parameters_of
from shardwright.torch.batch.batch import Batch
from shardwright.torch.batch.splitter import Splitter
from shardwright.torch.batch.step_output import BatchResult, StepOutput, gather_outputs
from shardwright.torch.interception.compiled_code import refuse_wrapped_model, uncompiled
from shardwright.torch.interception.glue import active_handler
from shardwright.torch.interception.step_code import ReadingStep
from shardwright.torch.optimizer.optimizer_trial import is_trying
from shardwright.torch.startup import script_run

_P = ParamSpec("_P")


class _Decorator(Protocol):
    """What a step function is for type checkers: the parameters stay, and a tensor becomes a `StepOutput`."""

    @overload
    def __call__(self, function: Callable[_P, Tensor], /) -> Callable[_P, StepOutput]: ...

    @overload
    def __call__(self, function: Callable[_P, Any], /) -> Callable[_P, Any]: ...


@overload
def step(function: Callable[_P, Tensor], /) -> Callable[_P, StepOutput]: ...


@overload
def step(function: Callable[_P, Any], /) -> Callable[_P, Any]: ...


@overload
def step(
    *,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    split_lists: Sequence[str] = (),
    loss_reduction: Literal["mean", "sum"] | None = None,
) -> _Decorator: ...


def step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    split_lists: Sequence[str] = (),
    loss_reduction: Literal["mean", "sum"] | None = None,
    **others: Any,
) -> Any:
    """Makes a function run once for each microbatch, pipelined over the stages.

    The function is ordinary Python: it calls the model, computes a loss, calls ``model.backward(loss)``.
    Without ``backward`` it evaluates. Behind its last call of the model it may read values of tensors
    (``loss.item()``), on every rank. What it returns comes back as `StepOutput`, one tensor a microbatch, on
    every rank.

    Args:
        function: the step function.
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: name -> axis along which an argument is cut; 0 where it is not named.
        split_lists: names of arguments that are lists with an item for each sample (texts, the targets of
            detection), of which each microbatch gets its own.
        loss_reduction: what the loss is over samples, where that shall not be read from it: ``"sum"``, or
            ``"mean"``, which takes each microbatch for itself.

    Raises:
        UsageError: another option is given; the message says where it belongs.

    Example:
        >>> import shardwright.torch as sw
        >>> @sw.step
        ... def train_step(model, x, y):
        ...     loss = model(input_ids=x, labels=y).loss
        ...     model.backward(loss)
        ...     return loss
    """
    names_of_options = ("non_split_inputs", "input_split_axes", "split_lists", "loss_reduction")
    refuse_misplaced("@sw.step", others, takes=names_of_options)
    if loss_reduction not in (None, "mean", "sum"):
        raise UsageError(f'loss_reduction is "mean" or "sum", and not {loss_reduction!r}.')
    for option, names in (("non_split_inputs", non_split_inputs), ("split_lists", split_lists)):
        if isinstance(names, str):
            raise UsageError(f'{option} is a list of names: {option}=["{names}"], and not "{names}".')
    decorate = functools.partial(
        step_function,
        non_split_inputs=non_split_inputs,
        input_split_axes=input_split_axes,
        split_lists=split_lists,
        loss_reduction=loss_reduction,
    )
    return decorate if function is None else decorate(function)


def step_function(
    function: Callable[..., Any],
    *,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    split_lists: Sequence[str] = (),
    loss_reduction: str | None = None,
    prepared: Callable[[Batch], Batch] | None = None,
) -> Callable[..., Any]:
    parameters = parameters_of(function, named=(*non_split_inputs, *(input_split_axes or {}), *split_lists))
    splitter = Splitter(
        names=parameters.names,
        further=parameters.further,
        non_split=frozenset(non_split_inputs),
        axes=dict(input_split_axes or {}),
        lists=frozenset(split_lists),
    )

    called = ReadingStep(function, loss_reduction=loss_reduction)
    fitting: set[tuple[int, tuple[str, ...]]] = set()  # numbers of arguments, and names of others

    @uncompiled
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        model = script_run().model
        if model is None:
            raise UsageError("no model is wrapped. Call sw.DistributedModel(model) before the first step.")
        if active_handler() is not None:
            raise UsageError("a step function is called inside another one. Call it from the training loop.")
        if is_trying():
            raise UsageError(
                "a step function is called inside of an optimizer. Call it from the training loop, before "
                "optimizer.step()."
            )
        given = len(args), tuple(kwargs)
        if given not in fitting:
            _refuse_unfit(function, args, kwargs)
            fitting.add(given)
        refuse_wrapped_model((*args, *kwargs.values()), model)
        batch = Batch((args, kwargs), splitter)
        return _gathered(model.run_step(called, batch if prepared is None else prepared(batch)))

    return run


def _gathered(done: BatchResult) -> Any:
    if done.weights is None:
        return gather_outputs(done.results)
    places = done.loss_places if done.losses is not None else ()
    return gather_outputs(
        done.results,
        shares=done.weights.shares,
        loss_places=places,
        of_losses=done.weights.of_values,
        sums=done.sums,
        doubts=done.doubts,
    )


def _refuse_unfit(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses arguments that the function does not take: its own error would come from far inside a step."""
    # A decorator (functools.wraps) may give the function inside more arguments than it takes itself.
    signature = inspect.signature(function, follow_wrapped=False)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise UsageError(
            f"{function.__name__}({takes}) does not take these arguments: {error}. A step function gets all "
            "that it uses, the model, too."
        ) from None
