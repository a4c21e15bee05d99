"""The output of a step: one value per microbatch, and ways to reduce them."""

from collections.abc import Sequence
from typing import Any, NoReturn

import tensorflow as tf

from shardwright.errors import UsageError
from shardwright.runtime.step_function import MicrobatchValues
from shardwright.tensorflow.row_gradients import Rows, rows_together


class StepOutput(MicrobatchValues):
    """The tensors that a step function returned, one for each microbatch, on every rank.

    Args:
        outputs: the tensors, by microbatch.
        rows: of a variable, where the whole batch has as many of some: see `row_gradients`.

    Attributes:
        outputs: the tensors, by microbatch.
    """

    advice = (
        "It holds one tensor for each microbatch. Make one of them first: reduce_mean() for a loss or a "
        "gradient, merge() for what has a row for each sample."
    )

    def __init__(self, outputs: Sequence[Any], *, rows: Sequence[Rows] = ()):
        super().__init__(outputs)
        self._rows_of = rows

    def reduce_mean(self) -> Any:
        """The mean over the microbatches, element by element; shape as one of them."""
        if isinstance(self.outputs[0], tf.IndexedSlices):
            return self._rows(1 / len(self.outputs))
        return self.reduce_sum() / tf.cast(len(self.outputs), self.outputs[0].dtype)

    def sum_and_count(self) -> tuple[Any, int]:
        """What divided by a count is the mean, so that a ``tf.function`` can divide."""
        return self.reduce_mean(), 1

    def reduce_sum(self) -> Any:
        """The sum over the microbatches, element by element; shape as one of them."""
        if isinstance(self.outputs[0], tf.IndexedSlices):
            return self._rows(1)
        total = self.outputs[0]
        for output in self.outputs[1:]:
            total = tf.add(total, output)
        return total

    def accumulate(self, method: str = "variable", var: Any = None) -> Any:
        """The mean over the microbatches, as `reduce_mean`.

        Args:
            method: ``"variable"``, ``"add_n"`` or ``"accumulate_n"``: ways to sum that give the same.
            var: a variable that takes the mean, if given.

        Raises:
            UsageError: there is no such method.
        """
        if method not in ("variable", "add_n", "accumulate_n"):
            raise UsageError(f"accumulate has no method {method!r}: use variable, add_n or accumulate_n.")
        mean = self.reduce_mean()
        if var is not None and mean is not None:
            var.assign(mean)
        return mean

    def concat(self, axis: int = 0) -> Any:
        """The microbatches one after the other along an existing axis, as if the batch had not been split."""
        return self.stack() if self.outputs[0].shape.rank == 0 else tf.concat(self.outputs, axis)

    def merge(self) -> Any:
        """The rows of all samples of the batch: `concat` along axis 0."""
        return self.concat()

    def stack(self, axis: int = 0) -> Any:
        """The microbatches along a new axis.

        Raises:
            UsageError: they have different shapes.
        """
        self.refuse_different_shapes()
        return tf.stack(self.outputs, axis)

    def _rows(self, scale: float) -> Any:
        return rows_together(self.outputs, scale=scale, rows=self._rows_of)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} microbatches; reduce_mean() makes one tensor of them)"


class GradientOutput(StepOutput):
    """The gradient of a variable of the model, over all microbatches, on the rank that holds it.

    Its reductions are None on the other ranks, as Keras has it of variables without gradient.
    """

    def __init__(self, total: Any, num_microbatches: int, *, is_mean: bool = False):
        super().__init__(())
        self._total = total
        self._is_mean = is_mean
        self._num_microbatches = num_microbatches
        del self.outputs

    def reduce_mean(self) -> Any:
        """The mean over the microbatches of all replicas; None on ranks that do not hold the variable."""
        return mean_of(*self.sum_and_count())

    def sum_and_count(self) -> tuple[Any, int]:
        """The sum over the microbatches and their number; None on ranks without the variable."""
        return self._total, 1 if self._is_mean else self._num_microbatches

    def reduce_sum(self) -> Any:
        """The sum over the microbatches, the mean of it over replicas; None on ranks without the variable."""
        if self._total is None or not self._is_mean:
            return self._total
        return self._total * tf.cast(self._num_microbatches, self._total.dtype)

    def concat(self, axis: int = 0) -> NoReturn:
        """Refused: gradients are summed as they come, and single ones are not kept."""
        raise UsageError(
            "the gradient of a variable is summed while microbatches end, so there is not one for each. "
            "Call reduce_mean() or reduce_sum()."
        )

    def stack(self, axis: int = 0) -> NoReturn:
        """Refused, as `concat` is."""
        self.concat()

    def __len__(self) -> int:
        return self._num_microbatches

    def __getitem__(self, index: int) -> NoReturn:
        self.concat()


def mean_of(total: Any, count: int) -> Any:
    """A sum divided by a count: see `StepOutput.sum_and_count`; None as it is."""
    if total is None or count == 1:
        return total
    if isinstance(total, tf.IndexedSlices):
        return rows_together([total], scale=1 / count)
    return total / tf.cast(count, total.dtype)
