"""What a trace writes down: every intercepted step, the graph they form, samples of what to time."""

from dataclasses import dataclass
from typing import Any

from shardwright.model_graph import ModelGraph
from shardwright.torch.rng import Draw
from shardwright.torch.tree import Structure

__all__ = ["Sample", "Step", "Trace"]


@dataclass(slots=True)
class Step:
    """One intercepted operation or unit call, in the order of execution.

    Attributes:
        func: the torch function, or the unit's module.
        node: index of its node in the graph; None for free operations.
        reads: (position among the leaves of the arguments, value) of each value that it reads.
        writes: (position among the leaves of the result, value).
        mutations: (position of an argument, or None; value before, or None; value after) of what it changed
            in place.
        structure: structure of the result.
        result: leaves of the result as a rank that does not execute it returns them.
        passed: (position in the result, position in the arguments) of arguments that are returned as they
            are.
        line: where in the user's code.
        draws: random numbers that it takes.
    """

    func: Any
    node: int | None
    line: str = ""
    draws: tuple[Draw, ...] = ()
    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()
    mutations: tuple[tuple[int | None, int | None, int], ...] = ()
    structure: Structure | None = None
    result: tuple[Any, ...] = ()
    passed: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Sample:
    """Arguments of one call of a cost class, from which it can be run again to be timed.

    Attributes:
        func: the unit's module, or the torch function.
        leaves: leaves of the arguments; fake tensors in place of real ones.
        structure: their structure.
    """

    func: Any
    leaves: list[Any]
    structure: Structure


@dataclass(slots=True)
class Trace:
    """What one microbatch does.

    Attributes:
        graph: the nodes that are placed on stages.
        steps: everything that is intercepted, free operations included.
        backward_at: number of steps before ``backward``; None without one.
        result_values: (position among the leaves of what the step function returned, value).
        reads_data: Python looked at values of free tensors, so that another batch may take another path.
        recomputes: the step function itself recomputes activations (``torch.utils.checkpoint``) around units.
        changes_batch: the step function changes tensors of its batch in place.
        samples: cost class -> arguments of its first call.
    """

    graph: ModelGraph
    steps: list[Step]
    backward_at: int | None
    result_values: tuple[tuple[int, int], ...]
    reads_data: bool
    recomputes: bool
    changes_batch: bool
    samples: dict[str, Sample]
