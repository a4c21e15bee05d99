"""Two replicas of two partitions: Horovod averages the gradients over replicas."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import smdistributed.modelparallel.tensorflow as smp

smp.init({"partitions": 2, "microbatches": 2, "horovod": True, "placement_strategy": "spread"})
tf.random.set_seed(100 + smp.dp_rank())

x = np.random.RandomState(1).rand(32, 8, 8, 1).astype("float32")
y = np.random.RandomState(2).randint(0, 10, 32)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shard(smp.dp_size(), smp.dp_rank()).batch(8)


class MyModel(smp.DistributedModel):
    def __init__(self):
        super().__init__()
        self.conv = tf.keras.layers.Conv2D(4, 3, activation="relu")
        self.flatten = tf.keras.layers.Flatten()
        self.dense = tf.keras.layers.Dense(10)

    def call(self, x):
        return self.dense(self.flatten(self.conv(x)))


model = MyModel()
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.legacy.Adam(0.01)


@smp.step
def get_grads(images, labels):
    loss = loss_object(labels, model(images, training=True))
    return optimizer.get_gradients(loss, model.trainable_variables), loss


@tf.function
def train_step(images, labels, first_batch):
    gradients, loss = get_grads(images, labels)
    gradients = [hvd.allreduce(g.accumulate()) for g in gradients]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables(), root_rank=0)
    return hvd.allreduce(loss.reduce_mean())


losses = [
    float(train_step(images, labels, tf.constant(number == 0)))
    for _ in range(8)
    for number, (images, labels) in enumerate(dataset)
]
weights = model.get_weights()
ranks = smp.rank(), hvd.rank(), hvd.size(), smp.dp_rank(), smp.mp_rank()
