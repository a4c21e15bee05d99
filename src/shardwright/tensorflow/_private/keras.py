"""Layers and models of Keras, version 3 and legacy."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from shardwright.tensorflow._private.graphs import replaced


def uses_keras_3() -> bool:
    """Whether ``tf.keras`` is Keras 3; with ``TF_USE_LEGACY_KERAS=1`` it is tf_keras."""
    return bool(tf.keras.Model.__module__.startswith("keras."))


def keras_model_class() -> Any:
    return tf.keras.Model


def keep_from_xla(is_meant: Callable[[Any], bool]) -> None:
    """From now on, ``jit_compile="auto"`` of Keras 3 chooses no XLA for models that `is_meant` names.

    With an accelerator it does for others, and no argument but the model's own tells it otherwise.
    """
    if not uses_keras_3():
        return
    from keras.src.trainers.trainer import Trainer

    original = Trainer._resolve_auto_jit_compile
    Trainer._resolve_auto_jit_compile = lambda self: not is_meant(self) and original(self)


def is_building() -> bool:
    """Whether Keras calls layers on symbols, in a graph that nobody runs.

    Legacy Keras does so for ``model.build``, Keras 3 to find out what a layer of one's own would give.
    """
    name = getattr(tf.compat.v1.get_default_graph(), "name", "")
    if uses_keras_3():
        return name.startswith("scratch_graph")
    return name.endswith(("keras_graph", "scratch_graph", "build_graph"))


def count_batch(model: Any) -> None:
    """Counts a batch of ``fit`` where Keras leaves that to its function of a batch; TensorBoard shows it."""
    if (counter := getattr(model, "_train_counter", None)) is not None:
        counter.assign_add(1)


@contextmanager
def backups_left_to_another() -> Iterator[None]:
    """Has ``BackupAndRestore`` of Keras 3 take part in a save, and leave its folder to another rank.

    `_save_model` copies and writes files around ``save_weights``, which all ranks make together.
    """
    owner = tf.keras.callbacks.BackupAndRestore

    def save(_original: Any) -> Any:
        return lambda self: self.model.save_weights(filepath=self._weights_path, overwrite=True)

    def end(_original: Any) -> Any:
        return lambda self, logs=None: None

    with replaced(owner, "_save_model", save), replaced(owner, "on_train_end", end):
        yield


@contextmanager
def boards_left_to_another() -> Iterator[None]:
    """Has ``TensorBoard`` write nothing here: each curve would be there once for each rank.

    It takes its writers from two properties, and the profiler from a method.
    """
    owner = tf.keras.callbacks.TensorBoard

    def nothing(_original: Any) -> Any:
        return property(lambda self: tf.summary.create_noop_writer())

    def unstarted(_original: Any) -> Any:
        return lambda self, logdir: None

    with (
        replaced(owner, "_train_writer", nothing),
        replaced(owner, "_val_writer", nothing),
        replaced(owner, "_start_profiler", unstarted),
    ):
        yield


@contextmanager
def weights_logged(make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces what ``TensorBoard`` calls with the epoch, to write histograms of all weights."""
    with replaced(tf.keras.callbacks.TensorBoard, "_log_weights", make):
        yield


def steps_per_execution(model: Any) -> int:
    """How many batches Keras wants in one call now; legacy Keras lowers the number where data end."""
    found = getattr(model, "_steps_per_execution", None)
    return int(getattr(model, "steps_per_execution", None) or 1) if found is None else int(found)


@contextmanager
def stays_without_slots(optimizer: Any) -> Iterator[None]:
    """Keeps Keras 3, which builds all parts of a model before ``fit``, from making slots for every variable.

    It looks at ``built``. The first update makes those of this rank.
    """
    waits = optimizer is not None and not getattr(optimizer, "built", True)
    if waits:
        optimizer.built = True
    try:
        yield
    finally:
        if waits:
            optimizer.built = False


def _layer_class() -> type:
    """The class that defines ``__call__`` of layers; ``tf.keras.layers.Layer`` inherits it."""
    if uses_keras_3():
        from keras.src.layers.layer import Layer
    else:
        from tf_keras.src.engine.base_layer import Layer
    layer: type = Layer
    return layer


@contextmanager
def layers_told(begin: Callable[[Any], bool], end: Callable[[], None]) -> Iterator[None]:
    """Calls ``begin(layer)`` and, where that was true, ``end()`` around every call of a layer."""

    def make(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not begin(self):
                return original(self, *args, **kwargs)
            try:
                return original(self, *args, **kwargs)
            finally:
                end()

        return call

    with replaced(_layer_class(), "__call__", make):
        yield


@contextmanager
def parts_called(make: Callable[[str], Callable[[Any], Any]]) -> Iterator[None]:
    """Replaces what a script calls layers and models by to get numbers from them; ``make`` takes its name."""
    owners = {
        _layer_class(): ("__call__", "get_weights"),
        keras_model_class(): (
            *("predict", "predict_on_batch", "evaluate", "test_on_batch"),
            *("save", "save_weights", "export"),
        ),
    }
    with ExitStack() as stack:
        for owner, names in owners.items():
            for name in names:
                stack.enter_context(replaced(owner, name, make(name)))
        yield


@contextmanager
def new_layers_told(tell: Callable[[Any], None]) -> Iterator[None]:
    """Calls ``tell(layer)`` for every layer that is created."""

    def make(original: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            tell(self)

        return init

    with replaced(_layer_class(), "__init__", make):
        yield


def layers_of(layer: Any) -> list[Any]:
    """The layers that a layer holds itself, also in lists and dictionaries, in the order of creation.

    `_flatten_layers` is what Keras goes by; ``layers`` exists for models alone.
    """
    return list(layer._flatten_layers(include_self=False, recursive=False))


def variables_without_metrics(model: Any) -> list[Any]:
    """The variables of a model, without those of metrics that it has as attributes.

    Legacy Keras counts these as well, and keeps such metrics of a model, or a layer, in ``_metrics``.
    """
    layers = model._flatten_layers()
    metrics = [metric for layer in layers for metric in getattr(layer, "_metrics", ())]
    left_out = {id(each) for metric in metrics for each in metric.variables}
    return [each for each in model.variables if id(each) not in left_out]
