"""Horovod's example for Keras: fit with its optimizer and its callbacks, and a model that is loaded again."""

import os
import tempfile

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

hvd.init()
tf.keras.utils.set_random_seed(20 + hvd.rank())
x = np.random.RandomState(hvd.rank()).rand(32, 6).astype("float32")
y = (x.sum(1) > 3).astype("int64")

model = tf.keras.Sequential([tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(2)])
scaled_lr = 0.01 * hvd.size()
opt = hvd.DistributedOptimizer(
    tf.keras.optimizers.Adam(scaled_lr), backward_passes_per_step=1, average_aggregated_gradients=True
)
model.compile(
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer=opt, metrics=["accuracy"]
)
rates = []
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=0),
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=scaled_lr, multiplier=lambda epoch: 0.1 ** (epoch - 1), start_epoch=2
    ),
    tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: rates.append(float(tf.convert_to_tensor(model.optimizer.learning_rate)))
    ),
]
history = model.fit(x, y, batch_size=8, epochs=3, callbacks=callbacks, verbose=0).history
weights = model.get_weights()
with tempfile.TemporaryDirectory() as folder:
    model.save(os.path.join(folder, "model.keras"))
    again = hvd.load_model(os.path.join(folder, "model.keras"))
again.fit(x, y, batch_size=8, verbose=0)
weights_again, updates = again.get_weights(), int(again.optimizer.iterations)
