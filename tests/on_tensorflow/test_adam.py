"""Adam, which makes large what a gradient has in rounding, over two ranks and in one process.

A key bias of an attention adds the same number to all scores of a query, and the softmax takes that out. So
its gradient is zero, and what is computed is rounding: in float32 some 1e-8 of the largest gradient, and
another number whenever sums have another order. Adam divides it by its own size. All else is alike.

Adam of Keras 3 squares each row of a lookup's gradient for itself, so it has to get the rows of one process.
"""

import functools

import numpy as np

from shardwright.testing import run_ranks

BATCH, LENGTH, WORDS, MICROBATCHES = 8, 6, 11, 4
# Type of numbers -> options of Adam.
RUNS = {"float64": {"clipnorm": 0.05}, "float32": {}}


def _made(tf):
    keras, layers = tf.keras, tf.keras.layers

    class Block(layers.Layer):
        def __init__(self):
            super().__init__()
            self.norm, self.attention = layers.LayerNormalization(), layers.MultiHeadAttention(2, 4)

        def call(self, x):
            y = self.norm(x)
            return x + self.attention(y, y, use_causal_mask=True)

    class Gpt(keras.Model):
        def __init__(self):
            super().__init__()
            self.words, self.places = layers.Embedding(WORDS, 8), layers.Embedding(LENGTH, 8)
            self.types, self.learned = layers.Embedding(2, 8), layers.Embedding(LENGTH, 8)
            self.words_and_places = layers.Embedding(WORDS + LENGTH, 8)
            self.position_ids = tf.Variable(tf.range(LENGTH), trainable=False)
            # As of Swin: a row for each distance of two places, looked up several times.
            self.distances = self.add_weight(shape=(2 * LENGTH - 1, 8), name="distances")
            apart = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None] + LENGTH - 1
            self.relative_index = tf.Variable(apart.reshape(-1), trainable=False)
            self.blocks = [Block() for _ in range(2)]
            self.head = layers.Dense(WORDS)

        @tf.function
        def relative(self):
            return tf.gather(self.distances, self.relative_index)

        def call(self, ids):
            x = self.words(ids) + self.places(tf.range(LENGTH)) + self.learned(self.position_ids)
            x += self.types(tf.zeros([keras.ops.shape(ids)[0], LENGTH], tf.int32))
            x += self.words_and_places(ids) + self.words_and_places(WORDS + tf.range(LENGTH))
            x += tf.reduce_mean(tf.reshape(self.relative(), [LENGTH, LENGTH, 8]), 1)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model, ids = Gpt(), np.random.RandomState(1).randint(0, WORDS, (2 * BATCH, LENGTH))
    model(ids[:1])
    return model, ids, np.roll(ids, -1, 1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _trained(floatx, over_ranks):
    """Weights after two steps, and gradients of the first in one process, by name."""
    import tensorflow as tf

    import shardwright.tensorflow as sw

    tf.keras.backend.clear_session()
    tf.keras.backend.set_floatx(floatx)
    tf.keras.utils.set_random_seed(2)
    gradients = {}
    if over_ranks:
        settings = {"microbatches": MICROBATCHES, "profile": "estimated", "run_dir": "off", "report": False}
        sw.init({"pipeline_parallel_degree": 2, **settings})
    model, ids, labels, loss_of = _made(tf)
    names = [each.path for each in model.variables]
    if over_ranks:
        model = sw.DistributedModel(model)
    else:
        with tf.GradientTape() as tape:
            loss = loss_of(labels[:BATCH], model(ids[:BATCH]))
        found = tape.gradient(loss, model.trainable_variables)
        gradients = {
            v.path: np.asarray(tf.convert_to_tensor(g))
            for v, g in zip(model.trainable_variables, found, strict=True)
        }
    model.compile(tf.keras.optimizers.Adam(0.01, **RUNS[floatx]), loss_of)
    model.fit(ids, labels, batch_size=BATCH, shuffle=False, verbose=0)
    weights = dict(zip(names, model.get_weights(), strict=True))
    if over_ranks:
        sw.shutdown()
    return weights, gradients


@functools.cache
def _found(floatx):
    """Of one process, and of the first rank of two."""
    return (
        run_ranks(_trained, 1, floatx, False, timeout_s=100)[0],
        run_ranks(_trained, 2, floatx, True, timeout_s=200)[0],
    )


def _is_key_bias(name):
    return name.endswith("key/bias")


def test_the_gradient_of_a_key_bias_alone_is_rounding():
    gradients = _found("float64")[0][1]
    largest = max(np.abs(each).max() for each in gradients.values())
    sizes = {name: np.abs(each).max() / largest for name, each in gradients.items()}
    assert {name for name, size in sizes.items() if size < 1e-12} == {*filter(_is_key_bias, gradients)}
    assert sum(map(_is_key_bias, gradients)) == 2


# Rounding in float64 is far less than the epsilon that Adam adds to the size of a gradient.
def test_adam_moves_all_other_variables_as_in_one_process():
    (expected, _), (found, _) = _found("float64")
    for name, wanted in expected.items():
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=1e-12, err_msg=name)
