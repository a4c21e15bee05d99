"""Canaries for uses of private TensorFlow and Keras that no training shows by itself."""

import weakref
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from shardwright.errors import UsageError
from shardwright.tensorflow import _private


def test_functions_of_the_script_are_converted_as_they_ask():
    """Bug: an ``if`` on a tensor failed in a ``tf.function`` that a step function, or a layer, calls."""

    def doubled(x):
        if tf.reduce_mean(x) > 0.5:
            x = x * 2.0
        return x

    class Doubled(tf.keras.layers.Layer):
        def call(self, x):
            return tf.function(doubled)(x)

    def step(x):
        with _private.layers_told(lambda layer: True, lambda: None), _private.functions_inlined():
            return layer(x) + tf.function(doubled)(x)

    layer = Doubled()
    traced = tf.function(step, input_signature=[tf.TensorSpec([1])]).get_concrete_function()
    assert [traced(tf.fill([1], value)).numpy() for value in (1.0, 0.25)] == [4.0, 0.5]
    as_it_is = tf.function(doubled, autograph=False)
    with _private.functions_inlined(), pytest.raises(Exception, match="as a Python `bool`"):
        tf.function(lambda x: as_it_is(x)).get_concrete_function(tf.ones([1]))


def test_a_step_can_be_traced_out_of_a_function_with_tapes():
    found = []

    @tf.function
    def outer():
        with _private.outside_of_functions():
            with tf.GradientTape() as tape:
                x = tf.constant(2.0)
                tape.watch(x)
                y = x * x
            found.append(float(tape.gradient(y, x)))
        return tf.zeros([])

    outer()
    assert found[0] == 4.0


def test_a_variable_that_is_given_up_has_no_memory_and_is_saved_only_where_that_is_allowed(tmp_path):
    kept, gone = tf.Variable(tf.ones([4])), tf.Variable(tf.ones([1000, 1000]), name="gone")
    allowed, left_out = [], []
    _private.given_up(gone, lambda: bool(allowed), "gone is on rank 1", is_left_out=lambda: bool(left_out))
    assert gone.shape == (1000, 1000)
    assert isinstance(gone, tf.Variable)
    checkpoint = tf.train.Checkpoint(kept=kept, gone=gone)
    module = tf.Module()
    module.gone = gone
    for save in (checkpoint.save, partial(tf.saved_model.save, module)):
        with pytest.raises(UsageError, match="gone is on rank 1"):
            save(str(tmp_path / "refused"))
    left_out.append(True)
    path = checkpoint.save(str(tmp_path / "ckpt"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert any(name.startswith("kept/") for name in names)
    assert not any(name.startswith("gone/") for name in names)
    allowed.append(True)
    assert tf.size(gone.read_value()) == 0


def test_what_a_file_has_of_objects(tmp_path):
    kept, gone = tf.Variable(1.0), tf.Variable([1.0, 2.0])
    optimizer = tf.keras.optimizers.SGD(momentum=0.9)
    optimizer.build([kept])
    _private.given_up(gone, lambda: False, "gone is on rank 1", is_left_out=lambda: True)
    checkpoint = tf.train.Checkpoint(kept=kept, gone=gone, optimizer=optimizer)
    graph = _private.saved_graph(checkpoint.write(str(tmp_path / "ckpt")))
    found = {id(held): saved for held, saved in _private.saved_objects(checkpoint, graph)}
    assert found[id(kept)].has_value
    assert not found[id(gone)].has_value
    assert found[id(kept)].number != found[id(gone)].number
    assert found[id(optimizer)].num_slots == 1  # neither the counter nor the rate


@pytest.mark.parametrize("root_of", [lambda module: module, weakref.ref], ids=["root", "weak"])
def test_what_a_file_has_of_a_root(root_of, tmp_path):
    module = tf.Module()
    module.kept = tf.Variable(1.0)
    checkpoint = tf.train.Checkpoint(root=root_of(module))
    graph = _private.saved_graph(checkpoint.write(str(tmp_path / "ckpt")))
    found = {id(held): saved for held, saved in _private.saved_objects(checkpoint, graph)}
    assert found[id(module.kept)].has_value


READS = {
    "numpy": lambda v: v.numpy(),
    "value": lambda v: v.value(),
    "read_value": lambda v: v.read_value(),
    "operator": lambda v: v + 1.0,
    "operation": lambda v: tf.reduce_sum(v),
    "array": lambda v: np.asarray(v),
    "rows": lambda v: tf.gather(v, [0]),
    "index": lambda v: v[0],
    "gather_nd": lambda v: v.gather_nd([[0]]),
    "in a function": lambda v: tf.function(lambda: v + 1.0, autograph=False)(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_a_variable_that_is_given_up_is_refused(read):
    variable = tf.Variable([[1.0, 2.0]])
    _private.given_up(variable, lambda: False, "it is on rank 1")
    with pytest.raises(UsageError, match="it is on rank 1"):
        read(variable)


def test_changes_of_a_variable_that_is_given_up_are_left_to_others():
    variable = tf.Variable([1.0, 2.0], name="mine")
    _private.given_up(variable, lambda: False, "it is on rank 1")
    variable.assign([3.0, 4.0])
    variable.assign_add([1.0, 1.0])
    assert "on another rank" in repr(variable)
    _private.given_back(variable, tf.constant([5.0, 6.0]))
    assert variable.numpy().tolist() == [5.0, 6.0]
    assert "another rank" not in repr(variable)


def test_a_variable_without_value_has_shape_and_type_and_takes_one():
    options = {"dtype": tf.float16, "name": "late", "trainable": False}
    assert _private.made_without_value({**options, "initial_value": tf.ones([2])}) is None
    assert _private.made_without_value({**options, "initial_value": lambda: tf.ones([])}) is None
    variable = _private.made_without_value({**options, "initial_value": lambda: tf.ones([2])})
    assert isinstance(variable, tf.Variable)
    assert (variable.shape, variable.dtype, variable.trainable) == ((2,), tf.float16, False)
    _private.given_up(variable, lambda: False, "not yet")
    with pytest.raises(UsageError, match="not yet"):
        variable.numpy()
    _private.given_back(variable, tf.ones([2], tf.float16))
    assert variable.numpy().tolist() == [1.0, 1.0]


def test_a_backup_is_left_to_another_rank(tmp_path):
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    saved = []
    model.save_weights = lambda filepath, overwrite: saved.append(filepath)
    kept = tmp_path / "backup"
    kept.mkdir()
    with _private.backups_left_to_another():
        model.fit(
            np.zeros([2, 3], "f"),
            np.zeros([2, 1], "f"),
            verbose=0,
            callbacks=[tf.keras.callbacks.BackupAndRestore(str(kept))],
        )
    assert saved == [f"{kept}/latest.weights.h5"]
    assert list(tmp_path.rglob("*")) == [kept]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' own
def test_a_board_is_left_to_another_rank(tmp_path):
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.zeros([2, 3], "f"), np.zeros([2, 1], "f")
    board = tf.keras.callbacks.TensorBoard(str(tmp_path), profile_batch=1, update_freq="batch")
    with _private.boards_left_to_another():
        model.fit(x, y, validation_data=(x, y), verbose=0, callbacks=[board])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
