"""The wrapped model."""

import functools
import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import tensorflow as tf

from shardwright.errors import UsageError
from shardwright.run.context import is_initialized
from shardwright.tensorflow import _private, fit
from shardwright.tensorflow.keras_run import keras_run
from shardwright.tensorflow.startup import joined_by_all
from shardwright.tensorflow.variables import tf_variable
from shardwright.tensorflow.whole import optimizer_from_file, whole_model, whole_optimizer


class DistributedModel(tf.keras.Model):  # type: ignore[misc]
    """A Keras model whose layers the ranks of a pipeline share.

    Subclass it in the place of ``tf.keras.Model``, or wrap a functional, sequential or subclassed model::

        class Net(sw.DistributedModel):
            def __init__(self):
                super().__init__()
                self.conv = tf.keras.layers.Conv2D(32, 3)
            def call(self, x): ...

        model = sw.DistributedModel(tf.keras.Sequential([...]))

    A model that is wrapped stays the same object: its layers, the names of its outputs, its ``train_step``,
    and what it was compiled with are as before.

    The layers are placed in the first step. Then a rank has values for the variables of its own layers alone:
    to read another is an error, and a value that is given to it, as `set_weights` and `load_weights` do, is
    left to the rank that holds it. `get_weights`, `save_weights`, `save`, `export` and `save_model` take the
    whole model together: call them on all ranks. The first rank writes.

    Args:
        model: the model to wrap; None for a subclass, which has layers of its own.

    Raises:
        UsageError: `sw.init` was not called, another model is wrapped already, or arguments are given
            beside the model to wrap.
    """

    # Of the classes that wrap a model; a subclass of a script's own may take models as it likes.
    _wraps_models = True

    def __new__(cls, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Makes the model, or gives one that is there the methods of this class."""
        if "_wraps_models" not in vars(cls) or not isinstance(model, _private.keras_model_class()):
            return super().__new__(cls, *(() if model is None else (model,)), *args, **kwargs)
        if given := [*map(repr, args), *kwargs]:
            raise UsageError(
                f"DistributedModel(model) was given {', '.join(given)} beside the model, which stays what it "
                "is. Give that to the model itself."
            )
        if not isinstance(model, DistributedModel):
            own: Any = type(model)
            model.__class__ = _class_over_ranks(cls, own)  # type: ignore[arg-type]
        return model

    def __init__(self, model: Any = None, *args: Any, **kwargs: Any):
        if not is_initialized():
            raise UsageError("shardwright is not initialised. Call shardwright.tensorflow.init() first.")
        if model is not self:  # with inputs and outputs it is a functional model
            super().__init__(*(() if model is None else (model,)), *args, **kwargs)
        # Keras keeps the functions of a batch that it has made.
        self.train_function = self.test_function = self.predict_function = None
        keras_run().wrap(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model, as Keras does."""
        is_first = "_called_with" not in vars(self) or keras_run().is_tracing
        if args and is_first and all(map(tf.is_tensor, tf.nest.flatten(args))):
            specs = tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), args)
            self.__dict__["_called_with"] = specs
        return super().__call__(*args, **kwargs)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Trains, as Keras does; collective over all ranks."""
        # Also where this rank has none: another one may have some of its own. The sixth argument is theirs.
        if len(args) < 6 and (joined := joined_by_all(keras_run(), kwargs.get("callbacks"))):
            kwargs["callbacks"] = joined
        return super().fit(*args, **kwargs)

    def make_train_function(self, force: bool = False) -> Any:
        """The function of one batch for ``fit``, as Keras asks for it."""
        return self._function_of_batch("train_function", fit.train_function, force)

    def make_test_function(self, force: bool = False) -> Any:
        """The function of one batch for ``evaluate``, as Keras asks for it."""
        return self._function_of_batch("test_function", fit.test_function, force)

    def make_predict_function(self, force: bool = False) -> Any:
        """The function of one batch for ``predict``, as Keras asks for it."""
        return self._function_of_batch("predict_function", fit.predict_function, force)

    def _function_of_batch(self, name: str, make: Callable[[Any], Any], force: bool) -> Any:
        if getattr(self, name, None) is None or force:
            setattr(self, name, make(self))
        return getattr(self, name)

    @functools.wraps(_private.keras_model_class().compute_loss)
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of a batch, as Keras asks for it."""
        loss, run = super().compute_loss(*args, **kwargs), keras_run()
        if run.is_tracing and (recorder := run.engine().recorder) is not None:
            recorder.told(loss)
        return loss

    def get_metrics_result(self) -> dict[str, Any]:
        """The metrics, as means over replicas; collective over all ranks."""
        return fit.averaged_over_replicas(keras_run(), dict(super().get_metrics_result()))

    def _symbolic_build(self, *args: Any, **kwargs: Any) -> None:
        """Keras 3 calls the model on shapes, also when it has its ranks: no value is read."""
        with keras_run().tracing(), _private.stays_without_slots(self.optimizer):
            super()._symbolic_build(*args, **kwargs)
        self.__dict__["_optimizer_in_fit"] = self.optimizer  # which has slots now, in one process

    def whole(self) -> AbstractContextManager[None]:
        """A context in which this rank has the values of all variables; enter it on all ranks.

        What reads variables by themselves needs it: ``with model.whole(): layer.kernel.numpy()``. A rank
        needs memory for the whole model meanwhile; values that it changes are lost afterwards.
        """
        return whole_model(keras_run(), "model.whole()")

    def get_weights(self) -> list[Any]:
        """The values of all variables, as NumPy arrays; collective over all ranks."""
        with whole_model(keras_run(), "model.get_weights()"):
            return list(super().get_weights())

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Writes the values of all variables into a file, as Keras does; collective over all ranks."""
        self._write("model.save_weights()", super().save_weights, filepath, *args, **kwargs)

    def load_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """Reads a file of Keras; each rank takes what it holds."""
        optimizer = getattr(self, "optimizer", None)  # which a model of Keras 3 has once it is compiled
        # In one process it has slots now; here it has those of this rank, if any.
        is_built = optimizer is not None and (
            optimizer is vars(self).get("_optimizer_in_fit")
            or id(optimizer) in keras_run().optimizers_in_parts
        )
        with optimizer_from_file(keras_run(), self) if is_built else nullcontext():
            return super().load_weights(filepath, *args, **kwargs)

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Writes the whole model into a file, as Keras does; collective over all ranks."""
        self._write("model.save()", super().save, filepath, *args, **kwargs)

    def export(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Writes a SavedModel, as Keras does; collective over all ranks."""
        self._write("model.export()", super().export, filepath, *args, **kwargs)

    def save_model(self, save_path: Any) -> None:
        """Writes the whole model as a SavedModel that needs no Shardwright; collective over all ranks.

        Its signature ``serving_default`` takes tensors as the model was first called with, for any number of
        samples, and gives the outputs of evaluation: ``output_0`` for a single tensor.

        Raises:
            UsageError: the model was never called.
        """
        specs = vars(self).get("_called_with")
        if specs is None:
            raise UsageError(
                "the model was never called with tensors, so nobody knows what it takes. Call it, or make a "
                "step, before model.save_model()."
            )
        self._write("model.save_model()", self._write_saved_model, save_path, specs)

    def _write_saved_model(self, path: Any, specs: Any) -> None:
        takes_training = "training" in inspect.signature(self.call).parameters

        def serve(*inputs: Any) -> Any:
            args = tf.nest.pack_sequence_as(specs, inputs)
            return self(*args, **({"training": False} if takes_training else {}))

        holder = tf.Module()
        holder.parts = [tf_variable(variable) for variable in self.variables]
        holder.serve = tf.function(serve, input_signature=tf.nest.flatten(specs), autograph=False)
        tf.saved_model.save(holder, os.fspath(path), signatures={"serving_default": holder.serve})

    def _write(self, where: str, write: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Has the first rank write the whole model; collective over all ranks."""
        run = keras_run()

        def write_here() -> None:
            write(*args, **kwargs)

        own = getattr(type(self), "_class_in_one_process", type(self))
        over_ranks = type(self)
        with whole_model(run, where), whole_optimizer(run):
            self.__class__ = own  # what is written needs no Shardwright
            try:
                run.from_first_rank(write_here)
            finally:
                self.__class__ = over_ranks


@cache
def _class_over_ranks(cls: Any, own: Any) -> Any:
    """The class of a model that is wrapped: that of the model, under `DistributedModel`.

    Its name and module are the model's, as Keras and reports show them.
    """
    attributes = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "_class_in_one_process": own,
    }
    over_ranks = type(own.__name__, (cls, own), attributes)
    # A clone is a model of its own, in one process.
    over_ranks.__new__ = lambda cls, *args, **kwargs: own(*args, **kwargs)  # type: ignore[assignment, method-assign]
    return over_ranks
