"""Horovod's example for Keras: fit with its optimizer and its callbacks."""

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
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=0),
]
history = model.fit(x, y, batch_size=8, epochs=3, callbacks=callbacks, verbose=0).history
weights = model.get_weights()
rate = float(tf.convert_to_tensor(model.optimizer.learning_rate))
