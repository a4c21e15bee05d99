"""Small model graphs, built by hand."""

from collections.abc import Mapping, Sequence

from shardwright.catalogue import Layer, LayerChain
from shardwright.model_graph import ModelGraph, Node, ParameterSpec, TensorSpec, Unit, Value
from shardwright.profile import Profile, UnitCost


def spec(num_bytes: int, *, requires_grad: bool = True) -> TensorSpec:
    return TensorSpec(
        shape=(num_bytes // 4,), dtype="float32", num_bytes=num_bytes, requires_grad=requires_grad
    )


class GraphBuilder:
    """Writes a graph down call by call; each call returns the index of its only output."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.units: dict[str, Unit] = {}
        self.parameters: dict[str, ParameterSpec] = {}

    def parameter(
        self, name: str, num_bytes: int, *, requires_grad: bool = True, is_buffer: bool = False
    ) -> str:
        self.parameters[name] = ParameterSpec(
            name=name, spec=spec(num_bytes, requires_grad=requires_grad), is_buffer=is_buffer
        )
        return name

    def unit(
        self,
        name: str,
        inputs: Sequence[int] = (),
        *,
        output_bytes: int = 40,
        parameters: Sequence[str] = (),
        cost_class: str = "block",
        flops: int = 0,
        saved_bytes: int = 0,
        saved_values: Sequence[int] = (),
        mutates_buffers: bool = False,
        requires_grad: bool = True,
    ) -> int:
        before = self.units.get(name)
        ordinal = before.num_calls if before else 0
        self.units[name] = Unit(
            name=name,
            class_name="Block",
            parameters=tuple(parameters),
            num_calls=ordinal + 1,
            mutates_buffers=mutates_buffers,
        )
        return self._node(
            Node(
                kind="unit",
                name=name,
                inputs=tuple(inputs),
                outputs=(),
                ordinal=ordinal,
                cost_class=cost_class,
                flops=flops,
                saved_bytes=saved_bytes,
                saved_values=tuple(saved_values),
            ),
            output_bytes,
            requires_grad,
        )

    def op(
        self,
        name: str,
        inputs: Sequence[int] = (),
        *,
        output_bytes: int = 40,
        parameters: Sequence[str] = (),
        cost_class: str = "",
        saved_bytes: int = 0,
        free: bool = False,
        requires_grad: bool = True,
    ) -> int:
        node = Node(
            kind="op",
            name=name,
            inputs=tuple(inputs),
            outputs=(),
            parameters=tuple(parameters),
            cost_class=cost_class,
            saved_bytes=saved_bytes,
            free=free,
        )
        return self._node(node, output_bytes, requires_grad)

    def graph(self, loss: int | None = None, *, batch_size: int = 1) -> ModelGraph:
        return ModelGraph(
            nodes=tuple(self.nodes),
            values=tuple(self.values),
            units=self.units,
            parameters=self.parameters,
            loss=loss,
            outputs=() if loss is None else (loss,),
            batch_size=batch_size,
        )

    def _node(self, node: Node, output_bytes: int, requires_grad: bool) -> int:
        index = len(self.values)
        self.values.append(
            Value(
                producer=len(self.nodes),
                position=0,
                spec=spec(output_bytes, requires_grad=requires_grad),
                free=node.free,
            )
        )
        fields = {name: getattr(node, name) for name in Node.__slots__}
        self.nodes.append(Node(**{**fields, "outputs": (index,)}))
        return index


def chain_graph(
    num_blocks: int,
    *,
    output_bytes: int = 40,
    parameter_bytes: int = 400,
    tied: bool = False,
    classes: Sequence[str] | None = None,
) -> ModelGraph:
    """``embed, h.0 .. h.{n-1}, head`` and a loss; with `tied`, the head uses the table of the embedding."""
    builder = GraphBuilder()
    table = builder.parameter("embed.weight", parameter_bytes)
    value = builder.unit("embed", parameters=[table], cost_class="embed", output_bytes=output_bytes)
    for block in range(num_blocks):
        weight = builder.parameter(f"h.{block}.weight", parameter_bytes)
        value = builder.unit(
            f"h.{block}",
            [value],
            parameters=[weight],
            cost_class=classes[block] if classes else "block",
            output_bytes=output_bytes,
        )
    weight = table if tied else builder.parameter("head.weight", parameter_bytes)
    value = builder.unit("head", [value], parameters=[weight], cost_class="head", output_bytes=output_bytes)
    return builder.graph(builder.op("cross_entropy", [value], output_bytes=4))


def profile_of(costs: Mapping[str, tuple[float, float]] | None = None, **changes: float) -> Profile:
    """A measured profile; `costs` maps a class to (forward, backward) seconds."""
    costs = costs or {"embed": (0.5, 1.0), "block": (1.0, 2.0), "head": (0.5, 1.0)}
    return Profile(
        costs={
            name: UnitCost(
                forward_s=forward,
                backward_s=backward,
                weight_s=backward / 2,
                saved_bytes=int(changes.get("saved_bytes", 1000)),
                input_bytes=int(changes.get("input_bytes", 40)),
                work_bytes=int(changes.get("work_bytes", 0)),
                provenance="measured",
                spread=changes.get("spread", 0.0),
            )
            for name, (forward, backward) in costs.items()
        },
        device="test",
    )


def convolutional_chain(*, positions: int = 1) -> LayerChain:
    """A net of convolutions of the size of ResNet-50; more positions make its images larger."""
    layers = tuple(
        Layer(
            name=str(number),
            parameters=460_000 + 1000 * number,
            flops=1.4e8 * positions,
            moved=1.4e6 * positions,
            kept=4e5 * positions,
            inputs=2e5 * positions,
            crossing=2e5 * positions,
        )
        for number in range(55)
    )
    return LayerChain(name="convolutions", layers=layers)
