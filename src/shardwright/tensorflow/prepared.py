"""A step function that is ready to run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from shardwright.tensorflow.divisors import Divisors
from shardwright.tensorflow.outputs import Outputs
from shardwright.tensorflow.program import Program
from shardwright.tensorflow.trace import Trace

__all__ = ["Changed", "Prepared"]


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
