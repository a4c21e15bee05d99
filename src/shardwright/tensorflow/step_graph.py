"""One microbatch of a step function as plain data: forward, loss, gradients and metric writes in one graph.

Nothing here imports TensorFlow: placement and routes are decided on these records, and tested on literals.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardwright.model_graph import TensorSpec

# Operations that look at a variable and leave it as it is.
READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"))
# What gives a tensor another shape or type: next to nothing beside the products that a weight is in.
_RECASTS = frozenset(("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient"))


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the traced graph.

    Attributes:
        inputs: names of the tensors that it reads.
        outputs: names of the tensors that it makes.
        controls: names of operations that come before it.
        stateful: it does more than compute its outputs, or draws random numbers.
        call: position among the unit calls; None for code between units.
        in_gradient: it was made while gradients were asked for.
    """

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    stateful: bool = False
    call: int | None = None
    in_gradient: bool = False


def unknown_line(_operation: str) -> str:
    """Where no line is known."""
    return "the step function"


@dataclass(frozen=True, slots=True)
class StepGraph:
    """One microbatch of a step function.

    Attributes:
        specs: of each tensor; sizes that are not known before the run are -1.
        variables: name of the operation that stands for a variable's handle -> number of the variable.
        arguments: names of the tensors that are given to the step function.
        outputs: names of the tensors that it returns.
        gradients: output -> number of the variable whose gradient it is.
        sums: position of an output that is summed over the microbatches, as it is the whole gradient of a
            variable of the model -> shape and type of the sum.
        local: tensors that stay in their process: of types without bytes, such as lists of tensors and text.
        line_of: name of an operation -> the line of the user's code that made it.
    """

    operations: tuple[Operation, ...]
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)
    variables: Mapping[str, int] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    gradients: Mapping[str, int] = field(default_factory=dict)
    sums: Mapping[int, TensorSpec] = field(default_factory=dict)
    local: frozenset[str] = frozenset()
    line_of: Callable[[str], str] = unknown_line

    def makers(self) -> dict[str, Operation]:
        """The operation that makes each tensor."""
        return {output: operation for operation in self.operations for output in operation.outputs}

    def variables_of(self, operation: Operation) -> list[int]:
        """The variables whose handles an operation takes."""
        names = (tensor.partition(":")[0] for tensor in operation.inputs)
        return [self.variables[name] for name in names if name in self.variables]

    def written(self) -> frozenset[int]:
        """The variables that the step function changes."""
        return frozenset(
            variable
            for operation in self.operations
            if operation.stateful and operation.kind not in READS
            for variable in self.variables_of(operation)
        )

    def weight_reads(self) -> frozenset[str]:
        """Operations that give the value of a variable that the step leaves as it is, perhaps in another
        shape or type. A backward repeats them, so that microbatches under way keep no copies of weights."""
        written, makers = self.written(), self.makers()
        found: set[str] = set()
        for operation in self.operations:
            if operation.kind == "ReadVariableOp":
                if written.isdisjoint(self.variables_of(operation)):
                    found.add(operation.name)
            elif operation.kind in _RECASTS and not operation.in_gradient:
                value, *shape = (makers[tensor] for tensor in operation.inputs)
                if value.name in found and all(maker.kind == "Const" for maker in shape):
                    found.add(operation.name)
        return frozenset(found)
