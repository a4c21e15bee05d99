"""Measures a Keras GPT over two ranks against one process, one thread each.

python benchmarks/tensorflow_pipeline.py [--json FILE] [--blocks N] [--quick] [--check]     # about 8 minutes

A  two ranks against one tf.function over the same microbatches, and over the batch at once: training steps,
   with the update of Adam. Beside it the time of all cores for a step, which hardly depends on what else the
   machine does; and what two such processes at once, which share nothing, do together in place of one: no
   pipeline can be faster than that on this machine
B  the step that the plan predicts, against the measured one
C  what the runtime takes for an action, besides the piece of the model that it runs: of a tiny model, whose
   step is little else; with all that a step takes before its first action and behind its last. Time of a core

Contestants take turns, each in processes of its own; a figure is the median of the medians of its turns. One
turn of all contestants gives one ratio, and the spread is that of the ratios. It needs TensorFlow: run it
with the interpreter of ``make test-tensorflow``.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from check import Check, lines
from machine import circumstances
from shardwright.testing import run_ranks
from shardwright.text import align

VOCABULARY, MICROBATCHES, RANKS = 512, 8, 2
WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class Size:
    """Of the model and its batches."""

    num_blocks: int = 12
    width: int = 256
    heads: int = 8
    length: int = 64
    batch: int = 32
    steps: int = 5
    turns: int = 3


QUICK = Size(num_blocks=2, width=64, heads=2, length=16, batch=16, steps=20, turns=2)


def gpt(size: Size) -> Any:
    """A GPT with learned positions and a head of its own."""
    import tensorflow as tf

    layers = tf.keras.layers

    class Block(layers.Layer):
        def __init__(self, **kwargs: Any):
            super().__init__(**kwargs)
            self.norms = [layers.LayerNormalization() for _ in range(2)]
            self.attention = layers.MultiHeadAttention(size.heads, size.width // size.heads)
            self.wide = layers.Dense(4 * size.width, activation="gelu")
            self.narrow = layers.Dense(size.width)

        def call(self, x: Any) -> Any:
            h = self.norms[0](x)
            x = x + self.attention(h, h, use_causal_mask=True)
            return x + self.narrow(self.wide(self.norms[1](x)))

    class Gpt(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = layers.Embedding(VOCABULARY, size.width)
            self.positions = layers.Embedding(size.length, size.width)
            self.blocks = [Block(name=f"block_{i}") for i in range(size.num_blocks)]
            self.norm, self.head = layers.LayerNormalization(), layers.Dense(VOCABULARY)

        def call(self, ids: Any) -> Any:
            x = self.tokens(ids) + self.positions(tf.range(size.length))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    tf.keras.utils.set_random_seed(0)
    return Gpt()


def step_of(model: Any) -> Callable[[Any, Any], Any]:
    """Dense gradients and the loss of a microbatch: Adam adds up rows of sparse ones in another way."""
    import tensorflow as tf

    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(ids: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(ids, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        return [tf.convert_to_tensor(gradient) for gradient in gradients], loss

    return step


def batches(size: Size) -> tuple[Any, Any]:
    """Token ids and labels, (batch, length) each."""
    random = np.random.RandomState(0)
    ids, labels = (random.randint(0, VOCABULARY, (size.batch, size.length)) for _ in range(2))
    return ids, labels


def timed(
    train: Callable[[Any, Any], Any], size: Size, *, tensor: Callable[[Any], Any]
) -> tuple[float, float, list[float]]:
    """Median seconds of a step, those of this process' cores, and the losses.

    Args:
        train: one step on a batch.
        size: says how many steps.
        tensor: makes a tensor of the framework from an array.
    """
    ids, labels = map(tensor, batches(size))
    losses, seconds, of_cores = [], [], []
    for number in range(WARM_UP + size.steps):
        begun_s, used_s = time.perf_counter(), time.process_time()
        losses.append(float(train(ids, labels)))
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - begun_s)
            of_cores.append(time.process_time() - used_s)
    return statistics.median(seconds), statistics.median(of_cores), losses


def in_one_process(size: Size, microbatches: int) -> tuple[float, float, list[float]]:
    """One tf.function over the microbatches of a batch, on one thread."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    model, optimizer = gpt(size), tf.keras.optimizers.Adam(1e-4)
    step = tf.function(step_of(model), reduce_retracing=True)  # traced once for all microbatches

    @tf.function
    def train(ids: Any, labels: Any) -> Any:
        parts = zip(tf.split(ids, microbatches), tf.split(labels, microbatches), strict=True)
        results = [step(*part) for part in parts]
        means = [
            sum(each) / microbatches for each in zip(*(gradients for gradients, _ in results), strict=True)
        ]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        return sum(loss for _, loss in results) / microbatches

    return timed(train, size, tensor=tf.constant)


def over_ranks(size: Size, microbatches: int) -> tuple[float, float, list[float], float]:
    """The same over the ranks of a pipeline; with the seconds that the plan predicts."""
    import tensorflow as tf

    import shardwright.tensorflow as sw
    from shardwright.tensorflow.keras_run import keras_run

    sw.init(
        {"pipeline_parallel_degree": RANKS, "microbatches": microbatches, "run_dir": "off", "report": False}
    )
    model, optimizer = sw.DistributedModel(gpt(size)), tf.keras.optimizers.Adam(1e-4)
    step = sw.step(step_of(model))

    @tf.function
    def train(ids: Any, labels: Any) -> Any:
        gradients, loss = step(ids, labels)
        means = [gradient.reduce_mean() for gradient in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    seconds, of_cores_s, losses = timed(train, size, tensor=tf.constant)
    plan = keras_run().plan
    assert plan is not None
    predicted_s = plan.prediction.step_s
    sw.shutdown()
    return seconds, of_cores_s, losses, predicted_s


def taken_by_the_runtime(size: Size, microbatches: int) -> float:
    """Seconds of a core that a rank takes for an action, besides the concrete function that it calls."""
    import tensorflow as tf

    import shardwright.tensorflow as sw
    from shardwright.tensorflow import _private
    from shardwright.tensorflow.keras_run import keras_run

    in_functions_s = 0.0
    original = _private.direct_call

    def timed_call(function: Any) -> Any:
        call = original(function)

        def run(tensors: Any) -> Any:
            nonlocal in_functions_s
            begun_s = time.thread_time()
            made = call(tensors)
            in_functions_s += time.thread_time() - begun_s
            return made

        return run

    _private.direct_call = timed_call
    sw.init(
        {"pipeline_parallel_degree": RANKS, "microbatches": microbatches, "run_dir": "off", "report": False}
    )
    model = sw.DistributedModel(gpt(size))
    step = sw.step(step_of(model))
    ids, labels = map(tf.constant, batches(size))
    seconds = []
    for number in range(WARM_UP + size.steps):
        in_functions_s = 0.0
        begun_s = time.thread_time()
        step(ids, labels)
        whole_s = time.thread_time() - begun_s
        if number >= WARM_UP:
            count = len(keras_run().engine().measured_row.events)
            seconds.append((whole_s - in_functions_s) / count)
    sw.shutdown()
    _private.direct_call = original
    return statistics.median(seconds)


def main() -> int:
    """Measures, prints, and with ``--check`` fails where a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=Size.num_blocks, help="of the GPT")
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it still run?")
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    parser.add_argument("--json", type=Path, help="file for all raw figures")
    options = parser.parse_args()
    size = QUICK if options.quick else Size(num_blocks=options.blocks)
    about = circumstances()
    print("\n".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    action_s = max(run_ranks(taken_by_the_runtime, RANKS, QUICK, MICROBATCHES, timeout_s=300))
    turns: list[dict[str, float]] = []
    apart = 0.0
    for turn in range(size.turns):
        print(f"... turn {turn + 1} of {size.turns}", file=sys.stderr, flush=True)
        ranks = run_ranks(over_ranks, RANKS, size, MICROBATCHES, timeout_s=600)
        ((same_s, same_cores_s, losses),) = run_ranks(in_one_process, 1, size, MICROBATCHES, timeout_s=600)
        ((whole_s, whole_cores_s, _),) = run_ranks(in_one_process, 1, size, 1, timeout_s=600)
        pair = run_ranks(in_one_process, RANKS, size, MICROBATCHES, timeout_s=600)
        turns.append(
            {
                "ranks_s": max(rank[0] for rank in ranks),
                "same_s": same_s,
                "whole_s": whole_s,
                "pair_s": statistics.mean(each[0] for each in pair),
                "predicted_s": ranks[0][3],
                "ranks_cores_s": sum(rank[1] for rank in ranks),
                "same_cores_s": same_cores_s,
                "whole_cores_s": whole_cores_s,
            }
        )
        apart = max(apart, *(abs(a - b) for a, b in zip(losses, ranks[0][2], strict=True)))
    same = [turn["same_s"] / turn["ranks_s"] for turn in turns]
    whole = [turn["whole_s"] / turn["ranks_s"] for turn in turns]
    predicted = [abs(turn["predicted_s"] / turn["ranks_s"] - 1) for turn in turns]
    rows = [["", "median", "least", "most"]]
    for name, key in (
        ("two ranks (ms)", "ranks_s"),
        ("one process, same microbatches (ms)", "same_s"),
        ("one process, batch at once (ms)", "whole_s"),
        ("two processes at once, each by itself (ms)", "pair_s"),
        ("predicted (ms)", "predicted_s"),
        ("time of cores: two ranks together (ms)", "ranks_cores_s"),
        ("time of cores: one process, same microbatches (ms)", "same_cores_s"),
        ("time of cores: one process, batch at once (ms)", "whole_cores_s"),
    ):
        values = [turn[key] * 1e3 for turn in turns]
        rows.append([name, *(f"{f(values):.1f}" for f in (statistics.median, min, max))])
    attainable = [RANKS * turn["same_s"] / turn["pair_s"] for turn in turns]
    for name, ratios in (
        ("speed-up over the same microbatches", same),
        ("over the batch at once", whole),
        ("of two processes that share nothing", attainable),
    ):
        rows.append([name, *(f"{f(ratios):.2f}" for f in (statistics.median, min, max))])
    print(f"\n{align(rows)}\n\nlosses within {apart:.1e} of one process")
    print(f"the runtime takes {action_s * 1e3:.2f} ms for an action")
    checks = [
        Check(
            section="A",
            what="speed-up of two ranks over the same microbatches",
            value=statistics.median(same),
            target=1.7,
            at_least=True,
        ),
        Check(
            section="A",
            what="speed-up of two ranks over the batch at once",
            value=statistics.median(whole),
            target=1.5,
            at_least=True,
        ),
        Check(
            section="B",
            what="predicted step against the measured one, off by",
            value=statistics.median(predicted),
            target=0.07,
            percent=True,
        ),
        Check(
            section="C",
            what="milliseconds of the runtime for an action",
            value=action_s * 1e3,
            target=0.5,
        ),
    ]
    if options.check or not options.quick:
        print("\nTargets, the worst figure last\n\n" + "\n".join(lines(checks)))
    if options.json is not None:
        found = {**about, "size": dataclasses.asdict(size), "turns": turns, "losses_apart": apart}
        found["action_s"] = action_s
        found["checks"] = [{**dataclasses.asdict(check), "passes": check.passes} for check in checks]
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if options.check and not all(check.passes for check in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
