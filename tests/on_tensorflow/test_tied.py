"""A tied embedding of Keras: what its gradient is made of, and what crosses."""

import keras_models
import tensorflow as tf

from shardwright.tensorflow.placement import place
from shardwright.tensorflow.routes import routes_of
from shardwright.tensorflow.trace import trace_step
from shardwright.tensorflow.units import choose_units, layer_names


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
