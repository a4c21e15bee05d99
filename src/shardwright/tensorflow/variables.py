"""The variables of a model: their names, and which of them other ranks hold."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from shardwright.tensorflow import _private


def tf_variable(variable: Any) -> Any:
    """TensorFlow's own variable behind one of Keras; any other thing as it is."""
    if isinstance(variable, tf.Variable):
        return _private.without_autocast(variable)
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


def variables_by_name(model: Any) -> dict[str, Any]:
    """The variables of a model under unique names, the same on all ranks: ``encoder/dense/kernel``.

    Keras numbers models that have no name of their own, so the model's is left out.
    """
    named: dict[str, Any] = {}
    for variable in model.variables:
        path = getattr(variable, "path", None) or variable.name.partition(":")[0]
        wanted = name = path.removeprefix(f"{model.name}/")
        again = 1
        while name in named:
            again += 1
            name = f"{wanted}_{again}"
        named[name] = variable
    return named


class Variables:
    """Which variables of a model other ranks hold.

    Such a variable has neither a value nor slots of an optimizer here.

    Attributes:
        are_whole: they have values here, for as long as something reads the whole model.
        are_left_out: a checkpoint of TensorFlow's own may be written without them.
    """

    def __init__(self, rank: int = 0) -> None:
        self.are_whole = False
        self.are_left_out = False
        self._rank = rank
        self._remote: dict[int, Any] = {}  # held, so that no id is used again
        self._holders: dict[int, int] = {}
        self._delayed: dict[int, tuple[Any, Callable[[], Any]]] = {}

    def is_remote(self, variable: Any) -> bool:
        """Whether another rank holds a variable."""
        return id(tf_variable(variable)) in self._remote

    def holder(self, variable: Any) -> int | None:
        """The pipeline rank that holds a variable; None where all ranks have it, as none uses it."""
        return self._holders.get(id(tf_variable(variable)))

    def give_up(
        self, holders: Iterable[tuple[Any, int]], *, is_tracing: Callable[[], bool], ranks: Sequence[int]
    ) -> None:
        """Frees the memory of variables that other ranks hold."""
        for variable, holder in holders:
            own = tf_variable(variable)
            self._holders[id(own)] = holder
            if holder == self._rank or id(own) in self._remote:
                continue
            self._remote[id(own)] = own
            if id(own) in self._delayed:
                del self._delayed[id(own)]
                _private.given_back(own, None)
            name = getattr(variable, "path", None) or own.name
            shape = tuple(own.shape.as_list())
            refusal = (
                f"{name} of shape {shape} has no value on rank {ranks[self._rank]}: rank {ranks[holder]} "
                "holds it. Read it on all ranks under `with model.whole():`, or by model.get_weights(). "
                "Parts of the model may be called as they are, by all ranks: encoder(x), encoder.predict(x), "
                "layer.get_weights()."
            )
            self._free(own, is_tracing, refusal)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """While it lasts, a checkpoint of TensorFlow's own may be written without them."""
        self.are_left_out = True
        try:
            yield
        finally:
            self.are_left_out = False

    def _free(self, own: Any, is_tracing: Callable[[], bool], refusal: str) -> None:
        _private.given_up(own, is_tracing, refusal, is_left_out=lambda: self.are_left_out)

    # ---- variables that are made when they have a rank ----

    def delay(self, own: Any, make: Callable[[], Any], *, is_tracing: Callable[[], bool]) -> None:
        """Notes a variable that was made without a value."""

        def take(value: Any) -> None:
            self._delayed[id(own)] = own, lambda: value

        self._delayed[id(own)] = own, make
        refusal = (
            f"{own.name} of shape {tuple(own.shape.as_list())} has no value yet: it was made under "
            "sw.delayed_initialization(), and gets one on its rank in the first step. Read it after that, "
            "and build the model by model(tf.keras.Input(shape)), which needs no values."
        )
        _private.given_up(own, lambda: is_tracing() or _private.is_building(), refusal, take)

    def make_delayed(self) -> None:
        """Gives the delayed variables that this rank holds their values, in the order of creation."""
        for own, make in self._delayed.values():
            with tf.init_scope():
                _private.given_back(own, make())
        self._delayed.clear()

    @contextmanager
    def lent(self, variables: Iterable[Any], *, is_tracing: Callable[[], bool]) -> Iterator[None]:
        """While it lasts, those of these variables have values that are delayed."""
        found = [self._delayed[id(own)] for own in variables if id(own) in self._delayed]
        try:
            for own, make in found:
                _private.given_back(own, make())
            yield
        finally:
            for own, make in found:
                self.delay(own, make, is_tracing=is_tracing)

    def pairs_here(self, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """The pairs of gradients and variables without those of other ranks."""
        return [(gradient, variable) for gradient, variable in pairs if not self.is_remote(variable)]

    @contextmanager
    def with_values(
        self, values: Iterable[tuple[Any, Any]], *, is_tracing: Callable[[], bool]
    ) -> Iterator[None]:
        """While it lasts, variables of other ranks have values here."""
        back: list[tuple[Any, str]] = []
        try:
            for variable, value in values:
                own = tf_variable(variable)
                back.append((own, own._shardwright_guard[1]))
                _private.given_back(own, value)
            self.are_whole = True
            yield
        finally:
            self.are_whole = False
            for own, refusal in back:
                self._free(own, is_tracing, refusal)
