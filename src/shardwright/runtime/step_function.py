"""What a step function takes and gives, in every framework: arguments with names, a value a microbatch."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, ClassVar, NoReturn

from shardwright.errors import UsageError


@dataclass(frozen=True, slots=True)
class StepParameters:
    """The parameters of a step function, which give its arguments names.

    Attributes:
        further: name of the one that takes all further positional arguments.
    """

    names: Sequence[str] = ()
    further: str = ""

    def name_of(self, position: int) -> str:
        """The name of a positional argument."""
        if position < len(self.names):
            return self.names[position]
        return self.further or f"argument {position}"


def parameters_of(function: Callable[..., Any], *, named: Iterable[str]) -> StepParameters:
    """The parameters of a step function."""
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise UsageError(
            f"the step function {function.__name__} is a generator or asynchronous: it would return before "
            "it has run. Use a plain function, with return."
        )
    parameters = inspect.signature(function).parameters

    def of_kind(*kinds: Any) -> tuple[str, ...]:
        return tuple(name for name, parameter in parameters.items() if parameter.kind in kinds)

    takes_any_name = of_kind(Parameter.VAR_KEYWORD)
    for name in named:
        if parameters and not takes_any_name and name not in parameters:
            raise UsageError(
                f"{name} is not a parameter of {function.__name__}: it has {', '.join(parameters)}."
            )
    return StepParameters(
        names=of_kind(Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD),
        further="".join(of_kind(Parameter.VAR_POSITIONAL)),
    )


def microbatch_sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Samples of each microbatch; a batch with fewer samples than microbatches has one for each.

    >>> microbatch_sizes(7, 4), microbatch_sizes(2, 4)
    ([2, 2, 2, 1], [1, 1])
    """
    each, rest = divmod(num_samples, num_microbatches)
    return [size for size in (each + (m < rest) for m in range(num_microbatches)) if size]


class MicrobatchValues:
    """Holds the value of each microbatch; scripts that take it for a tensor are told what to call."""

    advice: ClassVar[str] = ""

    def __init__(self, outputs: Sequence[Any]):
        self.outputs = list(outputs)

    def refuse_different_shapes(self) -> None:
        """Refuses values that cannot be combined element by element."""
        shapes = [tuple(output.shape) for output in self.outputs]
        if len(set(shapes)) > 1:
            raise UsageError(
                f"the microbatches have different shapes {shapes}, so they cannot be combined element by "
                "element. Use concat()."
            )

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, index: int) -> Any:
        return self.outputs[index]

    def __getattr__(self, name: str) -> NoReturn:
        # What a tensor has and this has not: item(), float(), backward(), shape, ...
        raise AttributeError(f"{type(self).__name__} has no attribute {name}. {self.advice}")

    def __format__(self, format_spec: str) -> str:
        if format_spec:
            raise UsageError(f"a StepOutput cannot be written as {format_spec!r}. {self.advice}")
        return repr(self)

    def __float__(self) -> float:
        raise UsageError(f"a StepOutput is no number. {self.advice}")

    def _no_operand(self, *_: Any) -> NoReturn:
        raise UsageError(f"a StepOutput is no number, so there are no sums or comparisons. {self.advice}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_operand
    __truediv__ = __rtruediv__ = __neg__ = __pow__ = _no_operand
    __lt__ = __le__ = __gt__ = __ge__ = _no_operand
