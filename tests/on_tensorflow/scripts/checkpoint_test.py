"""Trains a convolutional net, saves it in the middle, and goes on from there a second time."""

import os
import sys

import numpy as np
import tensorflow as tf

import smdistributed.modelparallel.tensorflow as smp

cfg = {
    "partitions": 2,
    "microbatches": 4,
    "placement_strategy": "spread",
    "pipeline": "interleaved",
    "optimize": "memory",
    "contiguous": True,
    "xla": False,
    "fork": False,
}
smp.init(cfg)
tf.random.set_seed(1234)
np.random.seed(1234)

directory = sys.argv[1]
x_train = np.random.rand(64, 12, 12, 1)
y_train = np.random.randint(0, 10, 64)
train_ds = tf.data.Dataset.from_tensor_slices((x_train, y_train)).batch(16, drop_remainder=True)


class MyModel(smp.DistributedModel):
    def __init__(self):
        super().__init__()
        initializer = tf.keras.initializers.GlorotUniform(seed=192)
        self.conv = tf.keras.layers.Conv2D(8, 3, activation="relu", kernel_initializer=initializer)
        self.flatten = tf.keras.layers.Flatten()
        self.dense1 = tf.keras.layers.Dense(32, kernel_initializer=initializer)
        self.dense2 = tf.keras.layers.Dense(10, kernel_initializer=initializer)

    def call(self, x, training=None):
        return self.dense2(self.dense1(self.flatten(self.conv(x))))


model = MyModel()
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam(learning_rate=0.001)
train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
ckpt_manager = smp.CheckpointManager(checkpoint, directory=directory, max_to_keep=2)


@smp.step(
    input_signature=[
        tf.TensorSpec(shape=[None, 12, 12, 1], dtype=tf.float32),
        tf.TensorSpec(shape=[None], dtype=tf.int64),
    ]
)
def get_grads(images, labels):
    predictions = model(images, training=True)
    loss = loss_object(labels, predictions)
    grads = optimizer.get_gradients(loss, model.trainable_variables)
    return grads, loss, predictions


@tf.function
def train_step(images, labels):
    gradients, loss, predictions = get_grads(images, labels)
    gradients = [g.accumulate() for g in gradients]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_accuracy(labels, predictions.merge())
    return loss.reduce_mean()


def train():
    losses = []
    train_accuracy.reset_states()
    for images, labels in train_ds:
        losses.append(float(train_step(images, labels)))
    return losses


partitioned = []


@smp.register_post_partition_hook
def hook():
    partitioned.append(tf.executing_eagerly())


ckpt_manager.restore()  # nothing is there in the first run
loss_list = train()
ckpt_manager.save()
smp.barrier()
loss_list += train()
ckpt_manager.save()
ckpt_manager.save()
smp.core.barrier()
again = []
ckpt_manager.restore("ckpt-1" if os.path.exists(f"{directory}/mp_rank_0/ckpt-1.index") else "ckpt-2")
again = train()
names = sorted(os.listdir(f"{directory}/mp_rank_{smp.mp_rank()}"))
