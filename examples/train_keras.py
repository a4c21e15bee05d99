"""Trains a small Keras GPT on running sums of digits; the same script for one rank and for many.

    python examples/train_keras.py
    shardwright run -n 2 examples/train_keras.py [steps] [blocks]

Prints the losses and the seconds of a step.
"""

import json
import sys
import time

import numpy as np
import tensorflow as tf

import shardwright.tensorflow as sw

LENGTH, WIDTH, HEADS, BATCH = 64, 192, 6, 16
layers = tf.keras.layers


class Block(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        self.wide, self.narrow = layers.Dense(4 * WIDTH, activation="gelu"), layers.Dense(WIDTH)

    def call(self, x):
        h = self.norms[0](x)
        x = x + self.attention(h, h, use_causal_mask=True)
        return x + self.narrow(self.wide(self.norms[1](x)))


class Gpt(sw.DistributedModel):
    def __init__(self, num_blocks):
        super().__init__()
        self.tokens, self.positions = layers.Embedding(10, WIDTH), layers.Embedding(LENGTH, WIDTH)
        self.blocks = [Block(name=f"block_{i}") for i in range(num_blocks)]
        self.norm, self.head = layers.LayerNormalization(), layers.Dense(10)

    def call(self, digits):
        x = self.tokens(digits) + self.positions(tf.range(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main(steps=12, num_blocks=6):
    sw.init({"microbatches": 4, "seed": 1})
    model, optimizer = Gpt(num_blocks), tf.keras.optimizers.Adam(3e-4)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @sw.step
    def get_gradients(digits, wanted):
        with tf.GradientTape() as tape:
            loss = loss_of(wanted, model(digits))
        return tape.gradient(loss, model.trainable_variables), loss

    @tf.function
    def train_step(digits, wanted):
        gradients, loss = get_gradients(digits, wanted)
        means = [gradient.reduce_mean() for gradient in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    random, losses, seconds = np.random.RandomState(0), [], []
    for _ in range(steps):
        digits = random.randint(0, 10, (BATCH, LENGTH))
        begun_s = time.perf_counter()
        losses.append(float(train_step(tf.constant(digits), tf.constant(np.cumsum(digits, 1) % 10))))
        seconds.append(time.perf_counter() - begun_s)
    if sw.rank() == 0:
        print(json.dumps({"losses": losses, "step_s": float(np.median(seconds[2:]))}))
    sw.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
