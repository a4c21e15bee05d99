"""The run of a script with a Keras model, whose variables may be made on their own rank alone."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from shardwright.errors import UsageError
from shardwright.run.context import Context, context
from shardwright.run.joint_calls import call_together, first_cause_named
from shardwright.tensorflow import _private
from shardwright.tensorflow.engine import Engine
from shardwright.tensorflow.replicas import Replicas, SharedUpdates
from shardwright.tensorflow.row_gradients import scaled
from shardwright.tensorflow.variables import Variables

__all__ = ["KerasRun", "delayed_initialization", "keras_run"]


class KerasRun(Context):
    """A run, with what this front end adds.

    Attributes:
        variables: which of the model's variables other ranks hold.
        slots_to_load: by the id of an optimizer without slots: makes those of some variables, as restored.
        aside: (optimizer, gradients, variables) that a step function would apply, where that is to wait for
            the end of the batch; None where it is refused.
        at_once: what gradients of a step function are multiplied by, where it applies them at once (None: by
            nothing); an empty tuple where it does not.
        averages_replicas: the library keeps replicas alike; else the script does.
        after_placement: called when the first step has placed the layers, and before it runs them.
        shared_updates: replicas update a part of the variables each; None: all of them.
        optimizers_in_parts: those that have updated variables of which ranks hold different parts, by id.
    """

    __slots__ = (
        "_engine",
        "_keras_model",
        "_replicas",
        "after_placement",
        "aside",
        "at_once",
        "averages_replicas",
        "is_applying",
        "optimizers_in_parts",
        "shared_updates",
        "slots_to_load",
        "variables",
    )

    def __init__(self, **fields: Any):
        super().__init__(**fields)
        self.variables = Variables(self.pipeline_rank)
        self.is_applying = False
        self.optimizers_in_parts: dict[int, Any] = {}
        self.slots_to_load: dict[int, Callable[[Any, list[Any]], None]] = {}
        self.averages_replicas = True
        self.aside: list[tuple[Any, list[Any], list[Any]]] | None = None
        self.at_once: tuple[float | None, ...] = ()
        self._replicas: Replicas | None = None
        self.after_placement: list[Callable[[], Any]] = []
        self.shared_updates: SharedUpdates | None = None
        self._keras_model: Any = None
        self._engine: Engine | None = None

    def wrap(self, model: Any) -> None:
        """Takes the model that the script wraps."""
        if self._keras_model is not None:
            raise UsageError("a model is wrapped already: one DistributedModel for each script.")
        self._keras_model = model
        if self.mesh.data > 1 and self.averages_replicas:
            self._replicas = Replicas(self)
        if self.mesh.data > 1 and self.config.shard_optimizer_state:
            self.shared_updates = SharedUpdates(self)
        self._engine = Engine(self, model, self.variables, self._replicas)
        self._engine.after_placement = self.after_placement

    @property
    def is_tracing(self) -> bool:
        """Whether a step function is being traced."""
        return self._engine is not None and self._engine.is_tracing

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """While it lasts, variables of other ranks may be read, in a graph that is not run."""
        engine = self.engine()
        before, engine.is_tracing = engine.is_tracing, True
        try:
            yield
        finally:
            engine.is_tracing = before

    @contextmanager
    def gradients_put_aside(self) -> Iterator[list[tuple[Any, list[Any], list[Any]]]]:
        """While a step function is traced in it, gradients that it would apply are collected."""
        aside: list[tuple[Any, list[Any], list[Any]]] = []
        self.aside = aside
        try:
            yield aside
        finally:
            self.aside = None

    @contextmanager
    def updates_at_once(self, factor: float | None) -> Iterator[list[Any]]:
        """While a step function is traced in it, gradients that it applies are applied at once.

        One rank has the whole model and the whole of a replica's batch, so these gradients, or their means
        over the replicas, are those of the batch.
        """
        self.at_once = (factor,)
        try:
            yield []
        finally:
            self.at_once = ()

    @contextmanager
    def updating(self, pairs: Sequence[tuple[Any, Any]]) -> Iterator[list[tuple[Any, Any]]]:
        """Gradients of a step function that is traced, as they are applied at once: those of the batch.

        What optimizers do meanwhile is no part of the step.
        """
        engine, (factor,) = self.engine(), self.at_once
        recorder = engine.recorder
        assert recorder is not None
        recorder.given(pairs, waits=False)
        engine.is_tracing = False
        try:
            with recorder.updating():
                found = [scaled(gradient, factor) for gradient, _ in pairs]
                if self._replicas is not None:
                    found = self._replicas.means_in_turn(found)
                yield [(gradient, variable) for gradient, (_, variable) in zip(found, pairs, strict=True)]
        finally:
            engine.is_tracing = True

    def note_parts(self, optimizer: Any, variables: Iterable[Any]) -> None:
        """Notes an optimizer that updates variables, if ranks then have different slots of it."""
        if id(optimizer) not in self.optimizers_in_parts and (
            self.shared_updates is not None
            or any(self.variables.holder(variable) is not None for variable in variables)
        ):
            self.optimizers_in_parts[id(optimizer)] = optimizer

    def pairs_to_update(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """The pairs of gradients and variables that this rank updates."""
        here = self.variables.pairs_here(pairs)
        return here if self.shared_updates is None else self.shared_updates.mine(here)

    def means_over_replicas(self, numbers: Sequence[float]) -> list[float]:
        """Numbers of this replica as means over all; collective over all ranks."""
        if self._replicas is None:
            return list(numbers)
        everyone = range(self.mesh.world_size)
        with first_cause_named(self), call_together("a batch or an epoch of fit or evaluate", everyone):
            return self._replicas.means(numbers)

    @property
    def keras_model(self) -> Any:
        """The wrapped model; None before there is one."""
        return self._keras_model

    @property
    def is_placed(self) -> bool:
        """Whether a step has given each variable of the model a rank."""
        return self._engine is not None and self._engine.is_placed

    def engine(self) -> Engine:
        """What runs step functions."""
        if self._engine is None:
            raise UsageError("no model is wrapped. Call sw.DistributedModel(model) before the first step.")
        return self._engine


def keras_run() -> KerasRun:
    """The current run."""
    current = context()
    if not isinstance(current, KerasRun):
        raise UsageError("this run was begun by another front end. Call shardwright.tensorflow.init().")
    return current


# Seeds, counters and the like are made at once.
_FEWEST_ELEMENTS = 1024


@contextmanager
def delayed_initialization() -> Iterator[None]:
    """Large variables that are made inside get their values in the first step, on their own rank alone.

    So a model starts that is larger than the memory of a rank. Its layers must be built inside: functional
    models are, and others are by ``model(tf.keras.Input(shape))``. Values are those that they would have had.
    A value that a variable is given before the first step, as by ``load_weights``, is kept in memory until
    then.

    Raises:
        UsageError: `sw.init` was not called.

    Example::

        with sw.delayed_initialization():
            model = tf.keras.Sequential([tf.keras.Input((64,)), *layers])
        model = sw.DistributedModel(model)
    """
    run = keras_run()

    def create(next_creator: Callable[..., Any], **options: Any) -> Any:
        own = None
        if not run.is_placed and tf.executing_eagerly():
            own = _private.made_without_value(options, fewest_elements=_FEWEST_ELEMENTS)
        if own is None:
            return next_creator(**options)
        make = partial(_first_value, options["initial_value"], own.dtype)
        run.variables.delay(own, make, is_tracing=lambda: run.is_tracing)
        return own

    with tf.variable_creator_scope(create):
        yield


def _first_value(make: Callable[[], Any], dtype: Any) -> Any:
    with warnings.catch_warnings():
        # Legacy Keras warns of an initializer that is called again: it gives the same, as it has to here.
        warnings.filterwarnings("ignore", "The initializer .* is unseeded")
        return tf.cast(make(), dtype)
