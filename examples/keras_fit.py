"""Keras over many ranks in two lines: data, compile, fit, evaluate, save, load.

    pip install 'shardwright[tensorflow]'
    python examples/keras_fit.py
    shardwright run -n 2 examples/keras_fit.py [folder]

Prints what evaluation gives, before and after the file was loaded.
"""

import os
import sys

import numpy as np
import tensorflow as tf

import shardwright.tensorflow as sw

keras = tf.keras
sw.init({"microbatches": 4, "seed": 1})  # 1. before any operation of TensorFlow

points = np.random.default_rng(0).uniform(-1, 1, (1024, 2)).astype("float32")
rings = (np.hypot(*points.T) * 3).astype("int32")  # which of five rings each point is in

given = keras.Input((2,))
hidden = keras.layers.Dense(64, activation="relu", name="hidden")(given)
scores = keras.layers.Dense(5)(keras.layers.Dense(64, activation="relu")(hidden))
model = sw.DistributedModel(keras.Model(given, scores))  # 2. the model stays the same object

model.compile(
    optimizer=keras.optimizers.Adam(1e-2),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(points, rings, batch_size=64, epochs=8, validation_split=0.1, verbose=0)
loss, accuracy = model.evaluate(points, rings, verbose=0)
features = keras.Model(model.input, hidden).predict(points[:4], verbose=0)  # a part, on all ranks

path = os.path.join(sys.argv[1] if len(sys.argv) > 1 else ".", "rings.keras")
model.save(path)  # on all ranks; the first one writes a file that needs no Shardwright
again = keras.models.load_model(path)
if sw.rank() == 0:
    print(f"accuracy {accuracy:.3f}, loaded again {again.evaluate(points, rings, verbose=0)[1]:.3f}")
sw.shutdown()
