"""Tables of intervals against their definitions, counted out one by one."""

import numpy as np
from graphs import GraphBuilder, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.model_graph import ModelGraph
from shardwright.planner.chain import Chain
from shardwright.planner.model_chain import build_chain
from shardwright.planner.objective import build_tables

CLASSES = {"x": (1.0, 2.0), "y": (0.25, 0.75), "z": (3.0, 4.0)}
PROFILE = profile_of(CLASSES)


@st.composite
def graphs(draw: st.DrawFn) -> ModelGraph:
    """Units and operations that read any earlier values, with shared parameters."""
    builder = GraphBuilder()
    names = [builder.parameter(f"w{i}", 4 * (i + 1), requires_grad=i % 3 > 0) for i in range(4)]
    values: list[int] = []
    for index in range(draw(st.integers(1, 9))):
        inputs = draw(st.lists(st.sampled_from(values), max_size=3, unique=True)) if values else []
        arguments = {
            "output_bytes": 4 * draw(st.integers(1, 20)),
            "parameters": draw(st.lists(st.sampled_from(names), max_size=2, unique=True)),
            "requires_grad": draw(st.booleans()),
        }
        if draw(st.booleans()) or not values:
            name = draw(st.sampled_from([f"u{index}", "shared"]))
            cost_class = draw(st.sampled_from(sorted(CLASSES)))
            mutates = name == "shared" and draw(st.booleans())
            values.append(
                builder.unit(name, inputs, cost_class=cost_class, mutates_buffers=mutates, **arguments)
            )
        else:
            values.append(builder.op(f"op{index}", inputs, saved_bytes=index, **arguments))
    return builder.graph(loss=values[-1])


def received(chain: Chain, inside: range) -> tuple[int, int]:
    """Bytes that calls in `inside` get from earlier ones, and bytes of the gradients they send back."""
    values = gradients = 0
    for flow in chain.flows:
        if flow.source < inside.start:
            values += flow.num_bytes * any(target in inside for target in flow.targets)
            gradients += flow.gradient_bytes * any(target in inside for target in flow.gradient_targets)
    return values, gradients


def sent(chain: Chain, inside: range) -> tuple[int, int]:
    values = gradients = 0
    for flow in chain.flows:
        if flow.source in inside:
            values += flow.num_bytes * any(target >= inside.stop for target in flow.targets)
            gradients += flow.gradient_bytes * any(t >= inside.stop for t in flow.gradient_targets)
    return values, gradients


@given(graphs())
@settings(max_examples=60)
def test_every_entry(graph: ModelGraph) -> None:
    chain = build_chain(graph, PROFILE)
    tables = build_tables(chain)
    for i in range(chain.num_atoms):
        for j in range(i + 1, chain.num_atoms + 1):
            inside = range(chain.starts[i], chain.starts[j])
            part = slice(inside.start, inside.stop)
            held = [use for use in chain.parameters if any(call in inside for call in use.calls)]
            free = chain.column("saved_bytes") - chain.column("kept_bytes")
            compute_s = chain.column("forward_s") + chain.column("backward_s")
            assert tables.compute_s[i, j] == compute_s[part].sum()
            assert tables.recompute_s[i, j] == chain.column("recompute_s")[part].sum()
            kept = (chain.column("saved_bytes") + chain.column("glue_bytes"))[part].sum()
            assert tables.saved_bytes[i, j] == kept + sent(chain, inside)[1]
            assert tables.recomputable_bytes[i, j] == free[part].sum()
            assert tables.work_bytes[i, j] == chain.column("work_bytes")[part].max()
            assert tables.recomputed_bytes[i, j] == (free + chain.column("work_bytes"))[part].max()
            assert tables.parameter_bytes[i, j] == sum(use.num_bytes for use in held)
            trained = sum(use.num_bytes for use in held if use.trained)
            assert tables.gradient_bytes[i, j] == tables.optimized_bytes[i, j] == trained
            assert (tables.receive_bytes[i, j], tables.send_gradient_bytes[i, j]) == received(chain, inside)
            assert (tables.send_bytes[i, j], tables.receive_gradient_bytes[i, j]) == sent(chain, inside)


def test_one_call() -> None:
    builder = GraphBuilder()
    tables = build_tables(build_chain(builder.graph(loss=builder.unit("a", cost_class="x")), PROFILE))
    assert tables.num_atoms == 1
    assert tables.compute_s[0, 1] == 3.0
    assert np.all(tables.send_bytes == 0)
