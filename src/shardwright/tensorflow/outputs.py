"""The output of a step: a value per microbatch, which are gradients, how they come back to the caller."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import tensorflow as tf

from shardwright.errors import TraceError, UsageError
from shardwright.model_graph import TensorSpec
from shardwright.runtime.step_function import MicrobatchValues
from shardwright.tensorflow.executor import Results
from shardwright.tensorflow.loss_reduction import Divisors
from shardwright.tensorflow.program import Program
from shardwright.tensorflow.row_gradients import Rows, rows_together
from shardwright.tensorflow.step_graph import StepGraph
from shardwright.tensorflow.trace import Trace


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


class _GradientOutput(StepOutput):
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


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value in the result of a step function.

    Attributes:
        positions: of its tensors among the outputs of the graph; several for the rows of a sparse gradient.
        example: the symbolic value; None where the step function returned None.
        variable: handle of the model's variable whose gradient it is.
        rows: of a variable, where the whole batch has as many of some: see `row_gradients`.
    """

    positions: tuple[int, ...]
    example: Any
    variable: Any = None
    rows: tuple[Rows, ...] = ()


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a trace.

    Attributes:
        leaves: in the order of `tf.nest`.
        holders: position of each tensor of a gradient -> pipeline rank that holds the variable.
        sums: position of a gradient that is summed over the microbatches -> shape and type.
        shared: positions of what every rank gets.
    """

    leaves: tuple[Leaf, ...]
    structure: Any
    holders: Mapping[int, int]
    sums: Mapping[int, TensorSpec]
    shared: tuple[int, ...]

    @classmethod
    def of(
        cls,
        trace: Trace,
        graph: StepGraph,
        *,
        is_of_model: Callable[[Any], bool],
        holder: Callable[[int], int],
        rows: Mapping[int, tuple[Rows, ...]],
    ) -> "Outputs":
        names, leaves = trace.outputs, []
        holders: dict[int, int] = {}
        position = 0
        for at, example in enumerate(tf.nest.flatten(trace.function.structured_outputs)):
            if example is None:
                leaves.append(Leaf((), None))
                continue
            count = len(tf.nest.flatten(example, expand_composites=True))
            positions = tuple(range(position, position + count))
            position += count
            number = graph.gradients.get(names[positions[0]])
            variable = None if number is None else trace.variable_of(number)
            if variable is None or not is_of_model(variable):
                leaves.append(Leaf(positions, example, rows=rows.get(at, ())))
                continue
            assert number is not None
            leaves.append(Leaf(positions, example, variable.handle, rows.get(at, ())))
            holders.update(dict.fromkeys(positions, holder(number)))
        shared = tuple(each for each in range(len(names)) if each not in holders)
        for each in shared:
            tensor = trace.function.outputs[each]
            if tensor.dtype in (tf.string, tf.variant, tf.resource) or not tensor.shape.is_fully_defined():
                raise TraceError(
                    f"the step function returns a tensor of type {tensor.dtype.name} and shape "
                    f"{tensor.shape}, which cannot be sent to the other ranks. Return numbers in a shape "
                    "that follows from the batch's."
                )
        return cls(tuple(leaves), trace.function.structured_outputs, holders, graph.sums, shared)

    # ---- back to the caller ----

    def flat(self, results: Results, num_microbatches: int, *, rank: int) -> list[Any]:
        """All tensors that this rank gets, in the order in which `pack` takes them."""
        found: list[Any] = []
        for leaf in self.leaves:
            if leaf.example is None or not self._is_here(leaf, rank):
                continue
            if leaf.positions[0] in self.sums:
                found.append(results.sums[leaf.positions[0]])
                continue
            for microbatch in range(num_microbatches):
                found += [results.kept[microbatch][position] for position in leaf.positions]
        return found

    def specs(self, sizes: Sequence[Sequence[Any]], *, rank: int) -> list[Any]:
        """Shape and type of each of these tensors."""
        found: list[Any] = []
        for leaf in self.leaves:
            if leaf.example is None or not self._is_here(leaf, rank):
                continue
            if leaf.positions[0] in self.sums:
                found.append(sizes[0][leaf.positions[0]])
                continue
            for outputs in sizes:
                found += [outputs[position] for position in leaf.positions]
        return found

    def pack(self, flat: Sequence[Any], num_microbatches: int, *, rank: int, are_means: bool = False) -> Any:
        """The result as the step function has it, with a `StepOutput` in the place of each tensor."""
        given = iter(flat)
        packed: list[Any] = []
        for leaf in self.leaves:
            if leaf.example is None:
                packed.append(None)
            elif not self._is_here(leaf, rank):
                packed.append(_GradientOutput(None, num_microbatches))
            elif leaf.positions[0] in self.sums:
                packed.append(_GradientOutput(next(given), num_microbatches, is_mean=are_means))
            else:
                parts = [
                    tf.nest.pack_sequence_as(
                        leaf.example, [next(given) for _ in leaf.positions], expand_composites=True
                    )
                    for _ in range(num_microbatches)
                ]
                packed.append(StepOutput(parts, rows=leaf.rows))
        return tf.nest.pack_sequence_as(self.structure, packed)

    def _is_here(self, leaf: Leaf, rank: int) -> bool:
        return self.holders.get(leaf.positions[0], rank) == rank


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step function for one size of microbatch.

    Attributes:
        divisors: what losses are divided by, if the data tell it.
    """

    trace: Trace
    outputs: Outputs
    program: Program
    changed: tuple["Changed", ...]
    divisors: Divisors | None = None

    def run_whole(self, part: Sequence[Any]) -> dict[str, Any]:
        """All of it on one rank; gives the tensors that it returns, by name."""
        if self.divisors is None:
            made = tf.nest.flatten(self.trace.function(*part), expand_composites=True)
            return dict(zip(self.trace.outputs, [each for each in made if each is not None], strict=True))
        return self.program.pieces.whole(self.program.graph, part)


@dataclass(frozen=True, slots=True)
class Changed:
    """A variable that a step function changes.

    Attributes:
        is_of_model: it belongs to the model; else every rank has it.
    """

    variable: Any
    holder: int
    is_of_model: bool
