"""One value for each microbatch, which is no value itself: what is refused of it, in every framework."""

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

from shardwright.errors import UsageError

__all__ = ["MicrobatchValues"]


class MicrobatchValues:
    """Holds the value of each microbatch; scripts that take it for a tensor are told what to call.

    Attributes:
        advice: what to call, for errors.
    """

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
