"""Placement and routes, on graphs written down: no operation is run.

A tied embedding of Keras: what its gradient is made of, and what crosses.
"""

import keras_models
import pytest
import tensorflow as tf

from shardwright.errors import TraceError
from shardwright.model_graph import TensorSpec
from shardwright.tensorflow.placement import place
from shardwright.tensorflow.program import Program
from shardwright.tensorflow.routes import routes_of
from shardwright.tensorflow.step_graph import Operation, StepGraph
from shardwright.tensorflow.trace import trace_step
from shardwright.tensorflow.units import choose_units, layer_names


def graph(*operations, outputs, gradients=None, num_bytes=None, local=()):
    """Operations as (name, kind, inputs, keywords); each makes one tensor of its own name."""
    made = [
        Operation(name, kind, tuple(f"{each}:0" for each in inputs), (f"{name}:0",), **keywords)
        for name, kind, inputs, keywords in operations
    ]
    sizes = num_bytes or {}
    return StepGraph(
        operations=tuple(made),
        specs={f"{op.name}:0": TensorSpec((1,), "float32", sizes.get(op.name, 4)) for op in made},
        variables={op.name: at for at, op in enumerate(o for o in made if o.kind == "Handle")},
        arguments=tuple(f"{op.name}:0" for op in made if op.kind == "Placeholder"),
        outputs=tuple(f"{name}:0" for name in outputs),
        gradients={f"{name}:0": variable for name, variable in (gradients or {}).items()},
        sums={at: SUM for at, name in enumerate(outputs) if name in (gradients or {})},
        local=frozenset(f"{name}:0" for name in local),
    )


READ = {"stateful": True}
SUM = TensorSpec((1,), "float32", 4)


def two_layers(*more, outputs=("loss", "dw0", "dw1"), **keywords):
    """y = (x w0) w1: one layer a stage, with gradients of both weights."""
    return graph(
        ("x", "Placeholder", (), {}),
        ("w0", "Handle", (), {}),
        ("w1", "Handle", (), {}),
        ("read0", "ReadVariableOp", ("w0",), {"call": 0, **READ}),
        ("h", "MatMul", ("x", "read0"), {"call": 0}),
        ("read1", "ReadVariableOp", ("w1",), {"call": 1, **READ}),
        ("y", "MatMul", ("h", "read1"), {"call": 1}),
        ("loss", "Mean", ("y",), {}),
        ("dy", "Tile", ("loss",), {"in_gradient": True}),
        ("dh", "MatMul", ("dy", "read1"), {"in_gradient": True}),
        ("dw1", "MatMul", ("h", "dy"), {"in_gradient": True}),
        ("dw0", "MatMul", ("x", "dh"), {"in_gradient": True}),
        *more,
        outputs=outputs,
        gradients={"dw0": 0, "dw1": 1},
        **keywords,
    )


def routed(step, stages=(0, 1), **options):
    placement = place(step, stages, num_stages=2, **options)
    return placement, routes_of(step, placement)


def sent(routes, crossings):
    return {pair: [routes.tensors[c.value] for c in group] for pair, group in crossings.items()}


def test_a_gradient_that_is_returned_twice_is_summed_twice():
    _, routes = routed(two_layers(outputs=("loss", "dw0", "dw1", "dw1")))
    assert routes.pieces["backward", 1].sums == (("dw1:0", 2), ("dw1:0", 3))


def tied(*, sums=(("g", "AddN", ("dw0", "dhead"), {"in_gradient": True}),), returned="g", **keywords):
    """The first layer's weight is used again behind the second, as a tied embedding is."""
    gradient = {"in_gradient": True}
    return graph(
        ("x", "Placeholder", (), {}),
        ("w0", "Handle", (), {}),
        ("read0", "ReadVariableOp", ("w0",), {"call": 0, **READ}),
        ("h", "MatMul", ("x", "read0"), {"call": 0}),
        ("y", "Tanh", ("h",), {"call": 1}),
        ("z", "MatMul", ("y", "read0"), {"call": 1}),
        ("loss", "Mean", ("z",), {}),
        ("dz", "Tile", ("loss",), gradient),
        ("dproduct", "MatMul", ("y", "dz"), gradient),
        ("dhead", "Transpose", ("dproduct",), gradient),
        ("dy", "MatMul", ("dz", "read0"), gradient),
        ("dh", "TanhGrad", ("y", "dy"), gradient),
        ("dw0", "UnsortedSegmentSum", ("x", "dh"), gradient),
        *sums,
        ("out", "Identity", (returned,), {}),
        outputs=("loss", "out"),
        gradients={"out": 0},
        **{"num_bytes": {"dh": 8, "dw0": 64, "dhead": 64, "dproduct": 64, "g": 64, "out": 64}, **keywords},
    )


def test_stages_sum_their_parts_of_a_tied_gradient():
    placement, routes = routed(tied(), microbatches=4)
    assert placement.addends.parts == {"out:0": ("dw0:0", "dhead:0")}
    assert sent(routes, routes.gradients) == {(1, 0): ["dh:0"]}  # and neither dhead nor dproduct
    assert routes.pieces["backward", 0].sums == (("dw0:0", 1),)
    assert routes.pieces["backward", 1].sums == (("dhead:0", 1),)
    assert routes.stages_of_output == ((1,), (0, 1))
    assert "g" not in routes.pieces["backward", 0].body | routes.pieces["backward", 1].body


def test_a_part_goes_where_that_sends_less_in_all_microbatches():
    _, routes = routed(tied(), microbatches=16)  # 16 x 8 bytes of dh, or 64 of dw0 once
    assert sent(routes, routes.gradients) == {}
    assert routes.pieces["backward", 1].sums == (("dhead:0", 1), ("dw0:0", 1))
    assert routes.stages_of_output == ((1,), (1,))


@pytest.mark.parametrize(
    ("sums", "returned"),
    [
        ((("g", "AddN", ("dw0", "dhead"), {}), ("norm", "L2Loss", ("g",), {})), "g"),  # read elsewhere
        ((("g", "AddN", ("dw0", "dhead"), {}), ("half", "Mul", ("g", "g"), {})), "half"),
    ],
    ids=["read", "scaled"],
)
def test_a_tied_gradient_that_is_more_than_a_sum_is_made_whole(sums, returned):
    named = tuple((name, kind, inputs, {"in_gradient": True}) for name, kind, inputs, _ in sums)
    placement, routes = routed(tied(sums=named, returned=returned), microbatches=4)
    assert placement.addends.parts == {}
    assert len(routes.stages_of_output[1]) == 1
    assert {"g:0", "half:0"} & {*sent(routes, routes.gradients)[1, 0]}


def test_weights_are_read_again_and_not_kept():
    placement, routes = routed(two_layers())
    assert "read1" in placement.read_again
    assert "read1:0" not in routes.pieces["backward", 1].feeds
    assert "read1" in routes.pieces["backward", 1].body


def test_what_a_step_writes_is_kept_and_not_read_again():
    step = two_layers(("add", "AssignAddVariableOp", ("w1", "y"), {"call": 1, **READ}))
    placement, routes = routed(step)
    assert "read1" not in placement.read_again
    assert "read1:0" in routes.pieces["backward", 1].feeds


def deep(*more):
    """y = tanh(x w0) squared, in one unit, then the same with w1 in another, all on one stage."""
    units = []
    for call, (x, w) in enumerate((("x", "w0"), ("y0", "w1"))):
        units += [
            (w, "Handle", (), {}),
            (f"r{call}", "ReadVariableOp", (w,), {"call": call, **READ}),
            (f"h{call}", "MatMul", (x, f"r{call}"), {"call": call}),
            (f"t{call}", "Tanh", (f"h{call}",), {"call": call}),
            (f"y{call}", "Square", (f"t{call}",), {"call": call}),
        ]
    gradient = {"in_gradient": True}
    return graph(
        ("x", "Placeholder", (), {}),
        *units,
        ("dy1", "Tile", ("y1",), gradient),
        ("dt1", "Mul", ("dy1", "t1"), gradient),
        ("dh1", "TanhGrad", ("t1", "dt1"), gradient),
        ("dw1", "MatMul", ("y0", "dh1"), gradient),
        ("dy0", "MatMul", ("dh1", "r1"), gradient),
        ("dt0", "Mul", ("dy0", "t0"), gradient),
        ("dh0", "TanhGrad", ("t0", "dt0"), gradient),
        ("dw0", "MatMul", ("x", "dh0"), gradient),
        outputs=("y1", "dw0", "dw1"),
        gradients={"dw0": 0, "dw1": 1},
    )


def test_a_recomputed_unit_keeps_what_leaves_it_and_waits_for_its_gradient():
    step = deep()
    kept = routes_of(step, place(step, (0, 0), num_stages=1)).pieces["backward", 0]
    assert kept.feeds == ("t0:0", "t1:0", "x:0", "y0:0", "y1:0")
    again = routes_of(step, place(step, (0, 0), num_stages=1, recompute={0, 1}))
    piece = again.pieces["backward", 0]
    assert piece.feeds == ("x:0", "y0:0", "y1:0")
    assert {"h0", "t0", "h1", "t1"} <= piece.body
    assert piece.behind == {"h1": ("dy1",), "h0": ("dy0",)}
    assert again.pieces["forward", 0].gives == ("y0:0", "y1:0")
    assert piece.sums == (("dw0:0", 1), ("dw1:0", 2))


def test_a_variable_of_an_earlier_stage_cannot_be_changed_by_a_later_one():
    step = two_layers(("add", "AssignAddVariableOp", ("w0", "loss"), READ))
    with pytest.raises(TraceError, match="stage 0 holds needs what stage 1 makes"):
        routed(step)


def test_a_weight_that_another_stage_uses_is_alike_in_all_microbatches():
    step = two_layers(("tied", "MatMul", ("y", "read0"), {"call": 1}), outputs=("loss", "tied", "dw0", "dw1"))
    _, routes = routed(step)
    assert sent(routes, routes.crossings) == {(0, 1): ["h:0", "read0:0"]}
    assert {routes.tensors[number] for number in routes.constants} == {"read0:0"}
    program = Program(
        trace=None, graph=step, placement=None, routes=routes, stage_ranks=(0, 1), rank=1, pieces=None
    )
    assert sent(routes, program.again().crossings) == {(0, 1): ["h:0"]}  # in all microbatches but the first


def norm_metric(*, reader="total", call=None):
    """A metric of the norm of a gradient: ``total = total + norm``."""
    return two_layers(
        ("metric", "Handle", (), {}),
        ("total", "ReadVariableOp", ("metric",), READ),
        ("part", "Mul", ("total",), {"call": call}),
        ("norm", "Mean", ("dw0",), {}),
        ("new", "AddV2", (reader, "norm"), {}),
        ("change", "AssignVariableOp", ("metric", "new"), {"stateful": True}),
    )


@pytest.mark.parametrize("reader", ["total", "part"])
def test_what_a_backward_changes_is_read_in_the_backward(reader):
    """Bug: it was read in the forward, before the changes by microbatches whose backward came later."""
    placement, routes = routed(norm_metric(reader=reader), microbatches=4)
    backward = placement.places["change"]
    assert backward.phase == "backward"
    assert placement.places["total"] == placement.places[reader] == backward
    piece = routes.pieces["backward", backward.stage]
    assert "change" in piece.effects
    assert not any("total" in feed or "part" in feed for feed in piece.feeds)
    # One microbatch after the other: nothing comes in between.
    placement, _ = routed(norm_metric(), microbatches=1)
    assert placement.places["total"].phase == "forward"


def test_a_gradient_as_large_as_the_embedding_does_not_cross_in_each_microbatch():
    case = keras_models.make("gpt", 8)
    model = case.model
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(ids, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(ids, training=True))
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, model.trainable_variables)], loss

    trace = trace_step(step, [tf.TensorSpec([2, 12], tf.int64)] * 2)
    units = choose_units(trace.recorder.calls, layer_names(model), wanted=2)
    graph = trace.step_graph(units, is_of_model=lambda variable: True)
    count = len(units.layers)
    placement = place(graph, [int(call >= count // 2) for call in range(count)], num_stages=2, microbatches=4)
    routes = routes_of(graph, placement)
    embedding = next(at for at, spec in graph.sums.items() if spec.shape == (61, 32))
    assert list(placement.addends.parts) == [graph.outputs[embedding]]
    assert routes.stages_of_output[embedding] == (0, 1)
    shapes = [crossing.spec.shape for group in routes.gradients.values() for crossing in group]
    assert shapes
    assert (61, 32) not in shapes
