"""Small models of every kind, with data. Imported on ranks, once Keras is chosen."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

K = tf.keras
L = K.layers


@dataclass
class Case:
    """A model with what a test needs around it."""

    model: Any
    inputs: np.ndarray
    labels: np.ndarray
    gradients: str = "tape"
    metric: bool = False


class Conv(K.Model):
    """The convolutional net of SageMaker's first example."""

    def __init__(self):
        super().__init__()
        self.conv = L.Conv2D(8, 3, activation="relu")
        self.flatten = L.Flatten()
        self.dense1 = L.Dense(32)
        self.dense2 = L.Dense(10)

    def call(self, x, training=None):
        return self.dense2(self.dense1(self.flatten(self.conv(x))))


class Again(K.Model):
    """A layer is called twice."""

    def __init__(self):
        super().__init__()
        self.conv = L.Conv2D(8, 3, activation="relu")
        self.flatten = L.Flatten()
        self.dense = L.Dense(10)
        self.last = L.Dense(10)

    def call(self, x, training=None):
        return self.last(self.last(self.dense(self.flatten(self.conv(x)))))


class Block(L.Layer):
    """A transformer block."""

    def __init__(self, width, heads, drop, **kwargs):
        super().__init__(**kwargs)
        self.norm1 = L.LayerNormalization()
        self.attention = L.MultiHeadAttention(heads, width // heads, dropout=drop)
        self.norm2 = L.LayerNormalization()
        self.wide = L.Dense(4 * width, activation="gelu")
        self.narrow = L.Dense(width)
        self.drop = L.Dropout(drop)

    def call(self, x, mask, training=None):
        h = self.norm1(x)
        x = x + self.attention(h, h, attention_mask=mask, training=training)
        return x + self.drop(self.narrow(self.wide(self.norm2(x))), training=training)


class Gpt(K.Model):
    """Tied embeddings, dropout, a mask that glue makes, and a residual stream."""

    def __init__(self, vocabulary=61, width=32, num_blocks=3, heads=4, length=12, drop=0.1):
        super().__init__()
        self.tokens = L.Embedding(vocabulary, width)
        self.positions = L.Embedding(length, width)
        self.drop = L.Dropout(drop)
        self.blocks = [Block(width, heads, drop, name=f"block_{i}") for i in range(num_blocks)]
        self.norm = L.LayerNormalization()

    def call(self, ids, training=None):
        length = ids.shape[1]
        x = self.drop(self.tokens(ids) + self.positions(tf.range(length)), training=training)
        mask = tf.linalg.band_part(tf.ones([1, length, length], tf.bool), -1, 0)
        for block in self.blocks:
            x = block(x, mask, training=training)
        weights = tf.convert_to_tensor(self.tokens.embeddings)
        return tf.matmul(self.norm(x), weights, transpose_b=True)


class Recurrent(K.Model):
    """Loops, and lists of tensors that never leave their process."""

    def __init__(self):
        super().__init__()
        self.embedding = L.Embedding(50, 8)
        self.lstm = L.LSTM(8, return_sequences=True)
        self.gru = L.GRU(8)
        self.dense = L.Dense(10)

    def call(self, x, training=None):
        return self.dense(self.gru(self.lstm(self.embedding(x)), training=training))


def unet():
    """A functional model with skip connections, batch norm and dropout."""

    def convolve(x, filters):
        x = L.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        return L.Activation("relu")(L.BatchNormalization()(x))

    image = K.Input((8, 8, 3))
    a = convolve(image, 4)
    b = convolve(L.MaxPooling2D()(a), 8)
    c = L.Dropout(0.2)(convolve(L.MaxPooling2D()(b), 8))
    d = convolve(L.Concatenate()([L.UpSampling2D()(c), b]), 8)
    e = convolve(L.Concatenate()([L.UpSampling2D()(d), a]), 4)
    return K.Model(image, L.Dense(10)(L.GlobalAveragePooling2D()(e)))


def perceptron():
    """A sequential model."""
    return K.Sequential([L.Dense(16, activation="relu"), L.Dropout(0.1), L.Dense(16), L.Dense(10)])


def make(name, num_samples):
    """The model of a name, with data."""
    random = np.random.RandomState(0)
    K.utils.set_random_seed(7)
    labels = random.randint(0, 10, num_samples)
    if name in ("conv", "clip", "metric", "get_gradients"):
        gradients = name if name in ("clip", "get_gradients") else "tape"
        images = random.rand(num_samples, 10, 10, 1).astype("f")
        return Case(Conv(), images, labels, gradients, metric=name == "metric")
    if name == "again":
        return Case(Again(), random.rand(num_samples, 10, 10, 1).astype("f"), labels)
    if name == "gpt":
        ids = random.randint(0, 61, (num_samples, 12))
        return Case(Gpt(), ids, random.randint(0, 61, (num_samples, 12)))
    if name == "recurrent":
        return Case(Recurrent(), random.randint(0, 50, (num_samples, 6)), labels)
    if name == "unet":
        return Case(unet(), random.rand(num_samples, 8, 8, 3).astype("f"), labels)
    if name == "perceptron":
        return Case(perceptron(), random.rand(num_samples, 12).astype("f"), labels)
    raise AssertionError(name)
