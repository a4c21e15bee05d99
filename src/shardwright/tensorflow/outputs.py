"""The outputs of a step function: which are gradients, and how they come back to the caller."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from shardwright.errors import TraceError
from shardwright.model_graph import TensorSpec
from shardwright.tensorflow.divisors import Divisors
from shardwright.tensorflow.program import Program
from shardwright.tensorflow.row_gradients import Rows
from shardwright.tensorflow.stage import Results
from shardwright.tensorflow.step_graph import StepGraph
from shardwright.tensorflow.step_output import GradientOutput, StepOutput
from shardwright.tensorflow.trace import Trace


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
        structure: what the step function returned.
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
                packed.append(GradientOutput(None, num_microbatches))
            elif leaf.positions[0] in self.sums:
                packed.append(GradientOutput(next(given), num_microbatches, is_mean=are_means))
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
        holder: pipeline rank that changes it.
        is_of_model: it belongs to the model; else every rank has it.
    """

    variable: Any
    holder: int
    is_of_model: bool
