"""The data parallel library's own example: a tape, and a broadcast after the first batch."""

import numpy as np
import tensorflow as tf

import smdistributed.dataparallel.tensorflow as sdp

sdp.init()
tf.random.set_seed(10 + sdp.rank())

x = np.random.RandomState(1).rand(32, 8, 8, 1).astype("float32")
y = np.random.RandomState(2).randint(0, 10, 32)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shard(sdp.size(), sdp.rank()).repeat(8).batch(8)

mnist_model = tf.keras.Sequential(
    [tf.keras.layers.Conv2D(4, 3, activation="relu"), tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)]
)
loss = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
opt = tf.optimizers.legacy.Adam(0.01 * sdp.size())


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        loss_value = loss(labels, mnist_model(images, training=True))
    tape = sdp.DistributedGradientTape(tape, sparse_as_dense=True)
    grads = tape.gradient(loss_value, mnist_model.trainable_variables)
    opt.apply_gradients(zip(grads, mnist_model.trainable_variables))
    if first_batch:
        sdp.broadcast_variables(mnist_model.variables, root_rank=0)
        sdp.broadcast_variables(opt.variables(), root_rank=0)
    return sdp.oob_allreduce(loss_value)


losses = [float(training_step(images, labels, n == 0)) for n, (images, labels) in enumerate(dataset.take(16))]
weights = mnist_model.get_weights()
product = float(sdp.allreduce(tf.constant(2.0 + sdp.rank()), op=sdp.ReduceOp.PRODUCT))
ranks = sdp.rank(), sdp.size(), sdp.local_rank(), sdp.local_size()
