"""Runs the scripts of docs/tensorflow.md on two ranks."""

import pytest

from pages import blocks, execute
from shardwright.testing import run_ranks

BLOCKS = [block.text for block in blocks("python") if block.page == "tensorflow.md"]

IMAGES = """
images, labels = tf.random.normal((8, 8, 8, 3)), tf.range(8)
assert float(train_step(images, labels)) > 0
"""

DELAYED = """
import tensorflow as tf
import shardwright.tensorflow as sw
sw.init({"microbatches": 2})
layers = [tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(2)]
"""


@pytest.mark.parametrize(
    "script",
    [f"{BLOCKS[0]}\n{IMAGES}\n{BLOCKS[2]}", f"{DELAYED}\n{BLOCKS[1]}"],
    ids=["train and save", "delayed"],
)
def test_a_script_of_the_page_runs(script, tmp_path):
    settings = '{"run_dir": "off", "profile": "estimated"}'
    run_ranks(execute, 2, script, tmp_path, env={"SHARDWRIGHT_SET": settings}, init_process_group=False)
