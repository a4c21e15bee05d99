"""The convolutional net of the documentation: profiles, trains, evaluates, writes a SavedModel."""

import sys

import numpy as np
import tensorflow as tf

import smdistributed.modelparallel.tensorflow as smp

smp.init({"partitions": 2, "microbatches": 2, "horovod": False})
tf.random.set_seed(7)

rng = np.random.RandomState(3)
x_train, y_train = rng.rand(48, 10, 10), rng.randint(0, 10, 48)
x_test, y_test = rng.rand(16, 10, 10), rng.randint(0, 10, 16)
x_train, x_test = x_train[..., tf.newaxis], x_test[..., tf.newaxis]
train_ds = tf.data.Dataset.from_tensor_slices((x_train, y_train)).batch(16, drop_remainder=True)
test_ds = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(8, drop_remainder=True)


class MyModel(smp.DistributedModel):
    def __init__(self):
        super().__init__()
        self.conv0 = tf.keras.layers.Conv2D(4, 3, activation="relu")
        self.conv1 = tf.keras.layers.Conv2D(4, 3, activation="relu")
        self.flatten = tf.keras.layers.Flatten()
        self.dense1 = tf.keras.layers.Dense(16)
        self.dense2 = tf.keras.layers.Dense(10)

    def call(self, x):
        x = self.conv0(x)
        x = self.conv1(x)
        return self.dense2(self.dense1(self.flatten(x)))


model = MyModel()
model.profile(x_train[:2])
model.profile(x_train[:2])
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.SGD(0.1)
train_loss = tf.keras.metrics.Mean(name="train_loss")
test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")


class Trainer:
    @smp.step(non_split_inputs=["self"], autograph=True, experimental_relax_shapes=True)
    def forward_backward(self, images, labels):
        predictions = model(images)
        loss = loss_object(labels, predictions)
        return optimizer.get_gradients(loss, model.trainable_variables), loss, predictions


@smp.step
def test_step(images, labels):
    predictions = model(images)
    return loss_object(labels, predictions), predictions


trainer = Trainer()


@tf.function
def train_step(images, labels):
    gradients, loss, _ = trainer.forward_backward(images, labels)
    gradients = [g.accumulate(method="variable") for g in gradients]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_loss(loss.reduce_mean())


for _ in range(2):
    for images, labels in train_ds:
        train_step(images, labels)
    for images, labels in test_ds:
        loss, predictions = test_step(images, labels)
        test_accuracy(labels, predictions.merge())

model.save_model(save_path=sys.argv[1])
loaded = tf.keras.models.load_model(sys.argv[1]).signatures["serving_default"]
served = loaded(tf.constant(x_test[:8], tf.float64))["output_0"].numpy()
wanted = test_step(x_test[:8], y_test[:8])[1].merge().numpy()
final = float(train_loss.result())
