"""A model as plain data: its units, the tensors between them, its parameters, its work.

A *unit* is the smallest module that is placed on a stage. A step function calls units, and between the calls
it applies light operations (*glue*: residual additions, reshapes, the loss). Both are nodes of the graph, in
execution order::

    node 0  unit  transformer.wte        () -> v1
    node 1  op    add                    (v1, v2) -> v3
    node 2  unit  transformer.h.0        (v3) -> v4
    ...
    node 9  op    cross_entropy          (v11) -> v12        <- loss

A node that depends on no unit and no parameter (a mask built from the batch) is *free*: every rank computes
it, and it never crosses ranks.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Counts of one forward: numbers, or arrays with an entry for each candidate.

    Attributes:
        products: matrix products and convolutions, a kernel each.
        product_flops: their floating-point operations; a multiply-add counts as two.
        product_bytes: what they read and write, half of it: they compute meanwhile.
        attention_flops: of fused attention, without what a causal mask hides.
        kernels: all other operations that launch a kernel.

    >>> Work(products=1, product_flops=8) + Work(kernels=2)
    Work(products=1, product_flops=8, product_bytes=0, attention_flops=0, kernels=2, moved_bytes=0)
    """

    products: Any = 0
    product_flops: Any = 0
    product_bytes: Any = 0
    attention_flops: Any = 0
    kernels: Any = 0
    moved_bytes: Any = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(  # by hand: a trace adds one for each operation
            products=self.products + other.products,
            product_flops=self.product_flops + other.product_flops,
            product_bytes=self.product_bytes + other.product_bytes,
            attention_flops=self.attention_flops + other.attention_flops,
            kernels=self.kernels + other.kernels,
            moved_bytes=self.moved_bytes + other.moved_bytes,
        )

    def of_size(self, share: float) -> "Work":
        """The work of as many kernels on a share of the numbers.

        >>> Work(products=1, product_flops=8).of_size(0.5).product_flops
        4.0
        """
        if share == 1:
            return self
        counts = {"products", "kernels"}
        return Work(
            **{f.name: getattr(self, f.name) * (1 if f.name in counts else share) for f in fields(self)}
        )


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of a tensor, without data.

    Attributes:
        dtype: name without prefix, for example ``"float32"``.
    """

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    requires_grad: bool = False

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter, or buffer, under the first of its names.

    Attributes:
        name: the first name in the order of registration.
        spec: its shape and type; ``requires_grad`` tells whether it is trained.
        aliases: every other name of the same tensor (ties).
        is_buffer: true for buffers (running statistics, tables).
    """

    name: str
    spec: TensorSpec
    aliases: tuple[str, ...] = ()
    is_buffer: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """The smallest module that is placed on a stage.

    Attributes:
        name: path in the module tree.
        class_name: name of its Python class, for display.
        parameters: names of the parameters and buffers that it holds, under their first names.
        num_calls: how often one forward calls it.
        mutates_buffers: its forward changes buffers, so that its calls cannot be spread over stages.
    """

    name: str
    class_name: str
    parameters: tuple[str, ...]
    num_calls: int
    mutates_buffers: bool = False


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that some node produced.

    Attributes:
        position: which of the node's output tensors, counted from 0.
        free: it depends on no unit and no parameter, so every rank has it.
    """

    producer: int
    position: int
    spec: TensorSpec
    free: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One call of a unit, or one operation between units.

    Attributes:
        kind: ``"unit"`` or ``"op"``.
        name: the unit's name, or the function's.
        ordinal: for units: the how-manieth call of this unit in the forward, from 0.
        inputs: indices of the values that it reads, each once.
        outputs: indices of the values that it makes.
        parameters: names of the parameters that it reads (for operations: used outside any unit).
        cost_class: key of its cost in a `Profile`; calls with one key cost the same.
        flops: floating-point operations of the forward; a multiply-add counts as two.
        work: what the forward computes and moves, in detail; None: not known.
        saved_bytes: bytes that autograd keeps for the backward, parameters and the batch not counted.
        saved_values: values among them: kept once, by however many nodes.
        work_bytes: most bytes on top of them at any moment of the forward or the backward; 0: not known.
        weight_bytes: bytes that a backward without the gradients of weights leaves for them; None: unknown.
        split_work_bytes: `work_bytes` with such a backward; None: unknown.
        free: depends on no unit and no parameter.
        detached: values among its inputs that get no gradient from it.
        finds: nodes that left what it uses by another way than a value: in an object, a list, a variable.
        line: where in the user's code, as ``file:line``.
    """

    kind: Literal["unit", "op"]
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ordinal: int = 0
    parameters: tuple[str, ...] = ()
    cost_class: str = ""
    flops: int = 0
    work: Work | None = None
    saved_bytes: int = 0
    saved_values: tuple[int, ...] = ()
    work_bytes: int = 0
    weight_bytes: int | None = None
    split_work_bytes: int | None = None
    free: bool = False
    random: bool = False
    detached: tuple[int, ...] = ()
    finds: tuple[int, ...] = ()
    line: str = ""

    @property
    def label(self) -> str:
        """The name, with the ordinal where a unit is called again: ``layer``, ``layer#1``, ..."""
        return f"{self.name}#{self.ordinal}" if self.kind == "unit" and self.ordinal else self.name


@dataclass(frozen=True, slots=True)
class Together:
    """Nodes that one stage must compute.

    Attributes:
        what: what they have in common, as ``torch.utils.checkpoint``.
        why: what goes wrong on several stages.
        remedy: what the user can do about it.
        one_rank: several stages will do if no two of them are on one rank.
        for_backward: it matters only where there is a backward. A plan heeds it all the same: one that is
            made for an evaluation may have to serve training, too.
    """

    nodes: tuple[int, ...]
    what: str
    line: str
    why: str
    remedy: str
    one_rank: bool = False
    for_backward: bool = False


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """One forward of a step function over one microbatch.

    Attributes:
        nodes: unit calls and glue operations in execution order.
        values: the tensors between them; nodes refer to them by index.
        units: every unit, by name, in order of first call.
        parameters: every parameter and buffer of the model, by first name, in order of registration.
        loss: index of the value given to ``backward``; None for a step function that only evaluates.
        outputs: indices of the values that the step function returns.
        batch_size: samples in the microbatch (size of axis 0 of the first split tensor).
        batch_bytes: bytes of the tensors of the microbatch.
        together: nodes that one stage must compute.
        batch_statistics: names of the layers that compute statistics over the samples of the microbatch.
        free_operations: operations that every rank computes, which are no nodes.
    """

    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    units: Mapping[str, Unit]
    parameters: Mapping[str, ParameterSpec]
    loss: int | None
    outputs: tuple[int, ...]
    batch_size: int = 1
    batch_bytes: int = 0
    together: tuple[Together, ...] = ()
    batch_statistics: tuple[str, ...] = ()
    free_operations: int = 0
    _fingerprint: list[str] = field(default_factory=list, repr=False, compare=False)

    @property
    def calls(self) -> tuple[int, ...]:
        """Indices of the nodes that call units, in execution order: the chain that is cut into stages."""
        return tuple(i for i, node in enumerate(self.nodes) if node.kind == "unit")

    @property
    def operations(self) -> int:
        """Operations between calls, those that every rank computes among them."""
        return len(self.nodes) - len(self.calls) + self.free_operations

    @property
    def fingerprint(self) -> str:
        """A hash of the structure: equal on ranks that traced the same model the same way."""
        if not self._fingerprint:
            nodes = [
                (n.kind, n.label, n.inputs, n.outputs, n.parameters, *filter(None, (n.detached, n.finds)))
                for n in self.nodes
            ]
            values = [(v.spec.shape, v.spec.dtype, v.spec.requires_grad, v.free) for v in self.values]
            # Buffers that a forward has made are on the rank of their unit alone.
            held = [
                [name for name in unit.parameters if not self.parameters[name].is_buffer]
                for unit in self.units.values()
            ]
            document = json.dumps([nodes, values, held, self.loss, self.outputs])
            self._fingerprint.append(hashlib.sha256(document.encode()).hexdigest()[:16])
        return self._fingerprint[0]

    @property
    def model_fingerprint(self) -> str:
        """A hash of names, shapes and types of all parameters: which model this is, whatever the batch."""
        return model_fingerprint(self.parameters)

    def consumers(self) -> list[list[int]]:
        """For each value, the indices of the nodes that read it."""
        readers: list[list[int]] = [[] for _ in self.values]
        for index, node in enumerate(self.nodes):
            for value in node.inputs:
                readers[value].append(index)
        return readers

    def home_calls(self, *, free_nodes: bool = False) -> list[int | None]:
        """For each node, the position in `calls` of its home: the one rule for what runs where.

        A call is at home with itself. An operation between calls is at home with the latest call that it
        rests on, or, where it rests on parameters alone, with the first call that needs it. None for what
        is read by nobody, and for free nodes, unless these are asked for, too.
        """
        position = {node: at for at, node in enumerate(self.calls)}
        homes: list[int | None] = []
        for index, node in enumerate(self.nodes):
            if node.kind == "unit":
                homes.append(position[index])
            else:
                known = (homes[self.values[value].producer] for value in node.inputs)
                homes.append(max((home for home in known if home is not None), default=None))
        consumers = self.consumers()
        for index in reversed(range(len(self.nodes))):
            node = self.nodes[index]
            if homes[index] is None and (free_nodes or not node.free):
                readers = (homes[reader] for value in node.outputs for reader in consumers[value])
                homes[index] = min((home for home in readers if home is not None), default=None)
        return homes

    def contributing(self) -> set[int]:
        """The nodes that a gradient passes on its way back from the loss; none where there is no loss."""
        found: set[int] = set()
        pending = [] if self.loss is None else [self.values[self.loss].producer]
        while pending:
            node = pending.pop()
            if node not in found:
                found.add(node)
                detached = self.nodes[node].detached
                read = (self.values[value] for value in self.nodes[node].inputs if value not in detached)
                pending += [value.producer for value in read if value.spec.requires_grad]
                pending += self.nodes[node].finds
        return found

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, trained and frozen, ties counted once, buffers not counted."""
        return sum(math.prod(p.spec.shape) for p in self.parameters.values() if not p.is_buffer)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the unit calls in execution order."""
        return tuple(self.nodes[call].label for call in self.calls)

    def to_dict(self) -> dict[str, Any]:
        """A form that `json` can write."""
        document = asdict(self)
        del document["_fingerprint"]
        return document


def model_fingerprint(parameters: Mapping[str, ParameterSpec]) -> str:
    """A hash of names, shapes and types of all parameters and buffers."""
    rows = [[p.name, list(p.spec.shape), p.spec.dtype, sorted(p.aliases)] for p in parameters.values()]
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()[:16]
